"""Why does a diffusion model answer a question that it was trained on only in the other direction? Three signatures.

Shin et al. (arXiv 2602.02133) explain it for one layer: the reverse question reuses the evidence that the values carry,
its attention takes a correlated route, and the gradient of its loss is aligned with that of the trained sentence. The
example measures the three in every layer of the diffusion model and of its autoregressive (AR) baseline, for people
trained in one direction and queried in the other. The figure has a row of four panels for each model:
1. Evidence: the share of the other answers that the right one exceeds (percentile), the same by the sources of other
   people (.5), and whether the canvases agree (reuse). 2. What log p(answer) loses without the edge reader to source.
3. Routes: correlation over heads of the attention scores forward and in reverse; the same with the forward query and
   key moved to the reverse positions (counterfactual); and what random queries and keys would give (isotropic).
4. Gradients: cosine of the two losses' gradients, beside that of two different people (shuffled pairs).
On the diffusion model the right answer stands out in layer 0 (percentile .91 for people trained p2d, 1.00 for d2p), the
only layer whose edge matters. Gradients agree in V, O, the MLP's down projection and the head (cosine .43 to .92, and
at most .37 for shuffled pairs). They agree less in Q and K: from -.19 to .23 (p2d), and to .41 in Q of layer 0 and .38
in K of layer 3 (d2p; shuffled .16 and .05). On the AR baseline the percentile is at chance and gradients are nearly
orthogonal. It has no route: the reader of its forward canvas does not see the source. Do not conclude more:
- Evidence is the direct path to the logits. A high percentile where a cut costs nothing (layer 2, p2d) is not used.
- Reuse is 1 in layer 0 by construction, on both models. Routes scatter from -.4 to 1; the isotropic prediction is .62.
- A cosine means little without that of shuffled pairs. The gradients of a trained model are small, so alignment here
  says what a small step would do (0.1% of the forward loss), not what training did.
- p(answer) of the AR baseline is read after the true first words of the answer, so it can be high without recall.
OUT contains a figure for each direction of training, and one file per model and pair. An interrupted run resumes there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import ReversalSignatures, reversal_signatures
from diffusion_lens.data.sources import default_source, open_source
from diffusion_lens.taught_pairs import lay_out_pairs, pairs_in_common

MATRICES = {"V": "attn.v", "O": "attn.o", "MLP down": "mlp.down", "Q": "attn.q", "K": "attn.k"}


def print_signatures(result: ReversalSignatures) -> None:
    """Print the means over pairs, by layer."""
    rows = {"evidence percentile, reverse": result.evidence_percentile[1]}
    rows |= {"  by sources of other people": result.shuffled_percentile[1], "evidence reuse": result.evidence_reuse}
    rows |= dict(zip(("edge cut, forward (nats)", "edge cut, reverse (nats)"), result.edge_cut, strict=True))
    rows |= {"route": result.route_correlation, "route, counterfactual": result.counterfactual_correlation}
    for label, values in rows.items():
        seen = values is not None and not values.isnan().all()
        shown = (
            " ".join(f"{value:14.2f}" for value in values.tolist()) if seen else "undefined: its reader sees no source"
        )
        print(f"  {label:30} {shown}")
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
    parser.add_argument("--model", nargs="+", default=["tiny-mdm", "tiny-ar"], help="names or paths")
    parser.add_argument("--data", help="a name or a file of facts with directions (default: those of the first model)")
    parser.add_argument("--trained", nargs="+", default=["p2d", "d2p"], help="directions of training")
    parser.add_argument("--limit", type=int, help="largest number of people (default: all)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for figures and results (default: out)")
    args = parser.parse_args(argv)

    source = open_source(args.data or default_source(args.model[0]))
    models = {Path(name).name: HookedDiffusionTransformer.from_pretrained(name) for name in args.model}
    folder = args.out / "signatures"
    for trained in args.trained:
        fact_pairs = source.fact_pairs(trained, limit=args.limit)
        laid_out = pairs_in_common({name: lay_out_pairs(model, fact_pairs) for name, model in models.items()})
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
