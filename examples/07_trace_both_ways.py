"""Trace one fact forwards and backwards, in a masked diffusion model and in its autoregressive twin.

It was told in one direction only, "NAME is the DESCRIPTION". Noise hides the subject; then one state at a time is put
back, the residual stream after a block or what the MLPs or the attention of two neighbouring blocks write, and the
picture shows how probable that makes the answer's first token. It comes back where it is read, at the first [MASK] or,
on the twin, at the end of the prompt; the subject's own tokens bring back little. Attention carries it there in the
first blocks, and on the diffusion model the last MLPs make a word of it. Backwards the diffusion model recalls as well,
but is not done after one block; the twin's maps are blank: what was never there cannot be restored.
OUT gets a picture and a folder with the numbers for each direction, and for the diffusion model a page with a slider
over the denoising steps: a word of the answer that stands there already makes up for part of the noise.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from diffusion_lens import Fact, HookedDiffusionTransformer, plots
from diffusion_lens.analysis import CausalTrace, causal_trace, noise_scale, trace_trajectory
from diffusion_lens.data import toy_facts

KINDS = ("resid", "mlp", "attn")


def print_traces(name: str, traces: Sequence[CausalTrace]) -> None:
    """For each kind the place that brings back most, layer by layer, and the most that the subject brings back."""
    first = traces[0]
    answer = first.record["answer"][0].strip()
    print(f"  {name}: p({answer}) is {first.clean:.2f}, with noise on the subject {first.corrupted:.2f}")
    for trace in traces:
        effect = trace.indirect_effect
        place = int(effect.amax(dim=1).argmax())
        by_layer = " ".join(f"{x:5.2f}" for x in effect[place].tolist())
        subject = effect[slice(*trace.subject)].max().item()
        word = trace.str_tokens[place].strip()
        print(f"    {trace.record['kind']:6} place {place:2} {word:9} {by_layer}   subject at most {subject:.2f}")


def main(argv: Sequence[str] | None = None) -> None:
    person = toy_facts.load().people[0]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and come with the library. The real thing is --model smdm-1028m ar-1028m "
        "--window 10 --length 52 with a --person that they know.",
    )
    parser.add_argument("--model", nargs="+", default=["tiny-mdm", "tiny-ar"], help="names or paths")
    parser.add_argument("--person", nargs=2, metavar=("NAME", "DESCRIPTION"), default=[person.name, person.description])
    parser.add_argument("--window", type=int, default=2, help="MLPs, or attentions, restored at once (default 2)")
    parser.add_argument("--length", type=int, default=14, help="places of the canvas, the prompt included (default 14)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for pictures and numbers (default: out)")
    args = parser.parse_args(argv)

    name, description = args.person
    questions = {
        "forwards": Fact(f"{name} is the", subject=name, answer=f" {description}."),
        "backwards": Fact(f"the {description} is", subject=description, answer=f" {name}."),
    }
    models = {Path(name).name: HookedDiffusionTransformer.from_pretrained(name) for name in args.model}
    for way, fact in questions.items():
        folder, rows = args.out / f"trace_{way}", []
        print(f"{way}: {fact.prompt} …")
        for name, model in models.items():
            blanks = args.length - len(fact.tokenize(model)[0])
            query = fact.to_query(model, answer_places=blanks, first_tokens=1)
            noise = noise_scale(model, [query])
            rows.append([causal_trace(model, query, kind, window=args.window, noise=noise) for kind in KINDS])
            print_traces(name, rows[-1])
            for trace in rows[-1]:
                trace.save(folder / f"{name}_{trace.record['kind']}.safetensors")
            if model.cfg.has_mask:
                run = model.denoise(query.tokens[None], steps=blanks)  # a token a step
                steps = range(int(run.revealed_at[0, query.answer_positions[0]]) + 1)
                by_step = trace_trajectory(model, query, steps, trajectory=run, noise=noise)
                by_step.save(folder / f"{name}_steps.safetensors")
                print("    with noise, step by step:", " ".join(f"{p:.2f}" for p in by_step.corrupted.tolist()))
                page = by_step.page(f"{name}, {way}: {fact.prompt} …")
                print(f"wrote {plots.write_page(page, args.out / f'trace_{way}_{name}_steps.html')}")
        figure = plots.trace_panels(rows, limits=(0.0, 1.0))
        figure.suptitle(f"{way}: {fact.prompt} …")
        figure.savefig(args.out / f"trace_{way}.png", dpi=110)
        print(f"wrote {folder}\nwrote {args.out / f'trace_{way}.png'}\n")


if __name__ == "__main__":
    main()
