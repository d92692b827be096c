"""Measure recall by number of denoising steps, as in the published table, on both variants.

The questions are held-out queries about people trained in one direction only, in that direction and in reverse. An
answer counts if the text contains it. The published numbers of each cell appear below its row. Two conventions name a
cell, and they look like opposites: Berglund's files give the direction of TRAINING ("p2d reverse"), SMDM's columns the
direction of the QUESTION ("DtN reverse"). The example shows both.
The published checkpoint needs many steps: it recalls no description with one step and 43 % with 32, and 40 % and 90 %
of the names. The bundled diffusion model needs them for descriptions in reverse: it recalls 84 % with one step and all
with eight. It recalls at least 98 % in the other cells at any number of steps. The bundled models show the reversal
curse: in reverse, the autoregressive (AR) baseline recalls 0 of 150 answers, and 146 times it gives another person's
name or description.
OUT contains a figure with one panel per model, and a folder of replies per model with one file per question. An
interrupted run resumes from there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from diffusion_lens import HookedDiffusionTransformer, plots
from diffusion_lens.data.fact_files import default_source, open_source
from diffusion_lens.evaluation import Recall, recall_by_steps


def print_replies(recall: Recall) -> None:
    """Print one question of each cell, its reply at the largest number of steps, and the answer if it differs."""
    facts = recall.facts
    for rows in recall.cells.values():
        fact, reply = facts[rows[0]], recall.written[rows[0]][-1]
        correction = "" if recall.contained[rows[0], -1] else f", not {fact.answer.strip()!r}"
        print(f"  {fact.prompt} … {reply.strip()!r}{correction}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and bundled. For the published model, use --model "
        "smdm-1028m-reverse with --data FOLDER. Without --data, the 1200 questions are downloaded.",
    )
    parser.add_argument("--model", nargs="+", default=["site-mdm", "site-ar"], help="names or paths")
    parser.add_argument(
        "--data", help="site, toy, reversal-curse, a folder of its files, or a .json or .jsonl of facts"
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="numbers of denoising steps")
    parser.add_argument("--length", type=int, help="positions of the canvas with the prompt (default: the data set's)")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N questions per cell (default: all)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for figure and replies (default: out)")
    args = parser.parse_args(argv)

    source = open_source(args.data or default_source(args.model[0]))
    # People trained in both directions have no reverse query and no published number.
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
