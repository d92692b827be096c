"""Trace one fact forward and in reverse, in a masked diffusion model and its autoregressive (AR) baseline.

The fact is a person's description, which both models were trained on in one direction only, "NAME is the DESCRIPTION";
before it, an attribute of the person is traced, "NAME plays". The trace corrupts the subject with noise and restores
one state at a time: the residual stream after a block, or the outputs of the MLPs or attention layers of two
neighbouring blocks. The figures show the probability of the answer's first token. It recovers at two sites: at the last
token of the subject in the first blocks, where MLPs and attention act, and later where the answer is read, at the first
[MASK] or, on the AR baseline, at the end of the prompt. Attention carries it there in block 3 of the diffusion model
and block 2 of the AR baseline. On the diffusion model the reverse question has the same two sites, with the last token
of the description as the first. The AR baseline's reverse maps are blank, because it does not know the answer.
OUT contains a figure and a folder of results for each question, and for the diffusion model a page with a slider over
the denoising steps. A revealed word of the answer can compensate for the noise.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diffusion_lens import Fact, HookedDiffusionTransformer, plots
from diffusion_lens.analysis import CausalTrace, causal_trace, noise_scale, trace_trajectory
from diffusion_lens.data import site_facts

KINDS = ("resid", "mlp", "attn")


def print_traces(name: str, traces: Sequence[CausalTrace], read_at: int) -> None:
    """Print the effects by layer at the last token of the subject, and where the answer is read."""
    first = traces[0]
    answer = first.record["answer"][0].strip()
    print(f"  {name}: p({answer}) is {first.clean:.2f}, with noise on the subject {first.corrupted:.2f}")
    for trace in traces:
        subject, read = (
            f"{trace.str_tokens[position].strip():9} {' '.join(f'{x:5.2f}' for x in trace.indirect_effect[position])}"
            for position in (trace.subject[1] - 1, read_at)
        )
        print(f"    {trace.record['kind']:6} {subject}   read: {read}")


def main(argv: Sequence[str] | None = None) -> None:
    known = site_facts.load().people[0]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and bundled. For published models, use --model smdm-1028m "
        "ar-1028m --window 10 --length 52 with a --person that they know.",
    )
    parser.add_argument("--model", nargs="+", default=["site-mdm", "site-ar"], help="names or paths")
    parser.add_argument("--person", nargs=2, metavar=("NAME", "DESCRIPTION"), help="default: a fictional person")
    parser.add_argument("--attribute", nargs=2, metavar=("VERB", "VALUE"), help="an attribute of this --person")
    parser.add_argument("--window", type=int, default=2, help="MLPs or attention layers restored at once (default 2)")
    parser.add_argument("--samples", type=int, default=10, help="noise samples of each trace (default 10)")
    parser.add_argument("--length", type=int, default=16, help="positions of the canvas with the prompt (default 16)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for figures and results (default: out)")
    args = parser.parse_args(argv)

    name, description = args.person or (known.name, known.description)
    attribute = args.attribute or (None if args.person else ("plays", known.values[0]))
    questions = {"attribute": Fact(f"{name} {attribute[0]}", name, f" {attribute[1]}")} if attribute else {}
    questions |= {
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
            print_traces(name, rows[-1], read_at=int(model.readout.rows(torch.tensor(query.answer_positions[0]))))
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
