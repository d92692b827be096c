"""Steer a model at selected denoising steps, with one hook function for both variants.

The steering vector is the difference that another person's name makes in the residual stream. Adding it makes the model
describe that person instead. The hook acts at all steps, early, late, at masked positions, or in one branch of
guidance. For each case the table shows the text, the first step at which the run differs, and the probability of the
unsteered text under the hook. This probability comes from a forced replay, which keeps the recorded canvases. The
diffusion model writes the answer last: early steering changes at most the order, late steering changes the answer. For
the autoregressive (AR) baseline it is the opposite. Steering its positions that are not reached yet has no effect,
because no position attends to them.
OUT contains a figure for each model: the canvas without steering and with steering at every step.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from diffusion_lens import Fact, HookedDiffusionTransformer, plots
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising.step_hooks import at_steps, on_branch, while_masked


def steering(
    model: HookedDiffusionTransformer, name: str, here: Fact, there: Fact, n_positions: int
) -> Callable[..., Any]:
    """A hook that adds the difference of the activations on `there` and `here` at the hook point `name`."""
    n_masks = n_positions if model.cfg.has_mask else None
    canvases = [fact.to_query(model, n_masks=n_masks, first_tokens=1).tokens[None] for fact in (here, there)]
    if canvases[0].shape != canvases[1].shape:
        raise SystemExit("the two prompts must have the same number of tokens")
    before, after = (model.run_with_cache(canvas, names_filter=name)[1][name] for canvas in canvases)
    vector = after - before

    def steer(activation: torch.Tensor, hook: Any) -> torch.Tensor:
        steered = activation.clone()
        steered[:, : vector.shape[1]] += vector
        return steered

    return steer


def main(argv: Sequence[str] | None = None) -> None:
    facts = toy_facts.load().facts(trained="p2d", asked="p2d")
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and bundled. For published models, use --model smdm-1028m "
        "ar-1028m with two prompts of your own that differ in the subject.",
    )
    parser.add_argument("--model", nargs="+", default=["tiny-mdm", "tiny-ar"], help="names or paths")
    parser.add_argument("--prompt", default=facts[0].prompt, help=f"default: {facts[0].prompt!r}")
    parser.add_argument("--towards", default=facts[5].prompt, help=f"default: {facts[5].prompt!r}")
    parser.add_argument("--layer", type=int, default=1, help="steer after this block (default 1)")
    parser.add_argument("--positions", type=int, default=10, help="masked positions, and steps (default 10)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figures (default: out)")
    args = parser.parse_args(argv)
    # Only the canvases matter here, so the answers are arbitrary.
    here, there = (Fact(prompt, prompt, facts[0].answer) for prompt in (args.prompt, args.towards))

    name, half = f"blocks.{args.layer}.hook_resid_post", args.positions // 2
    args.out.mkdir(parents=True, exist_ok=True)
    for model_name in args.model:
        model = HookedDiffusionTransformer.from_pretrained(model_name)
        guidance = 0.5 if model.cfg.has_mask else 0.0
        plain = model.denoise(args.prompt, max_new_tokens=args.positions, steps=args.positions, cfg_scale=guidance)
        steer = steering(model, name, here, there, args.positions)
        print(f"{model_name}, guidance {guidance}\n  {'hook':22} {'differs':9} {'p(unsteered)':13} text")
        print(f"  {'none':22} {'':9} {plain.confidence.log().sum().exp().item():<13.2g} {plain.text[0]}")
        for label, hook in {
            "every step": steer,
            f"the first {half} steps": at_steps(steer, range(half)),
            f"from step {half} on": at_steps(steer, range(half, plain.n_steps)),
            "the last 2 steps": at_steps(steer, [-2, -1]),
            "masked positions only": while_masked(steer),
            "unconditional branch": on_branch(steer, "unconditional"),
        }.items():
            steered = plain.replay(model, canvas="free", fwd_hooks=[(name, hook)])
            forced = plain.replay(model, canvas="forced", fwd_hooks=[(name, hook)])
            step, p = plain.diff(steered).first_step, forced.confidence.log().sum().exp().item()
            differs = "never" if step is None else f"step {step}"
            print(f"  {label:22} {differs:9} {p:<13.2g} {steered.text[0]}")
            if label == "every step":
                figure, (left, right) = plots.panels(1, 2, width=22.0, height=4.5)
                plain.plot(ax=left, title=f"{model_name}, no hook")
                steered.plot(ax=right, title=f"{model_name}, steered at {label}")
                path = args.out / f"steer_{Path(model_name).name}.png"
                figure.savefig(path, dpi=90)
        print(f"  wrote {path}\n")


if __name__ == "__main__":
    main()
