"""Average what restoring a state brings back over many facts, by what each token is to the subject, with intervals.

One place of one sentence says little; ROME's figure averages over facts, by the role of a place: first or last token of
the subject, last token of the prompt, masked place of the answer. A fact that the model does not know has nothing to
bring back: it is left out and counted. The diffusion model knows these people in both directions, the twin only as
they were told. Forwards the answer's place holds the answer after one block, backwards the diffusion model takes three.
Known is a fact whose first token comes: in reverse the twin may hit a first name, and go on with a wrong last one.
OUT gets a picture with a curve and its interval for each role, and for each model and direction the result and a folder
with a file a fact. A run that is interrupted goes on from there.
"""

import argparse
import json
import warnings
from collections.abc import Sequence
from pathlib import Path

from diffusion_lens import Fact, HookedDiffusionTransformer, plots
from diffusion_lens.analysis import AverageEffect, average_indirect_effect
from diffusion_lens.data import toy_facts


def print_average(label: str, average: AverageEffect) -> None:
    """How many facts are known, their average total effect, and the roles that bring back most, layer by layer."""
    print(f"{label}: knows {len(average.ids)} of {len(average.ids) + len(average.unknown)} facts")
    if not average.ids:
        print(f"  its p(answer) is {max(average.unknown.values()):.2f} at most: there is nothing to trace")
        return
    low, high = average.ate_interval()
    strongest = average.aie.nan_to_num().amax(dim=1).argsort(descending=True)
    print(f"  average total effect {average.ate:.2f}, 95% interval {low:.2f} to {high:.2f}")
    for role in strongest[:3].tolist():
        by_layer = " ".join(f"{x:5.2f}" for x in average.aie[role].tolist())
        print(f"  {average.roles[role]:15} {by_layer}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and come with the library. The real thing is --model smdm-1028m ar-1028m "
        "--length 52 --file with facts that they know.",
    )
    parser.add_argument("--model", nargs="+", default=["tiny-mdm", "tiny-ar"], help="names or paths")
    parser.add_argument("--facts", type=int, default=8, metavar="N", help="people to ask for (default 8)")
    parser.add_argument(
        "--file", type=Path, help='facts of your own: JSON, [{"prompt": , "subject": , "answer": }, ...]'
    )
    parser.add_argument("--kind", default="resid", choices=["resid", "mlp", "attn"], help="what is restored")
    parser.add_argument("--length", type=int, default=14, help="places of the canvas, the prompt included (default 14)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for picture and results (default: out)")
    args = parser.parse_args(argv)

    if args.file is None:
        ways = (("forwards", "p2d"), ("backwards", "d2p"))
        # Facts come by person, in five templates each: every sixth is another person, in the next template.
        questions = {way: toy_facts.load().facts(trained="p2d", asked=asked)[::6] for way, asked in ways}
    else:
        questions = {"asked": [Fact(**each) for each in json.loads(args.file.read_text(encoding="utf-8"))]}
    figure, axes = plots.panels(
        len(args.model), len(questions), width=6.4 * len(questions), height=3.4 * len(args.model)
    )
    places = iter(axes)
    for name in args.model:
        model = HookedDiffusionTransformer.from_pretrained(name)
        for way, facts in questions.items():
            facts = facts[: args.facts]
            folder = args.out / "average_effect" / f"{Path(name).name}_{way}_{args.kind}_{len(facts)}"
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "the average is over nothing")  # print_average says so
                average = average_indirect_effect(
                    model, facts, args.kind, window=2, length=args.length, first_tokens=1, out=folder
                )
            average.save(folder.with_suffix(".safetensors"))
            print_average(f"{name}, {way}", average)
            ax, title = next(places), f"{name}, {way}: knows {len(average.ids)} of {len(facts)}"
            if average.ids:
                average.plot(ax=ax, title=f"{title}, average total effect {average.ate:.2f}").set_ylim(-0.05, 1)
            else:
                ax.set_axis_off()
                ax.set_title(title, fontsize=10)
    figure.savefig(args.out / "average_effect.png", dpi=110)
    print(f"wrote {args.out / 'average_effect'}\nwrote {args.out / 'average_effect.png'}")


if __name__ == "__main__":
    main()
