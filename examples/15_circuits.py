"""Do a diffusion model and its autoregressive (AR) baseline use the same edges for a fact, forward and in reverse?

For two people A and B, the example scores every edge between heads and MLPs (EAP-IG): how much does it contribute to
the first token of the answer about A, against that about B, when A's prompt replaces B's? The circuit of a fact is its
edges with the largest scores. As Kong et al. (arXiv 2601.14758) compare Dream with Qwen, the example compares circuits
by their overlap (Jaccard) and the layers in which edges end. The faithfulness curve tells how many edges are needed.
On the bundled models 10% of the edges keep more than 80% of the difference. By chance the overlap would be .03. In the
diffusion model, the circuits of two questions by name (attribute, forward) overlap by .45, and with the reverse one by
.2; in the AR baseline all three by .3 to .4. OUT contains a figure and the scores of the edges and the curves.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from diffusion_lens import Fact, HookedDiffusionTransformer, plots
from diffusion_lens.analysis import Circuit, answer_probability, edge_attribution, faithfulness
from diffusion_lens.data import site_facts


def main(argv: Sequence[str] | None = None) -> None:
    both = [(p.name, p.description, p.values[0]) for p in site_facts.load().people if p.trained == "both"]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and bundled. All models need the same numbers of layers and heads. "
        "For published models, use --model smdm-1028m ar-1028m --length 52 with two people that they know.",
    )
    parser.add_argument("--model", nargs="+", default=["site-mdm", "site-ar"], help="names or paths")
    parser.add_argument("--person", nargs=3, metavar=("NAME", "DESCRIPTION", "VALUE"), default=both[0], help="A")
    parser.add_argument("--other", nargs=3, metavar=("NAME", "DESCRIPTION", "VALUE"), default=both[1], help="B")
    parser.add_argument("--verb", default="plays", help="verb between NAME and VALUE (default: plays)")
    parser.add_argument("--length", type=int, default=16, help="positions of the canvas with the prompt (default 16)")
    parser.add_argument("--share", type=float, default=0.05, help="share of the edges in a circuit (default 0.05)")
    parser.add_argument("--ig-steps", type=int, default=20, help="gradients that are averaged (default 20)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for figure and results (default: out)")
    args = parser.parse_args(argv)
    a_and_b = args.person, args.other
    questions = {
        "attribute": [Fact(f"{name} {args.verb}", name, f" {value}") for name, _, value in a_and_b],
        "forward": [Fact(f"{name} is the", name, f" {description}.") for name, description, _ in a_and_b],
        "reverse": [Fact(f"the {description} is", description, f" {name}.") for name, description, _ in a_and_b],
    }
    folder = args.out / "circuits"
    sizes = sorted({0, 0.005, 0.01, 0.02, args.share, 0.1, 0.3, 1})
    circuits: dict[str, Circuit] = {}
    figure, axes = plots.panels(1, 3, width=13.5, height=3.8)
    for model_name in args.model:
        model, name = HookedDiffusionTransformer.from_pretrained(model_name), Path(model_name).name
        for direction, facts in questions.items():
            queries = []
            for fact in facts:
                n_masks = args.length - len(fact.tokenize(model)[0])
                queries.append(fact.to_query(model, n_masks=n_masks, first_tokens=1))
            if len(queries[0].tokens) != len(queries[1].tokens) or queries[0].subject != queries[1].subject:
                parser.error("the two names, and the two descriptions, must have the same number of tokens")
            rows = answer_probability(model, queries[0]).rows  # where the answer is read, in place or shifted
            a, b = (query.answer_tokens[0] for query in queries)
            inputs = (model, *queries, lambda logits, a=a, b=b: logits[0, 0, a] - logits[0, 0, b])
            scores = edge_attribution(*inputs, ig_steps=args.ig_steps, logits_at=rows)
            n_edges, label = int(scores.exists.sum()), f"{name}, {direction}"
            curve = faithfulness(*inputs, scores, [round(size * n_edges) for size in sizes], logits_at=rows)
            circuits[label] = scores.top(round(args.share * n_edges))
            scores.save(folder / f"{name}_{direction}_edges.safetensors")
            curve.save(folder / f"{name}_{direction}_faithfulness.safetensors")
            kept = ", ".join(f"{n}: {share:.2f}" for n, share in zip(curve.sizes, curve.share.tolist(), strict=True))
            print(f"{label}: share of the logit difference ({float(curve.clean):.1f}) kept by edges {kept}")
            curve.plot(ax=axes[0], label=label)
            layers = circuits[label].share_by_layer()
            axes[1].plot(list(layers), list(layers.values()), marker="o", label=label)
            print("  share of the edges by layer:", "  ".join(f"{of} {share:.2f}" for of, share in layers.items()))

    n_kept, names = len(circuits[label]), [label.replace(", ", "\n") for label in circuits]
    overlap = torch.tensor([[one.jaccard(other) for other in circuits.values()] for one in circuits.values()])
    by_chance = n_kept / (2 * n_edges - n_kept)  # two random circuits have n_kept^2 / n_edges edges in common
    print(f"overlap of circuits of {n_kept} of {n_edges} edges; by chance {by_chance:.2f}:")
    for label, row in zip(circuits, overlap.tolist(), strict=True):
        print(f"  {label:20}", " ".join(f"{value:5.2f}" for value in row))

    title, scale = f"Overlap (Jaccard); {by_chance:.2f} by chance", {"limits": (0.0, 1.0), "hue": "Purples", "bar": ""}
    plots.labelled_map(overlap, rows=names, layers=range(len(names)), xlabel="", title=title, ax=axes[2], **scale)
    axes[2].set_xticks(range(len(names)), names, fontsize=8)
    for i, row in enumerate(overlap.tolist()):
        for j, value in enumerate(row):
            axes[2].text(j, i, f"{value:.2f}", ha="center", va="center", color="white" if value > 0.6 else "black")
    axes[0].legend(fontsize=8)
    axes[1].set_title(f"Layers in which the {n_kept} largest edges end", fontsize=10)
    axes[1].set(xlabel="layer of the reader", ylabel="share of the edges", ylim=(0, None))
    figure.savefig(args.out / "circuits.png", dpi=110)
    print(f"wrote {folder}\nwrote {args.out / 'circuits.png'}")


if __name__ == "__main__":
    main()
