"""Make a masked diffusion model write in another order, and compare the texts and their probabilities.

The prompt begins a sentence that fits four people, so the order of revealing decides how the text continues. A hook at
`denoise.hook_reveal` selects the positions (left to right, right to left), and a hook at `denoise.hook_confidence`
replaces the ranking (least confident first). For each order the example prints the text, the step that revealed each
position, the probability in that order, and the probability of the chain rule from left to right. These two are equal
for "left to right". Neither is the probability of the text: a masked diffusion model assigns one for every order.
OUT contains a figure with one panel per order.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diffusion_lens import HookedDiffusionTransformer, plots
from diffusion_lens.evaluation import chain_rule_nll


def leftmost(reveal: torch.Tensor, hook: Any) -> torch.Tensor:
    """Reveal the first masked position of each row, regardless of the sampler's choice."""
    masked = hook.step.masked
    return masked & (masked.cumsum(dim=1) == 1)


def rightmost(reveal: torch.Tensor, hook: Any) -> torch.Tensor:
    """Reveal the last masked position of each row."""
    masked = hook.step.masked
    return masked & (masked.flip(1).cumsum(dim=1).flip(1) == 1)


def least_confident(confidence: torch.Tensor, hook: Any) -> torch.Tensor:
    """Reverse the ranking. The sampler reveals the same number of positions, but different ones."""
    return 1 - confidence


ORDERS = {
    "its own": [],
    "left to right": [("denoise.hook_reveal", leftmost)],
    "right to left": [("denoise.hook_reveal", rightmost)],
    "least confident first": [("denoise.hook_confidence", least_confident)],
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default model is small and bundled. For a published model, use --model smdm-1028m. "
        "Autoregressive models have one order only.",
    )
    parser.add_argument("--model", default="site-mdm", help="name or path of a masked diffusion model")
    parser.add_argument("--prompt", default="surely the sailor", help="default: 'surely the sailor'")
    parser.add_argument("--positions", type=int, default=7, help="masked positions, and steps (default 7)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure (default: out)")
    args = parser.parse_args(argv)

    model = HookedDiffusionTransformer.from_pretrained(args.model)
    if not model.cfg.has_mask:
        parser.error(f"{args.model} is autoregressive: it can only write from left to right")
    figure, axes = plots.panels(2, 2, width=14.0, height=6.5)
    for (label, hooks), ax in zip(ORDERS.items(), axes, strict=True):
        run = model.denoise(args.prompt, max_new_tokens=args.positions, steps=args.positions, fwd_hooks=hooks)
        # If a hook replaced the confidence, the run records the replacement. Replaying the same canvases without hooks
        # gives the model's own probability of each token when it was revealed.
        run = run.replay(model, canvas="forced")
        given = int(run.given[0].sum())
        along = run.confidence[0].log().sum().exp().item()
        chain = torch.exp(-chain_rule_nll(model, run.tokens[0, :given], run.tokens[0, given:])).item()
        print(f"{label}: {run.text[0]}")
        print("  revealed in step", " ".join(str(step) for step in run.revealed_at[0, given:].tolist()))
        print(f"  probability {along:.4f} in this order, {chain:.4f} from left to right\n")
        run.plot(ax=ax, title=f"{label}: {along:.4f} in this order, {chain:.4f} from left to right")
    args.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out / "orders.png", dpi=90)
    print(f"wrote {args.out / 'orders.png'}")


if __name__ == "__main__":
    main()
