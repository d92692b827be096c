"""Trace one fact forward and in reverse, in a masked diffusion model and its autoregressive (AR) baseline.

Both models were trained on the fact in one direction only, "NAME is the DESCRIPTION". The trace corrupts the subject
with noise and restores one state at a time: the residual stream after a block, or the outputs of the MLPs or attention
layers of two neighbouring blocks. The figure shows the probability of the answer's first token. This probability
recovers at the position where the answer is read: the first [MASK] or, on the AR baseline, the end of the prompt. The
subject's own tokens restore little. Attention in the first blocks carries the information there, and on the diffusion
model the last MLPs turn it into a word. In reverse, the diffusion model recalls the answer too, but needs more than one
block. The AR baseline's reverse maps are blank, because its clean run does not contain the answer.
OUT contains a figure and a folder of results for each direction, and for the diffusion model a page with a slider over
the denoising steps. A revealed word of the answer compensates for part of the noise.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffusion_lens import Fact, HookedDiffusionTransformer, plots
from diffusion_lens.analysis import CausalTrace, causal_trace, noise_scale, trace_trajectory
from diffusion_lens.data import toy_facts

KINDS = ("resid", "mlp", "attn")


def print_traces(name: str, traces: Sequence[CausalTrace]) -> None:
    """Print the strongest position of each kind by layer, and the largest effect at the subject."""
    first = traces[0]
    answer = first.record["answer"][0].strip()
    print(f"  {name}: p({answer}) is {first.clean:.2f}, with noise on the subject {first.corrupted:.2f}")
    for trace in traces:
        effect = trace.indirect_effect
        position = int(effect.amax(dim=1).argmax())
        by_layer = " ".join(f"{x:5.2f}" for x in effect[position].tolist())
        subject = effect[slice(*trace.subject)].max().item()
        word = trace.str_tokens[position].strip()
        print(f"    {trace.record['kind']:6} position {position:2} {word:9} {by_layer}   subject at most {subject:.2f}")


def main(argv: Sequence[str] | None = None) -> None:
    person = toy_facts.load().people[0]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and bundled. For published models, use --model smdm-1028m "
        "ar-1028m --window 10 --length 52 with a --person that they know.",
    )
    parser.add_argument("--model", nargs="+", default=["tiny-mdm", "tiny-ar"], help="names or paths")
    parser.add_argument("--person", nargs=2, metavar=("NAME", "DESCRIPTION"), default=[person.name, person.description])
    parser.add_argument("--window", type=int, default=2, help="MLPs or attention layers restored at once (default 2)")
    parser.add_argument("--samples", type=int, default=10, help="noise samples of each trace (default 10)")
    parser.add_argument("--length", type=int, default=14, help="positions of the canvas with the prompt (default 14)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for figures and results (default: out)")
    args = parser.parse_args(argv)

    name, description = args.person
    questions = {
        "forward": Fact(f"{name} is the", subject=name, answer=f" {description}."),
        "reverse": Fact(f"the {description} is", subject=description, answer=f" {name}."),
    }
    models = {Path(name).name: HookedDiffusionTransformer.from_pretrained(name) for name in args.model}
    for direction, fact in questions.items():
        folder, rows = args.out / f"trace_{direction}", []
        print(f"{direction}: {fact.prompt} …")
        for name, model in models.items():
            n_masks = args.length - len(fact.tokenize(model)[0])
            query = fact.to_query(model, n_masks=n_masks, first_tokens=1)
            noise = noise_scale(model, [query])
            settings: dict[str, Any] = {"noise": noise, "samples": args.samples}
            rows.append([causal_trace(model, query, kind, window=args.window, **settings) for kind in KINDS])
            print_traces(name, rows[-1])
            for trace in rows[-1]:
                trace.save(folder / f"{name}_{trace.record['kind']}.safetensors")
            if model.cfg.has_mask:
                run = model.denoise(query.tokens[None], steps=n_masks)  # one token per step
                steps = range(int(run.revealed_at[0, query.answer_positions[0]]) + 1)
                by_step = trace_trajectory(model, query, steps, trajectory=run, **settings)
                by_step.save(folder / f"{name}_steps.safetensors")
                print("    with noise, by step:", " ".join(f"{p:.2f}" for p in by_step.corrupted.tolist()))
                page = by_step.page(f"{name}, {direction}: {fact.prompt} …")
                print(f"wrote {plots.write_page(page, args.out / f'trace_{direction}_{name}_steps.html')}")
        figure = plots.trace_panels(rows, limits=(0.0, 1.0))
        figure.suptitle(f"{direction}: {fact.prompt} …")
        figure.savefig(args.out / f"trace_{direction}.png", dpi=110)
        print(f"wrote {folder}\nwrote {args.out / f'trace_{direction}.png'}\n")


if __name__ == "__main__":
    main()
