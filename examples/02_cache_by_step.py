"""Cache the residual stream step by step, and see how it moves at one place while the canvas fills.

The place is the one where the answer's first token is read: the first blank of the diffusion model, the last token of
the prompt on the twin. For each step and block you see how far the residual stream there moved since the step before,
relative to its length: 0 is not at all; the words are those written in the step before, which the network now sees. The
diffusion model reads the whole canvas: "of" and the end of the sentence move the place a little, the noun beside it
moves it far. The twin looks back only, so nothing ever moves.
OUT gets the figure.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from diffusion_lens import HookedDiffusionTransformer, plots
from diffusion_lens.data import toy_facts


def main(argv: Sequence[str] | None = None) -> None:
    fact = toy_facts.load().facts(trained="p2d", asked="p2d")[0]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and come with the library; the real thing is "
        "--model smdm-1028m ar-1028m with a --prompt of your own.",
    )
    parser.add_argument("--model", nargs="+", default=["tiny-mdm", "tiny-ar"], help="names or paths")
    parser.add_argument("--prompt", default=fact.prompt, help=f"default: {fact.prompt!r}")
    parser.add_argument("--places", type=int, default=10, help="blanks after the prompt, and steps (default 10)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure (default: out)")
    args = parser.parse_args(argv)

    figure, axes = plots.panels(1, len(args.model), width=6.5 * len(args.model), height=3.6)
    for name, ax in zip(args.model, axes, strict=True):
        model = HookedDiffusionTransformer.from_pretrained(name)
        blank = model.to_tokens(args.prompt).shape[1]  # the first place after the prompt
        read_at = blank if model.cfg.has_mask else blank - 1
        run, cache = model.denoise_with_cache(
            args.prompt,
            names_filter=lambda point: point.endswith("hook_resid_post"),
            pos_slice=slice(read_at, read_at + 1),
            max_bytes=2**30,  # refuses before it runs, should somebody ask for a gigabyte
            max_new_tokens=args.places,
            steps=args.places,
        )
        # stack: [step batch pos d_model]; here one row of the batch and one place.
        blocks = [cache.stack(("resid_post", layer))[:, 0, 0].float().cpu() for layer in range(model.cfg.n_layers)]
        stream = torch.stack(blocks)  # [layer step d_model]
        moved = (stream[:, 1:] - stream[:, :-1]).norm(dim=-1) / stream[:, :-1].norm(dim=-1)
        written = int(run.revealed_at[0, blank])
        steps = list(cache.steps[1:])
        news = [[run.words[int(token)] for token in run.tokens[run.revealed_at == step - 1]] for step in steps]
        labels = [" ".join(word.strip() for word in words) or "-" for words in news]
        print(
            f"{name}: {run.text[0]}\n  {cache.n_bytes:,} bytes kept; read at place {read_at}, written in step {written}"
        )
        print("  step     ", "".join(f"{step:9d}" for step in steps))
        print("  after    ", "".join(f"{label[:8]:>9}" for label in labels))
        for layer, by_step in enumerate(moved.tolist()):
            print(f"  block {layer:3d}", "".join(f"{distance:9.2f}" for distance in by_step))
            ax.plot(steps, by_step, marker="o", markersize=3, label=f"after block {layer}")
        ax.axvline(written, color="0.6", linestyle="--", label=f"written in step {written}")
        ax.set_ylim(-0.02, max(0.5, 1.1 * moved.max().item()))
        ax.set_xticks(steps, [f"{step}\n{label}" for step, label in zip(steps, labels, strict=True)], fontsize=7)
        ax.set_xlabel("denoising step, and what was written in the step before")
        ax.set_ylabel("moved since the step before")
        ax.set_title(f"{name}: residual stream where the answer is read", fontsize=9)
        ax.legend(fontsize=7)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "residual_by_step.png"
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
