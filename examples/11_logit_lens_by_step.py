"""At which layer, and at which step of denoising, does the answer become the likeliest token?

The logit lens reads the residual stream before each block, and after the last, as if the network ended there. The
output has the layer from which on the first token of the answer leads, for several people until it is revealed; "-" is
nowhere. In the diffusion model nearly all attributes and descriptions lead from layer 4 or 5 on, after the block that
reads the subject, and names in reverse from layer 4, 5 or 6 on. In the autoregressive (AR) baseline they lead by layer
3; names in reverse do not, but for lucky guesses. A tuned lens, fitted on other people, is nearer to the last layer.
OUT contains a figure for each model, with the likeliest token in each cell, and the lenses.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from diffusion_lens import Fact, HookedDiffusionTransformer, plots
from diffusion_lens.analysis import LogitLens, fit_translators, logit_lens
from diffusion_lens.data import site_facts
from diffusion_lens.denoising.trajectory import Trajectory

# Stride to the next person and another template, and arguments of `SiteFacts.facts`.
QUESTIONS = {
    "attribute": (67, "attribute", "p2d"),
    "forward": (6, "description", "p2d", "p2d"),
    "reverse": (6, "description", "p2d", "d2p"),
}


def lens_of_answers(model: HookedDiffusionTransformer, facts: Sequence[Fact], run: Trajectory) -> LogitLens:
    """The lens of a run with one row per fact; the target is the first token of the answer, at its own position."""
    positions = range(1, run.tokens.shape[1])
    targets = torch.full((len(facts), len(positions)), -1)
    for row, fact in enumerate(facts):
        query = fact.to_query(model)
        targets[row, positions.index(query.answer_positions[0])] = query.answer_tokens[0]
    return logit_lens(model, run, positions=positions, targets=targets)


def print_layers(lens: LogitLens, run: Trajectory) -> None:
    """Print the layer from which on each answer leads, for the steps until the last of the answers is revealed."""
    row, at, _ = (lens.targets >= 0).nonzero(as_tuple=True)
    revealed_at = run.revealed_at[row, torch.tensor(lens.positions)[at]].tolist()
    for index, step in enumerate(lens.steps[: max(revealed_at) + 1]):
        first = lens.first_layer()[index, row, at, 0].tolist()
        shown = ["." if step > revealed else layer for layer, revealed in zip(first, revealed_at, strict=True)]
        print(f"  step {step:2}: {' '.join(map(str, shown)).replace('-1', '-')}")
    print(f"  revealed in step {' '.join(map(str, revealed_at))}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and bundled. For published models, use --model smdm-1028m ar-1028m "
        "--length 52 with a --prompt of your own and its answer.",
    )
    parser.add_argument("--model", nargs="+", default=["site-mdm", "site-ar"], help="names or paths")
    parser.add_argument("--people", type=int, default=8, help="number of people (default 8)")
    parser.add_argument("--prompt", nargs=2, metavar=("PROMPT", "ANSWER"), help="a prompt of your own and its answer")
    parser.add_argument("--length", type=int, default=16, help="positions of the canvas with the prompt (default 16)")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps (default 8)")
    parser.add_argument("--iterations", type=int, default=40, help="updates of the tuned lens (default 40)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the files (default: out)")
    args = parser.parse_args(argv)
    people = site_facts.load()
    questions = {name: people.facts(*arguments)[::stride] for name, (stride, *arguments) in QUESTIONS.items()}
    others = [fact.prompt for kind in ("attribute", "description") for fact in people.facts(kind, "both")[::67]]
    if args.prompt:
        questions, others = {"prompt": [Fact(args.prompt[0], *args.prompt)]}, args.prompt[:1]
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.model:
        model, label = HookedDiffusionTransformer.from_pretrained(name), Path(name).name
        figure, axes = plots.panels(len(questions), 2, width=12.8, height=3.8 * len(questions))
        canvases = model.denoise(others, length=args.length, steps=args.steps)
        translators = fit_translators(model, canvases, iterations=args.iterations, learning_rate=3e-3)
        for row, (direction, facts) in enumerate(questions.items()):
            facts = facts[: args.people]
            run = model.denoise([fact.prompt for fact in facts], length=args.length, steps=args.steps)
            lens = lens_of_answers(model, facts, run)
            print(f"{label}, {direction}: layer from which on the answer leads, for {len(facts)} prompts")
            print_layers(lens, run)
            for kind, one in (("direct", lens), ("tuned", logit_lens(model, run, translators=translators))):
                kl = one.kl.movedim(1, -1)[one.masked].nanmean(dim=0).tolist()
                print(f"  KL from the last layer, {kind:6} {' '.join(f'{nats:5.2f}' for nats in kl)}")
            print(f"wrote {lens.save(args.out / f'logit_lens_{label}_{direction}.safetensors')}")
            position = lens.positions[int((lens.targets[0] >= 0).nonzero()[0, 0])]
            lens.plot(position, ax=axes[2 * row], title=f"{label}, {direction}: position {position} at every step")
            step = lens.steps[0 if model.cfg.has_mask else -1]
            lens.plot(step=step, ax=axes[2 * row + 1], title=f"every position at step {step}")
        figure.savefig(args.out / f"logit_lens_{label}.png", dpi=90)
        print(f"wrote {args.out / f'logit_lens_{label}.png'}\n")


if __name__ == "__main__":
    main()
