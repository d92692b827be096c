"""Watch a masked diffusion model and its autoregressive (AR) baseline write a fact.

Both models saw a fictional person only in sentences of the form "NAME is DESCRIPTION". The example queries both
directions. It prints the canvas (the prompt and the positions to fill) after every step that changed it, and then the
answer. The diffusion model writes the end of the sentence first and the name or description last, and answers both
directions correctly. The AR baseline writes from left to right and does not find the name from the description. OUT
contains a figure (.png) and a browser page (.html) of each run.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from diffusion_lens import Fact, HookedDiffusionTransformer
from diffusion_lens.data import site_facts
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.evaluation import chain_rule_nll


def print_canvases(run: Trajectory) -> None:
    """Print the initial canvas and the canvas after each step that changed it. Dots are masked positions."""
    canvases, given = run.str_canvases(), int(run.given[0].sum())
    for step, canvas in enumerate(canvases):
        if not step or canvas != canvases[step - 1]:
            words = ["·" if word in ("[MASK]", "") else word.strip() for word in canvas[given:]]
            print(f"  {f'step {step - 1}' if step else 'start':8}", " ".join(words))


def print_answers(model: HookedDiffusionTransformer, fact: Fact, run: Trajectory) -> None:
    """Print the written answer and the correct one, each with its probability on a canvas of the same length.

    The chain rule scores every position after the prompt. The text after the correct answer is the model's own.
    """
    row, given = run.tokens[0], int(run.given[0].sum())
    right = torch.tensor(fact.tokenize(model)[1], device=row.device)
    rest = row[given + len(right) :]
    written = row[given : len(row) - len(rest)]
    verdict = "right" if torch.equal(written, right) else "wrong"
    for label, answer in (("wrote", written), ("fact", right)):
        p = torch.exp(-chain_rule_nll(model, row[:given], torch.cat([answer, rest]))).item()
        print(f"  {label:8} {model.to_string(answer).strip()!r} with probability {p:.3f}", end="")
        print(f": {verdict}" if label == "wrote" else "")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and bundled. For published models, use --model smdm-1028m "
        "ar-1028m with your own --prompt and --answer.",
    )
    parser.add_argument("--model", nargs="+", default=["site-mdm", "site-ar"], help="names or paths")
    parser.add_argument("--prompt", help="prompt to use instead of the fictional fact")
    parser.add_argument("--answer", help="correct answer to the prompt, with its leading space")
    parser.add_argument("--positions", type=int, help="masked positions after the prompt (default: the answer and one)")
    parser.add_argument("--steps", type=int, default=8, help="number of denoising steps (default 8)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for figures and pages (default: out)")
    args = parser.parse_args(argv)
    if (args.prompt is None) != (args.answer is None):
        parser.error("--prompt and --answer belong together")
    if args.prompt is None:
        people = site_facts.load()
        directions = (("forward", "p2d"), ("reverse", "d2p"))
        questions = {direction: people.facts("description", "p2d", asked)[0] for direction, asked in directions}
    else:
        questions = {"prompt": Fact(args.prompt, args.prompt, args.answer)}

    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.model:
        model = HookedDiffusionTransformer.from_pretrained(name)
        for direction, fact in questions.items():
            print(f"{name}, {direction}: {fact.prompt} …")
            positions = args.positions or len(fact.tokenize(model)[1]) + 1  # the answer, and the end token
            run = model.denoise(fact.prompt, max_new_tokens=positions, steps=args.steps)
            print_canvases(run)
            print_answers(model, fact, run)
            picture, page = (args.out / f"watch_{Path(name).name}_{direction}.{suffix}" for suffix in ("png", "html"))
            run.plot(title=f"{name}, {direction}").figure.savefig(picture, dpi=110)
            page.write_text(run.to_html(), encoding="utf-8")
            print(f"  wrote {picture}\n  wrote {page}\n")


if __name__ == "__main__":
    main()
