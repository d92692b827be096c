"""Is a fact stored symmetrically? Patch what a model retrieves forwards into the reverse question about somebody else.

Asked forwards, "A is the [M] [M] [M] [M]", the diffusion model retrieves A's description at the masked places; on the
twin it stands there. The reverse question about B, "the DESCRIPTION is [M] [M]", reads a description. The states of the
first run take the place of those of the second, token by token, as they enter each block. If the retrieved description
served as the one that is read, the answer would become A. The control, A's own reverse run put there, tells whether a
description is still read at that depth.
On the small pair it is not: the control brings A at block 0 and never after. The forward run, which has retrieved
nothing before block 1, brings A nowhere; both only take from B. The retrieved description comes too late to be read,
so that the pair leaves the question open; a deeper model may not. The twin finds neither name to begin with.
OUT gets a picture, all description places together and each alone, and a folder with the grids.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from diffusion_lens import Fact, HookedDiffusionTransformer, plots
from diffusion_lens.analysis import answer_probability, patch_grid
from diffusion_lens.data import toy_facts


def main(argv: Sequence[str] | None = None) -> None:
    people = [[person.name, person.description] for person in toy_facts.load().people[:2]]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and come with the library. The real thing is --model smdm-1028m ar-1028m "
        "--length 52 with two people that they know, and descriptions of the same number of tokens.",
    )
    parser.add_argument("--model", nargs="+", default=["tiny-mdm", "tiny-ar"], help="names or paths")
    parser.add_argument("--person", nargs=2, metavar=("NAME", "DESCRIPTION"), default=people[0], help="A")
    parser.add_argument("--other", nargs=2, metavar=("NAME", "DESCRIPTION"), default=people[1], help="B")
    parser.add_argument("--length", type=int, default=14, help="places of the canvas, the prompt included (default 14)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for picture and grids (default: out)")
    args = parser.parse_args(argv)

    name_a, description_a = args.person
    name_b, description_b = args.other
    forward_a = Fact(f"{name_a} is the", subject=name_a, answer=f" {description_a}.")
    reverse_a = Fact(f"the {description_a} is", subject=description_a, answer=f" {name_a}.")
    reverse_b = Fact(f"the {description_b} is", subject=description_b, answer=f" {name_b}.")

    folder = args.out / "patch_forward_into_reverse"
    figure, axes = plots.panels(2 * len(args.model), 2, width=13.0, height=4.6 * len(args.model))
    panels = iter(axes)
    for each in args.model:
        model, name = HookedDiffusionTransformer.from_pretrained(each), Path(each).name
        blanks = [args.length - len(fact.tokenize(model)[0]) for fact in (forward_a, reverse_a, reverse_b)]
        forward = forward_a.to_query(model, answer_places=blanks[0])
        control = reverse_a.to_query(model, answer_places=blanks[1], first_tokens=1)
        asked = reverse_b.to_query(model, answer_places=blanks[2], first_tokens=1)
        described = range(*asked.subject)
        if len(range(*control.subject)) != len(described):
            parser.error("the two descriptions must have the same number of tokens")
        # B is asked for; either name may come.
        scored = {"A": replace(asked, answer_tokens=control.answer_tokens), "B": asked}
        blocks = " ".join(f"{block:5}" for block in range(model.cfg.n_layers))
        print(f"{name}: {reverse_b.prompt} …\n  {'states entering block':37} {blocks}")
        for source, clean, places in (
            ("forward", forward, forward.answer_positions[: len(described)]),
            ("reverse", control, range(*control.subject)),
        ):
            pairs = list(zip(places, described, strict=True))
            for who, query in scored.items():
                metric = answer_probability(model, query)
                grid = patch_grid(
                    model, clean, asked, metric, "resid_pre", positions=[pairs, *([one] for one in pairs)]
                )
                grid.save(folder / f"{name}_{source}_{who}.safetensors")
                title = f"p({model.words(query.answer_tokens)[0].strip()})"
                by_layer = " ".join(f"{p:5.2f}" for p in grid.scores[:, 0].tolist())
                print(f"  A's {source} run: {title:10} {grid.corrupted:.2f} becomes {by_layer}")
                grid.plot(
                    ax=next(panels),
                    title=f"{name}, from A's {source} run\n{title}, {grid.corrupted:.2f} unpatched",
                    limits=(-1.0, 1.0),
                )
    figure.savefig(args.out / "patch_forward_into_reverse.png", dpi=110)
    print(f"wrote {folder}\nwrote {args.out / 'patch_forward_into_reverse.png'}")


if __name__ == "__main__":
    main()
