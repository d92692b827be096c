"""Average the indirect effects of many facts by token role, with confidence intervals.

One position of one sentence is weak evidence. ROME's figure averages over facts by the role of a position: first or
last token of the subject, last token of the prompt, masked position of the answer. A fact that the model does not know
has no effect to measure, so it is excluded and counted. The facts are attributes, and descriptions in both directions.
In all of them the effect is at the subject's last token in the first blocks and where the answer is read in later ones.
The autoregressive (AR) baseline was not trained on the reverse direction. A fact counts as known if the first token of
its answer is the most likely one, even if the model would continue with a wrong last name: in reverse the AR baseline
guesses the first of two names, which is one of twelve, for two of the eight people.
OUT contains a figure with a curve and interval per role, and for each model and question the result and a folder with
one file per fact. An interrupted run resumes from there.
"""

import argparse
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffusion_lens import Fact, HookedDiffusionTransformer, plots
from diffusion_lens.analysis import AverageEffect, average_indirect_effect
from diffusion_lens.data import site_facts


def print_average(label: str, average: AverageEffect) -> None:
    """Print the number of known facts, their average total effect, and the three strongest roles by layer."""
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
        epilog="The default models are small and bundled. For published models, use --model smdm-1028m "
        "ar-1028m --length 52 --file with facts that they know.",
    )
    parser.add_argument("--model", nargs="+", default=["site-mdm", "site-ar"], help="names or paths")
    parser.add_argument("--facts", type=int, default=8, metavar="N", help="number of people (default 8)")
    parser.add_argument("--file", type=Path, help='JSON file of facts, [{"prompt": , "subject": , "answer": }, ...]')
    parser.add_argument("--kind", default="resid", choices=["resid", "mlp", "attn"], help="kind of state to restore")
    parser.add_argument("--samples", type=int, default=10, help="noise samples of each trace (default 10)")
    parser.add_argument("--length", type=int, default=16, help="positions of the canvas with the prompt (default 16)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for figure and results (default: out)")
    args = parser.parse_args(argv)

    if args.file is None:
        directions = (("forward", "p2d"), ("reverse", "d2p"))
        # Each person has five consecutive templates, so every sixth fact is the next person in the next template; and
        # 60 questions about attributes, so every 67th is the next person, another relation and another template.
        world = site_facts.load()
        questions = {"attribute": world.facts("attribute")[::67]}
        questions |= {name: world.facts("description", "p2d", asked)[::6] for name, asked in directions}
    else:
        questions = {"file": [Fact(**fact) for fact in json.loads(args.file.read_text(encoding="utf-8"))]}
    figure, axes = plots.panels(
        len(questions), len(args.model), width=6.4 * len(args.model), height=3.2 * len(questions)
    )
    for column, name in enumerate(args.model):
        panels = iter(axes[column :: len(args.model)])
        model = HookedDiffusionTransformer.from_pretrained(name)
        for direction, facts in questions.items():
            facts = facts[: args.facts]
            folder = args.out / "average_effect" / f"{Path(name).name}_{direction}_{args.kind}_{len(facts)}"
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "the average has no facts")  # print_average says so
                settings: dict[str, Any] = {
                    "window": 2,
                    "length": args.length,
                    "first_tokens": 1,
                    "samples": args.samples,
                }
                average = average_indirect_effect(model, facts, args.kind, **settings, out=folder)
            average.save(folder.with_suffix(".safetensors"))
            print_average(f"{name}, {direction}", average)
            ax, title = next(panels), f"{name}, {direction}: knows {len(average.ids)} of {len(facts)}"
            if average.ids:
                average.plot(ax=ax, title=f"{title}, average total effect {average.ate:.2f}").set_ylim(-0.05, 1)
            else:
                ax.set_axis_off()
                ax.set_title(title, fontsize=10)
    figure.savefig(args.out / "average_effect.png", dpi=110)
    print(f"wrote {args.out / 'average_effect'}\nwrote {args.out / 'average_effect.png'}")


if __name__ == "__main__":
    main()
