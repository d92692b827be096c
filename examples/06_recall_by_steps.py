"""How much does a model recall by the denoising steps it is given? The published table, on either variant.

Held-out questions about people told in one direction only, asked in that direction and against it. A question counts
where the right answer is contained in what was written; under each row stand the published numbers of that cell. Two
conventions name a cell, and read as opposites: Berglund's files say how the people were TOLD ("p2d reverse"), SMDM's
columns what the QUESTION is ("DtN reverse"); both are shown.
The published checkpoint needs its steps: it recalls no description at one step and 43 % at 32, of names 40 and 90 %.
The small pair is too easy for that: its diffusion model recalls all 400 answers at one step as at 32. What it does show
is the curse: asked against the direction it was told, the twin recalls 0 of 200, and 152 times it gives the name or the
description of somebody else.
OUT gets a picture with a panel a model, and for each model a folder with the replies, a file a question; a run that is
interrupted goes on from there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from diffusion_lens import HookedDiffusionTransformer, plots
from diffusion_lens.data.sources import default_source, open_source
from diffusion_lens.evaluation import Recall, recall_by_steps


def print_replies(recall: Recall) -> None:
    """One question of each cell, what was written at the most steps, and what should have been."""
    facts = recall.facts
    for rows in recall.cells.values():
        fact, reply = facts[rows[0]], recall.written[rows[0]][-1]
        right = "" if recall.contained[rows[0], -1] else f", not {fact.answer.strip()!r}"
        print(f"  {fact.prompt} … {reply.strip()!r}{right}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and come with the library. The real thing is --model smdm-1028m-reverse "
        "with --data FOLDER, or without: the 1200 questions are then fetched.",
    )
    parser.add_argument("--model", nargs="+", default=["tiny-mdm", "tiny-ar"], help="names or paths")
    parser.add_argument("--data", help="toy, reversal-curse, a folder of its files, or a .json or .jsonl of facts")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="numbers of denoising steps")
    parser.add_argument("--length", type=int, help="places of the canvas, the prompt included (default: the data's)")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N questions of each cell (default: all)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for picture and replies (default: out)")
    args = parser.parse_args(argv)

    source = open_source(args.data or default_source(args.model[0]))
    # Whoever was told both ways has no reverse, and no published number.
    facts = [fact for fact in source.pick(limit=args.limit) if fact.trained != "both"]
    figure, axes = plots.panels(len(args.model), 1, width=9.0, height=3.5 * len(args.model))
    for name, ax in zip(args.model, axes, strict=True):
        recall = recall_by_steps(
            HookedDiffusionTransformer.from_pretrained(name),
            facts,
            args.steps,
            length=args.length or source.length or 52,
            cfg_scale=source.cfg_scale,
            out=args.out / "recall_by_steps" / Path(name).name,
        )
        print(recall.to_text())
        print_replies(recall)
        print()
        recall.plot(ax=ax)
    figure.savefig(args.out / "recall_by_steps.png", dpi=110)
    print(f"wrote {args.out / 'recall_by_steps'}\nwrote {args.out / 'recall_by_steps.png'}")


if __name__ == "__main__":
    main()
