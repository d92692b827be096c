"""Steer a model at some denoising steps and not at others, with one hook function for both variants.

The steering vector is the difference that another person's name makes in the residual stream; added, it makes the model
describe that person instead. The table says what is written when it acts at all steps, early, late, at masked places
or in one branch of guidance, at which step the run first differs, and how likely the unsteered text stays under the
hook (a forced replay). The diffusion model writes the answer last: early steering changes the order at most, late
steering decides. For the twin it is the other way round, and its masked places, not reached yet, are read by nobody.
OUT gets, for each model, the canvas unsteered and steered at every step.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from diffusion_lens import Fact, HookedDiffusionTransformer, plots
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising.step_hooks import at_steps, on_branch, while_masked


def steering(model: HookedDiffusionTransformer, name: str, here: Fact, there: Fact, places: int) -> Callable[..., Any]:
    """A hook that adds what `there` has more than `here` at the hook point `name`, place by place."""
    blanks = places if model.cfg.has_mask else None
    canvases = [fact.to_query(model, answer_places=blanks, first_tokens=1).tokens[None] for fact in (here, there)]
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
        epilog="The default models are small and come with the library. The real thing is --model smdm-1028m ar-1028m "
        "with two prompts of your own that differ in the subject.",
    )
    parser.add_argument("--model", nargs="+", default=["tiny-mdm", "tiny-ar"], help="names or paths")
    parser.add_argument("--prompt", default=facts[0].prompt, help=f"default: {facts[0].prompt!r}")
    parser.add_argument("--towards", default=facts[5].prompt, help=f"default: {facts[5].prompt!r}")
    parser.add_argument("--layer", type=int, default=1, help="after this block (default 1)")
    parser.add_argument("--places", type=int, default=10, help="blanks after the prompt, and steps (default 10)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture (default: out)")
    args = parser.parse_args(argv)
    # Only the canvas of these two matters here, so their answers are anything.
    here, there = (Fact(prompt, prompt, facts[0].answer) for prompt in (args.prompt, args.towards))

    name, half = f"blocks.{args.layer}.hook_resid_post", args.places // 2
    args.out.mkdir(parents=True, exist_ok=True)
    for each in args.model:
        model = HookedDiffusionTransformer.from_pretrained(each)
        guidance = 0.5 if model.cfg.has_mask else 0.0
        plain = model.denoise(args.prompt, max_new_tokens=args.places, steps=args.places, cfg_scale=guidance)
        steer = steering(model, name, here, there, args.places)
        print(f"{each}, guidance {guidance}\n  {'hook':22} {'parts at':9} {'p(unsteered)':13} text")
        print(f"  {'none':22} {'':9} {plain.confidence.log().sum().exp().item():<13.2g} {plain.text[0]}")
        for label, hook in {
            "every step": steer,
            f"the first {half} steps": at_steps(steer, range(half)),
            f"from step {half} on": at_steps(steer, range(half, plain.n_steps)),
            "the last 2 steps": at_steps(steer, [-2, -1]),
            "masked places only": while_masked(steer),
            "unconditional branch": on_branch(steer, "unconditional"),
        }.items():
            steered = plain.replay(model, canvas="free", fwd_hooks=[(name, hook)])
            forced = plain.replay(model, canvas="forced", fwd_hooks=[(name, hook)])
            step, p = plain.diff(steered).first_step, forced.confidence.log().sum().exp().item()
            parts = "nowhere" if step is None else f"step {step}"
            print(f"  {label:22} {parts:9} {p:<13.2g} {steered.text[0]}")
            if label == "every step":
                figure, (left, right) = plots.panels(1, 2, width=22.0, height=4.5)
                plain.plot(ax=left, title=f"{each}, no hook")
                steered.plot(ax=right, title=f"{each}, steered at {label}")
                path = args.out / f"steer_{Path(each).name}.png"
                figure.savefig(path, dpi=90)
        print(f"  wrote {path}\n")


if __name__ == "__main__":
    main()
