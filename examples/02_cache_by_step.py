"""Cache the residual stream by step, and measure how it changes at one position as tokens are revealed.

The position is the one where the answer's first token is read: the first masked position on the diffusion model, and
the last token of the prompt on the autoregressive (AR) baseline. For each step and block the example prints the
relative change of the residual stream there since the previous step, below the words that the previous step revealed.
The diffusion model attends to the whole canvas (the prompt and all masked positions): "of" and the end of the sentence
change the state a little, and the place, from which the answer follows, changes it a lot from block 2 on. When the
token itself is revealed, the state changes from block 0 on. The AR baseline attends to earlier positions only, so
nothing changes.
OUT contains the figure.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from diffusion_lens import HookedDiffusionTransformer, plots
from diffusion_lens.data import site_facts


def main(argv: Sequence[str] | None = None) -> None:
    fact = site_facts.load().facts("description", "p2d", "p2d")[0]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and bundled. For published models, use "
        "--model smdm-1028m ar-1028m with your own --prompt.",
    )
    parser.add_argument("--model", nargs="+", default=["site-mdm", "site-ar"], help="names or paths")
    parser.add_argument("--prompt", default=fact.prompt, help=f"default: {fact.prompt!r}")
    parser.add_argument("--positions", type=int, default=8, help="masked positions, and steps (default 8)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure (default: out)")
    args = parser.parse_args(argv)

    figure, axes = plots.panels(1, len(args.model), width=6.5 * len(args.model), height=3.6)
    for name, ax in zip(args.model, axes, strict=True):
        model = HookedDiffusionTransformer.from_pretrained(name)
        first = model.to_tokens(args.prompt).shape[1]  # the first position after the prompt
        read_at = first if model.cfg.has_mask else first - 1
        run, cache = model.denoise_with_cache(
            args.prompt,
            names_filter=lambda point: point.endswith("hook_resid_post"),
            pos_slice=slice(read_at, read_at + 1),
            max_bytes=2**30,  # an error before the run if the cache would exceed one gigabyte
            max_new_tokens=args.positions,
            steps=args.positions,
        )
        # stack returns [step batch pos d_model]; here the batch has one row, and the cache one position.
        blocks = [cache.stack(("resid_post", layer))[:, 0, 0].float().cpu() for layer in range(model.cfg.n_layers)]
        stream = torch.stack(blocks)  # [layer step d_model]
        change = (stream[:, 1:] - stream[:, :-1]).norm(dim=-1) / stream[:, :-1].norm(dim=-1)
        written = int(run.revealed_at[0, first])
        steps = list(cache.steps[1:])
        revealed = [[run.words[int(token)] for token in run.tokens[run.revealed_at == step - 1]] for step in steps]
        labels = [" ".join(word.strip() for word in words) or "-" for words in revealed]
        print(f"{name}: {run.text[0]}")
        print(f"  cache of {cache.n_bytes:,} bytes; read at position {read_at}, written in step {written}")
        print("  step     ", "".join(f"{step:9d}" for step in steps))
        print("  after    ", "".join(f"{label[:8]:>9}" for label in labels))
        for layer, by_step in enumerate(change.tolist()):
            print(f"  block {layer:3d}", "".join(f"{x:9.2f}" for x in by_step))
            ax.plot(steps, by_step, marker="o", markersize=3, label=f"after block {layer}")
        ax.axvline(written, color="0.6", linestyle="--", label=f"written in step {written}")
        ax.set_ylim(-0.02, max(0.5, 1.1 * change.max().item()))
        ax.set_xticks(steps, [f"{step}\n{label}" for step, label in zip(steps, labels, strict=True)], fontsize=7)
        ax.set_xlabel("denoising step, and tokens revealed in the previous step")
        ax.set_ylabel("relative change since the previous step")
        ax.set_title(f"{name}: residual stream where the answer is read", fontsize=9)
        ax.legend(fontsize=7)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "residual_by_step.png"
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
