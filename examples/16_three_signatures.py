"""Why does a diffusion model answer a question that it was trained on only in the other direction? Three signatures.

Shin et al. (arXiv 2602.02133) explain it for one layer: the reverse question reuses the evidence that the values carry,
its attention takes a correlated route, and the gradient of its loss is aligned with that of the trained sentence. The
example measures the three in every layer of a diffusion model and its autoregressive (AR) baseline, in four panels:
1. Evidence: the share of the other answers that the right one exceeds (percentile), the same by the sources of other
   people (.5), and whether the canvases agree (reuse). 2. What log p(answer) loses without the edge reader to source.
3. Routes: correlation over heads of the attention scores forward and in reverse; the same with the forward query and
   key moved to the reverse positions (counterfactual); and what random queries and keys would give (isotropic).
4. Gradients: cosine of the two losses' gradients, beside that of two different people (shuffled pairs).
On the diffusion model the right answer stands out in layer 3 (percentile .97 for people trained p2d, .99 for d2p), the
only layer whose edge matters: a reverse cut costs 2.5 and 3.3 nats. Gradients agree in V, O, the MLP's down projection
and the head (cosine .19 to .88, shuffled at most .23), and less in Q and K (.07 to .45, shuffled at most .10). On the
AR baseline a cut changes log p by at most .24, no cosine exceeds .05 in size, and there is no route: the reader of its
forward canvas does not see the source. Do not conclude more:
- Evidence is the direct path to the logits. Where a cut costs nothing, it is not used: in layer 0, with a percentile of
  .82 and .84, and on the AR baseline (.71 in layer 0, p2d). Reuse is 1 in layer 0 by construction, on both models.
- In layer 3 routes agree (.95, .98), counterfactual ones less (.25, .47): query and key change with the canvas.
- A cosine means little without that of shuffled pairs. It says what a small step would do, not what training did.
- p(answer) of the AR baseline is read after the true first words of the answer, so it can be high without recall.
OUT contains a figure for each direction of training, and one file per model and pair. An interrupted run resumes there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import ReversalSignatures, reversal_signatures
from diffusion_lens.data.fact_files import default_source, open_source
from diffusion_lens.facts.taught_pairs import lay_out_pairs, pairs_in_common

MATRICES = {"V": "attn.v", "O": "attn.o", "MLP down": "mlp.down", "Q": "attn.q", "K": "attn.k"}


def print_signatures(result: ReversalSignatures) -> None:
    """Print the means over pairs, by layer."""
    rows = {"evidence percentile, reverse": result.evidence_percentile[1]}
    rows |= {"  by sources of all people": result.shuffled_percentile[1], "evidence reuse": result.evidence_reuse}
    rows |= dict(zip(("edge cut, forward (nats)", "edge cut, reverse (nats)"), result.edge_cut, strict=True))
    rows |= {"route": result.route_correlation, "route, counterfactual": result.counterfactual_correlation}
    for label, values in rows.items():
        if values is None or values.isnan().all():
            print(f"  {label:30} undefined: its reader sees no source")
        else:
            print(f"  {label:30}", " ".join(f"{value:14.2f}" for value in values.tolist()))
    if result.isotropic_correlation is not None:
        print(f"  route, isotropic               {result.isotropic_correlation:14.2f} in every layer")
    cosines = result.gradient_cosine
    for label, matrix in MATRICES.items():
        pairs = [cosines[f"blocks.{layer}.{matrix}.weight"] for layer in range(len(result.evidence_reuse))]
        print(f"  {f'cosine {label} (shuffled)':30}", " ".join(f"{own:6.2f} ({other:5.2f})" for own, other in pairs))
    head = cosines.get("unembed.weight", cosines["embed.weight"])  # tied heads have one matrix
    print(f"  {'cosine head (shuffled)':30} {head[0]:6.2f} ({head[1]:5.2f})")
    predicted, measured = result.first_order
    print(f"  0.1% less forward loss changes the reverse loss by {predicted:.2e}; measured: {measured:.2e}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and bundled. For published models, use "
        "--model smdm-1028m-reverse FOLDER, with ar-1028m fine-tuned on the same facts in FOLDER.",
    )
    parser.add_argument("--model", nargs="+", default=["site-mdm", "site-ar"], help="names or paths")
    parser.add_argument("--data", help="a name or a file of facts with directions (default: those of the first model)")
    parser.add_argument("--trained", nargs="+", default=["p2d", "d2p"], help="directions of training")
    parser.add_argument("--limit", type=int, help="largest number of people (default: all)")
    parser.add_argument("--length", type=int, help="positions of the canvases (default: the data set's)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for figures and results (default: out)")
    args = parser.parse_args(argv)

    source = open_source(args.data or default_source(args.model[0]))
    length = args.length or source.length
    models = {Path(name).name: HookedDiffusionTransformer.from_pretrained(name) for name in args.model}
    folder = args.out / "signatures"
    for trained in args.trained:
        pairs = source.fact_pairs(trained, limit=args.limit)
        laid_out = pairs_in_common({name: lay_out_pairs(model, pairs, length=length) for name, model in models.items()})
        results = []
        for name, model in models.items():
            result = reversal_signatures(model, laid_out[name], out=folder / f"{name}_{trained}")
            forward, reverse = result.probability.tolist()
            print(f"{name}, {len(result.ids)} people trained {trained}:", end=" ")
            print(f"p(answer) {forward:.2f} forward, {reverse:.2f} reverse")
            print_signatures(result)
            results.append(result)
        figure = results[0].plot(results[1:])[0].get_figure()
        figure.savefig(args.out / f"three_signatures_{trained}.png", dpi=110)
        print(f"wrote {args.out / f'three_signatures_{trained}.png'}")
    print(f"wrote {folder}")


if __name__ == "__main__":
    main()
