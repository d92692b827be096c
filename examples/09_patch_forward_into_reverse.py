"""Is a fact stored symmetrically? Patch a model's forward run into the reverse question about another person.

On the forward query "A is the [M] [M] [M] [M]", the diffusion model retrieves A's description at the masked positions
(on the autoregressive baseline the canvas contains the description). The reverse query about B, "the DESCRIPTION is
[M] [M]", reads a description. The example replaces the description's states in the second run by those of the first,
token by token, at the input of each block. If the retrieved description worked like the one that is read, the answer
would become A. The control patches A's own reverse run instead. It shows whether the model still reads the description
at that depth.
On the bundled diffusion model the control produces A up to block 3 and never after: block 3 reads the description. The
same block retrieves it in the forward run, so before block 4 there is nothing to patch, and A appears nowhere. Both
patches reduce B. The retrieved description comes one block too late to be read, so this model leaves the question open.
The autoregressive baseline finds neither name.
OUT contains a figure, with all description positions patched together and each alone, and a folder of grids.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from diffusion_lens import Fact, HookedDiffusionTransformer, plots
from diffusion_lens.analysis import answer_probability, patch_grid
from diffusion_lens.data import site_facts


def main(argv: Sequence[str] | None = None) -> None:
    people = [[person.name, person.description] for person in site_facts.load().people[:2]]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and bundled. For published models, use --model smdm-1028m "
        "ar-1028m --length 52 with two people that they know and descriptions of the same number of tokens.",
    )
    parser.add_argument("--model", nargs="+", default=["site-mdm", "site-ar"], help="names or paths")
    parser.add_argument("--person", nargs=2, metavar=("NAME", "DESCRIPTION"), default=people[0], help="A")
    parser.add_argument("--other", nargs=2, metavar=("NAME", "DESCRIPTION"), default=people[1], help="B")
    parser.add_argument("--length", type=int, default=16, help="positions of the canvas with the prompt (default 16)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for figure and grids (default: out)")
    args = parser.parse_args(argv)

    name_a, description_a = args.person
    name_b, description_b = args.other
    forward_a = Fact(f"{name_a} is the", subject=name_a, answer=f" {description_a}.")
    reverse_a = Fact(f"the {description_a} is", subject=description_a, answer=f" {name_a}.")
    reverse_b = Fact(f"the {description_b} is", subject=description_b, answer=f" {name_b}.")

    folder = args.out / "patch_forward_into_reverse"
    figure, axes = plots.panels(2 * len(args.model), 2, width=13.0, height=4.6 * len(args.model))
    panels = iter(axes)
    for model_name in args.model:
        model, name = HookedDiffusionTransformer.from_pretrained(model_name), Path(model_name).name
        n_masks = [args.length - len(fact.tokenize(model)[0]) for fact in (forward_a, reverse_a, reverse_b)]
        forward = forward_a.to_query(model, n_masks=n_masks[0])
        control = reverse_a.to_query(model, n_masks=n_masks[1], first_tokens=1)
        target = reverse_b.to_query(model, n_masks=n_masks[2], first_tokens=1)
        description = range(*target.subject)
        if len(range(*control.subject)) != len(description):
            parser.error("the two descriptions must have the same number of tokens")
        # The query is about B; measure the probability of both names.
        scored = {"A": replace(target, answer_tokens=control.answer_tokens), "B": target}
        blocks = " ".join(f"{block:5}" for block in range(model.cfg.n_layers))
        print(f"{name}: {reverse_b.prompt} …\n  {'states entering block':37} {blocks}")
        for source, clean, positions in (
            ("forward", forward, forward.answer_positions[: len(description)]),
            ("reverse", control, range(*control.subject)),
        ):
            pairs = list(zip(positions, description, strict=True))
            together_and_alone = [pairs, *([pair] for pair in pairs)]
            for person, query in scored.items():
                metric = answer_probability(model, query)
                grid = patch_grid(model, clean, target, metric, "resid_pre", positions=together_and_alone)
                grid.save(folder / f"{name}_{source}_{person}.safetensors")
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
