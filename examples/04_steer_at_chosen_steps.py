"""Compute a steering vector for each denoising step, and steer at selected steps, on both variants.

The vector of a step is the mean state in runs about people of one role ("clerk"), minus the mean in runs about other
people, at the rows that predict the next tokens. `SteeringVectors.hooks` returns plain hooks that add the vector of the
step; the example attaches them at every step, at early or late steps, at masked positions, in one branch of guidance,
and in a replay that begins at a later step. For each case the table shows the first step at which the run differs, the
probability of the unsteered text under the hook, and the text. This probability comes from a forced replay, which keeps
the recorded canvases.
The diffusion model writes the role in its last step: early steering changes nothing, late steering makes it write
"clerk". The autoregressive (AR) baseline writes the role first, so for it only early steering does, and the place
becomes that of a clerk. Steering positions that the AR baseline has not reached has no effect, because no position
attends to them.
OUT contains a figure for each model: the canvas without steering and with it, and the norms of the vectors.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from diffusion_lens import HookedDiffusionTransformer, plots
from diffusion_lens.analysis import difference_of_means
from diffusion_lens.data import site_facts
from diffusion_lens.interventions import on_branch


def main(argv: Sequence[str] | None = None) -> None:
    facts = site_facts.load().facts("description", asked="p2d")
    clerks, others = ([f.prompt for f in facts if f.description.startswith("clerk") is yes] for yes in (True, False))
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and bundled. For published models, use --model smdm-1028m "
        "ar-1028m with --positive, --negative and --prompt of your own.",
    )
    parser.add_argument("--model", nargs="+", default=["site-mdm", "site-ar"], help="names or paths")
    parser.add_argument("--positive", nargs="+", default=clerks, help="prompts of the positive runs")
    parser.add_argument("--negative", nargs="+", default=others[::20], help="prompts of the negative runs")
    parser.add_argument("--prompt", default=others[-1], help=f"prompt of the steered run (default: {others[-1]!r})")
    parser.add_argument("--layer", type=int, default=4, help="steer after this block (default 4)")
    parser.add_argument("--scale", type=float, default=1.5, help="factor of the vectors (default 1.5)")
    parser.add_argument("--positions", type=int, default=5, help="masked positions, and steps (default 5)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figures (default: out)")
    args = parser.parse_args(argv)

    name, n_steps, half = f"blocks.{args.layer}.hook_resid_post", args.positions, args.positions // 2
    args.out.mkdir(parents=True, exist_ok=True)
    for model_name in args.model:
        model = HookedDiffusionTransformer.from_pretrained(model_name)
        positive, negative = (
            model.denoise(prompts, max_new_tokens=n_steps, steps=n_steps) for prompts in (args.positive, args.negative)
        )
        vectors = difference_of_means(model, positive, negative, name, positions="predicting")

        guidance = 0.5 if model.cfg.has_mask else 0.0
        run, cache = model.denoise_with_cache(  # one branch is cached, at two steps only
            args.prompt,
            max_new_tokens=n_steps,
            steps=n_steps,
            cfg_scale=guidance,
            names_filter=name,
            steps_filter=[0, -1],
        )
        print(f"{model_name}, guidance {guidance}; {vectors}")
        for step, state in zip(cache.steps, cache.stack(name), strict=True):
            print(f"  step {step}: norm {vectors.norm[name][step]:.1f}, of a state {state.norm(dim=-1).mean():.1f}")
        print(f"  {'steered':22} {'differs':9} {'p(unsteered)':13} text")
        print(f"  {'never':22} {'':9} {run.confidence.log().sum().exp().item():<13.2g} {run.text[0]}")
        for label, hooks in {
            "every step": vectors.hooks(args.scale),
            f"the first {half} steps": vectors.hooks(args.scale, steps=range(half)),
            f"from step {half} on": vectors.hooks(args.scale, steps=range(half, n_steps)),
            "masked positions only": vectors.hooks(args.scale, positions="masked"),
            "unconditional branch": [(n, on_branch(fn, "unconditional")) for n, fn in vectors.hooks(args.scale)],
            "every step, reversed": vectors.hooks(-args.scale),
        }.items():
            steered = run.replay(model, canvas="free", fwd_hooks=hooks)
            p = run.replay(model, canvas="forced", fwd_hooks=hooks).confidence.log().sum().exp().item()
            step = run.diff(steered).first_step
            print(f"  {label:22} {'never' if step is None else f'step {step}':9} {p:<13.2g} {steered.text[0]}")
            if label == "every step":
                figure, (left, middle, right) = plots.panels(3, 1, width=9.5, height=10.0)
                run.plot(ax=left, title=f"{model_name}, not steered")
                steered.plot(ax=middle, title=f"{model_name}, steered at every step")
                vectors.plot(ax=right, title="norm of the steering vector of each step")
                path = args.out / f"steer_{Path(model_name).name}.png"
                figure.savefig(path, dpi=90)
        branch = run.from_step(n_steps - 2).replay(model, canvas="free", fwd_hooks=vectors.hooks(args.scale))
        print(f"  {'replay of 2 last steps':22} {'':9} {'':13} {branch.text[0]}\n  wrote {path}\n")


if __name__ == "__main__":
    main()
