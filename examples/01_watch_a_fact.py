"""Watch a fact being written, by a masked diffusion model and by its autoregressive twin.

One made-up person, learned only as "NAME is DESCRIPTION", is asked for in both directions. For each model and direction
you see the canvas after every step that changed it, then the answer. The diffusion model writes the end of the sentence
first and its answer last, and gets both directions right; the twin writes from left to right and does not find the name
from the description. In OUT each run is a picture (.png) and a page for the browser (.html).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from diffusion_lens import Fact, HookedDiffusionTransformer
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.evaluation import chain_rule_nll


def print_canvases(run: Trajectory) -> None:
    """A line for the start and for each step that changed something; dots are blanks."""
    canvases, given = run.str_canvases(), int(run.given[0].sum())
    for step, canvas in enumerate(canvases):
        if not step or canvas != canvases[step - 1]:
            words = ["·" if word in ("[MASK]", "") else word.strip() for word in canvas[given:]]
            print(f"  {f'step {step - 1}' if step else 'start':8}", " ".join(words))


def print_answers(model: HookedDiffusionTransformer, fact: Fact, run: Trajectory) -> None:
    """What was written and what should have been, each with its probability on the same number of places.

    The chain rule scores every place after the prompt; behind the right answer stands what the model itself wrote.
    The number of places matters: the small models know canvases of 14, and find little likely on one that is cut short.
    """
    row, given = run.tokens[0], int(run.given[0].sum())
    right = torch.tensor(fact.tokenize(model)[1], device=row.device)
    rest = row[given + len(right) :]
    wrote = row[given : len(row) - len(rest)]
    verdict = "right" if torch.equal(wrote, right) else "wrong"
    for label, answer in (("wrote", wrote), ("fact", right)):
        p = torch.exp(-chain_rule_nll(model, row[:given], torch.cat([answer, rest]))).item()
        print(f"  {label:8} {model.to_string(answer).strip()!r} with probability {p:.3f}", end="")
        print(f": {verdict}" if label == "wrote" else "")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small, made for this, and come with the library. The real thing is "
        "--model smdm-1028m ar-1028m with a --prompt and an --answer of your own.",
    )
    parser.add_argument("--model", nargs="+", default=["tiny-mdm", "tiny-ar"], help="names or paths")
    parser.add_argument("--prompt", help="ask this instead of the made-up fact")
    parser.add_argument("--answer", help="what should follow the prompt, with its leading space")
    parser.add_argument("--places", type=int, default=8, help="blanks after the prompt (default 8)")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps (default 8)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for pictures and pages (default: out)")
    args = parser.parse_args(argv)
    if (args.prompt is None) != (args.answer is None):
        parser.error("--prompt and --answer belong together")
    if args.prompt is None:
        people = toy_facts.load()
        ways = (("forwards", "p2d"), ("backwards", "d2p"))
        questions = {way: people.facts(trained="p2d", asked=asked)[0] for way, asked in ways}
    else:
        questions = {"asked": Fact(args.prompt, args.prompt, args.answer)}

    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.model:
        model = HookedDiffusionTransformer.from_pretrained(name)
        for way, fact in questions.items():
            print(f"{name}, {way}: {fact.prompt} …")
            run = model.denoise(fact.prompt, max_new_tokens=args.places, steps=args.steps)
            print_canvases(run)
            print_answers(model, fact, run)
            picture, page = (args.out / f"watch_{Path(name).name}_{way}.{kind}" for kind in ("png", "html"))
            run.plot(title=f"{name}, {way}").figure.savefig(picture, dpi=110)
            page.write_text(run.to_html(), encoding="utf-8")
            print(f"  wrote {picture}\n  wrote {page}\n")


if __name__ == "__main__":
    main()
