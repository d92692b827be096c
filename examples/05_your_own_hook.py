"""Write a hook of ten lines that cuts the attention from the answer's row to the subject, on both variants.

`cut_attention` is a plain TransformerLens hook function. It removes the attention of one row to the subject and
distributes it over the other positions. It works on both models, in both directions, in every block, in a single
forward pass and, wrapped in `at_steps`, in the denoising loop. `model.readout` gives the row at which the answer is
read. The example prints the remaining probability of the answer's first token. One block reads the subject: block 3 of
the diffusion model, forward and in reverse, and block 2 of the autoregressive (AR) baseline; a cut in any other block
leaves most of the probability. In the loop, cuts matter until the token is written. In the forward query they do not
matter to the diffusion model even then, because it writes the place before the role, and the place is enough.
OUT contains a figure.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from diffusion_lens import Fact, HookedDiffusionTransformer, plots
from diffusion_lens.data import site_facts
from diffusion_lens.interventions import at_steps


def cut_attention(row: int, subject: slice) -> Callable[..., Any]:
    """A hook for `attn.hook_pattern` that moves the attention of `row` from the subject to all other positions."""

    def hook_fn(pattern: torch.Tensor, hook: Any) -> torch.Tensor:
        cut = pattern.clone()  # [batch head query key]
        cut[:, :, row, subject] = 0
        return cut / cut.sum(dim=-1, keepdim=True)

    return hook_fn


def main(argv: Sequence[str] | None = None) -> None:
    person = site_facts.load().people[0]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and bundled. For published models, use --model smdm-1028m "
        "ar-1028m --length 52 with a --person that they know.",
    )
    parser.add_argument("--model", nargs="+", default=["site-mdm", "site-ar"], help="names or paths")
    parser.add_argument("--person", nargs=2, metavar=("NAME", "DESCRIPTION"), default=[person.name, person.description])
    parser.add_argument("--length", type=int, default=16, help="positions of the canvas with the prompt (default 16)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure (default: out)")
    args = parser.parse_args(argv)

    name, description = args.person
    questions = {
        "forward": Fact(f"{name} is the", subject=name, answer=f" {description}."),
        "reverse": Fact(f"the {description} is", subject=description, answer=f" {name}."),
    }
    figure, axes = plots.panels(1, len(questions), width=10.0, height=3.0)
    for model_name in args.model:
        model = HookedDiffusionTransformer.from_pretrained(model_name)
        points = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
        cuts = {"none": [], **{str(layer): [point] for layer, point in enumerate(points)}, "all": points}
        for (direction, fact), ax in zip(questions.items(), axes, strict=True):
            n_masks = args.length - len(fact.tokenize(model)[0])
            query = fact.to_query(model, n_masks=n_masks, first_tokens=1)
            position, answer = query.answer_positions[0], query.answer_tokens[0]
            label = f"p({model.words([answer])[0].strip()})"
            row = int(model.readout.rows(torch.tensor(position)))  # where the token at `position` is read
            hook = cut_attention(row, slice(*query.subject))
            probabilities = []
            for cut in cuts.values():
                logits = model.run_with_hooks(query.tokens[None], fwd_hooks=[(point, hook) for point in cut])
                probabilities.append(logits[0, row].softmax(dim=-1)[answer].item())
            print(
                f"{model_name}, {direction}: {fact.prompt} …\n  blocks with the cut     ",
                *(f"{cut:>5}" for cut in cuts),
            )
            print(f"  {label:24}", *(f"{p:5.2f}" for p in probabilities))
            ax.plot(list(cuts), probabilities, marker="o", linestyle=":", label=model_name)
            ax.set(title=fact.prompt + " …", xlabel="blocks with the cut", ylabel="p(answer)", ylim=(-0.05, 1.05))

            run = model.denoise(fact.prompt, max_new_tokens=n_masks, steps=n_masks)
            half, p = n_masks // 2, [f"{run.confidence[0, position]:.2f}"]
            for steps in (range(half), range(half, n_masks)):
                hooks = [(point, at_steps(hook, steps)) for point in points]
                p.append(f"{run.replay(model, canvas='forced', fwd_hooks=hooks).confidence[0, position]:.2f}")
            word, step = run.words[int(run.tokens[0, position])].strip(), int(run.revealed_at[0, position])
            print(f"  in the loop p({word}) is {p[0]}, cut in the first {half} steps {p[1]}, cut later {p[2]};")
            print(f"  the loop writes it in step {step} of {run.n_steps}\n")
    axes[-1].legend()
    args.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out / "your_own_hook.png", dpi=110)
    print(f"wrote {args.out / 'your_own_hook.png'}")


if __name__ == "__main__":
    main()
