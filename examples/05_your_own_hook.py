"""A hook of your own, ten lines, the same on both variants: where the answer is read, nobody looks at the subject.

`look_away` is a plain hook function of TransformerLens's kind: it takes the attention of one row to the subject and
shares it out among the other places. It serves both models, both directions, every block, a single run and, wrapped
in `at_steps`, the denoising loop; which row it is on which model, `model.readout` says.
What is printed is how probable the answer's first token stays. Forwards the subject is read in block 0, by both models,
and what later blocks see of it is not missed; backwards the diffusion model misses block 2 as well. In the loop the
diffusion model writes this token last, so its late steps count; the twin writes it first.
OUT gets a picture.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from diffusion_lens import Fact, HookedDiffusionTransformer, plots
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising.step_hooks import at_steps


def look_away(reader: int, subject: slice) -> Callable[..., Any]:
    """For `attn.hook_pattern`: row `reader` pays no attention to the subject, and more to all else."""

    def hook_fn(pattern: torch.Tensor, hook: Any) -> torch.Tensor:
        cut = pattern.clone()  # [batch head query key]
        cut[:, :, reader, subject] = 0
        return cut / cut.sum(dim=-1, keepdim=True)

    return hook_fn


def main(argv: Sequence[str] | None = None) -> None:
    person = toy_facts.load().people[0]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and come with the library. The real thing is --model smdm-1028m ar-1028m "
        "--length 52 with a --person that they know.",
    )
    parser.add_argument("--model", nargs="+", default=["tiny-mdm", "tiny-ar"], help="names or paths")
    parser.add_argument("--person", nargs=2, metavar=("NAME", "DESCRIPTION"), default=[person.name, person.description])
    parser.add_argument("--length", type=int, default=14, help="places of the canvas, the prompt included (default 14)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture (default: out)")
    args = parser.parse_args(argv)

    name, description = args.person
    questions = {
        "forwards": Fact(f"{name} is the", subject=name, answer=f" {description}."),
        "backwards": Fact(f"the {description} is", subject=description, answer=f" {name}."),
    }
    figure, axes = plots.panels(1, len(questions), width=10.0, height=3.0)
    for each in args.model:
        model = HookedDiffusionTransformer.from_pretrained(each)
        points = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
        cuts = {"none": [], **{str(layer): [point] for layer, point in enumerate(points)}, "all": points}
        for (way, fact), ax in zip(questions.items(), axes, strict=True):
            blanks = args.length - len(fact.tokenize(model)[0])
            query = fact.to_query(model, answer_places=blanks, first_tokens=1)
            place, answer = query.answer_positions[0], query.answer_tokens[0]
            asked_for = f"p({model.words([answer])[0].strip()})"
            row = int(model.readout.rows(torch.tensor(place)))  # where the token at `place` is read
            hook = look_away(row, slice(*query.subject))
            stays = []
            for cut in cuts.values():
                logits = model.run_with_hooks(query.tokens[None], fwd_hooks=[(point, hook) for point in cut])
                stays.append(logits[0, row].softmax(dim=-1)[answer].item())
            print(f"{each}, {way}: {fact.prompt} …\n  blocks without the look ", *(f"{cut:>5}" for cut in cuts))
            print(f"  {asked_for:24}", *(f"{p:5.2f}" for p in stays))
            ax.plot(list(cuts), stays, marker="o", linestyle=":", label=each)
            ax.set(title=fact.prompt + " …", xlabel="blocks without the look", ylabel="p(answer)", ylim=(-0.05, 1.05))

            run = model.denoise(fact.prompt, max_new_tokens=blanks, steps=blanks)
            half, said = blanks // 2, [f"{run.confidence[0, place]:.2f}"]
            for steps in (range(half), range(half, blanks)):
                hooks = [(point, at_steps(hook, steps)) for point in points]
                said.append(f"{run.replay(model, canvas='forced', fwd_hooks=hooks).confidence[0, place]:.2f}")
            word = run.words[int(run.tokens[0, place])].strip()
            print(
                f"  in the loop p({word}) is {said[0]}, without early looks {said[1]}, without late looks {said[2]}\n"
            )
    axes[-1].legend()
    args.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out / "your_own_hook.png", dpi=110)
    print(f"wrote {args.out / 'your_own_hook.png'}")


if __name__ == "__main__":
    main()
