"""Do a diffusion model and its autoregressive (AR) baseline use the same edges for a fact, forward and in reverse?

For one person A and another person B, the example scores every edge between heads and MLPs (EAP-IG): how much does it
contribute to the first token of the answer about A, against that about B, when A's prompt replaces B's? The circuit of
a fact is its edges with the largest scores. As Kong et al. (arXiv 2601.14758) compare Dream with Qwen, the example
compares circuits by their overlap (Jaccard) and by the layers in which their edges end. The faithfulness curve tells
how many edges a circuit needs.
On the bundled models, which know both people in both directions, 5% of the edges keep more than 90% of the difference.
The forward and the reverse circuit share most of their edges on the AR baseline and fewer on the diffusion model.
Circuits of the two models share fewer still, but far more than by chance. Do not rely on small differences: other
people give other numbers.
OUT contains a figure and a folder with the scores of the edges and the curves.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from diffusion_lens import Fact, HookedDiffusionTransformer, Query, plots
from diffusion_lens.analysis import EdgeScores, Faithfulness, answer_probability, edge_attribution, faithfulness
from diffusion_lens.data import toy_facts


def score_edges(
    model: HookedDiffusionTransformer, clean: Query, corrupted: Query, sizes: Sequence[float], ig_steps: int
) -> tuple[EdgeScores, Faithfulness]:
    """Scores of the edges, and what the largest of them keep, for these shares of all edges."""
    a, b = clean.answer_tokens[0], corrupted.answer_tokens[0]
    rows = answer_probability(model, clean).rows  # where the answer is read, in place or shifted

    def difference(logits: Tensor) -> Tensor:
        return logits[0, 0, a] - logits[0, 0, b]

    scores = edge_attribution(model, clean, corrupted, difference, ig_steps=ig_steps, logits_at=rows)
    circuits = [round(size * int(scores.exists.sum())) for size in sizes]
    return scores, faithfulness(model, clean, corrupted, difference, scores, circuits, logits_at=rows)


def main(argv: Sequence[str] | None = None) -> None:
    both = [[person.name, person.description] for person in toy_facts.load().people if person.trained == "both"]
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and bundled. All models need the same numbers of layers and heads. "
        "For published models, use --model smdm-1028m ar-1028m --length 52 with two people that they know.",
    )
    parser.add_argument("--model", nargs="+", default=["tiny-mdm", "tiny-ar"], help="names or paths")
    parser.add_argument("--person", nargs=2, metavar=("NAME", "DESCRIPTION"), default=both[0], help="A")
    parser.add_argument("--other", nargs=2, metavar=("NAME", "DESCRIPTION"), default=both[1], help="B")
    parser.add_argument("--length", type=int, default=14, help="positions of the canvas with the prompt (default 14)")
    parser.add_argument("--share", type=float, default=0.05, help="share of the edges in a circuit (default 0.05)")
    parser.add_argument("--ig-steps", type=int, default=20, help="gradients that are averaged (default 20)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for figure and results (default: out)")
    args = parser.parse_args(argv)

    folder = args.out / "circuits"
    sizes = sorted({0, 0.005, 0.01, 0.02, args.share, 0.1, 0.3, 1})
    circuits, curves = {}, {}
    for model_name in args.model:
        model, name = HookedDiffusionTransformer.from_pretrained(model_name), Path(model_name).name
        for direction in ("forward", "reverse"):
            queries = []
            for person, description in (args.person, args.other):
                fact = Fact(f"{person} is the", subject=person, answer=f" {description}.")
                if direction == "reverse":
                    fact = Fact(f"the {description} is", subject=description, answer=f" {person}.")
                n_masks = args.length - len(fact.tokenize(model)[0])
                queries.append(fact.to_query(model, n_masks=n_masks, first_tokens=1))
            if len(queries[0].tokens) != len(queries[1].tokens) or queries[0].subject != queries[1].subject:
                parser.error("the two names, and the two descriptions, must have the same number of tokens")
            scores, curve = score_edges(model, *queries, sizes, args.ig_steps)
            scores.save(folder / f"{name}_{direction}_edges.safetensors")
            curve.save(folder / f"{name}_{direction}_faithfulness.safetensors")
            label, n_edges = f"{name}, {direction}", int(scores.exists.sum())
            circuits[label], curves[label] = scores.top(round(args.share * n_edges)), curve
            kept = ", ".join(
                f"{size}: {share:.2f}" for size, share in zip(curve.sizes, curve.share.tolist(), strict=True)
            )
            print(f"{label}: share of the logit difference ({float(curve.clean):.1f}) kept by edges {kept}")

    labels, n_kept = list(circuits), len(next(iter(circuits.values())))
    overlap = [[circuits[one].jaccard(circuits[other]) for other in labels] for one in labels]
    # Two random circuits share n_kept^2 / n_edges edges on average.
    by_chance = n_kept / (2 * n_edges - n_kept)
    print(f"overlap of circuits of {n_kept} of {n_edges} edges; by chance {by_chance:.2f}:")
    for label, row in zip(labels, overlap, strict=True):
        print(f"  {label:20}", " ".join(f"{value:5.2f}" for value in row))
    print("share of the edges that end in each layer:")
    for label in labels:
        layers = circuits[label].share_by_layer()
        print(f"  {label:20}", "  ".join(f"{layer} {share:.2f}" for layer, share in layers.items()))

    figure, axes = plots.panels(1, 3, width=13.0, height=3.8)
    for i, label in enumerate(labels):
        curves[label].plot(ax=axes[0], label=label)
        layers = circuits[label].share_by_layer()
        width = 0.8 / len(labels)
        axes[1].bar([j + (i - (len(labels) - 1) / 2) * width for j in range(len(layers))], layers.values(), width)
        axes[1].set_xticks(range(len(layers)), layers)
    axes[0].legend(fontsize=8)
    axes[1].set_title(f"Layers in which the {n_kept} largest edges end", fontsize=10)
    axes[1].set_xlabel("layer of the reader", fontsize=9)
    axes[1].set_ylabel("share of the edges", fontsize=9)
    axes[2].imshow(overlap, cmap="Purples", vmin=0, vmax=1)
    for i, row in enumerate(overlap):
        for j, value in enumerate(row):
            axes[2].text(j, i, f"{value:.2f}", ha="center", va="center", color="white" if value > 0.5 else "black")
    axes[2].set_xticks(range(len(labels)), [label.replace(", ", "\n") for label in labels], fontsize=8)
    axes[2].set_yticks(range(len(labels)), [label.replace(", ", "\n") for label in labels], fontsize=8)
    axes[2].set_title(f"Overlap (Jaccard); {by_chance:.2f} by chance", fontsize=10)
    figure.savefig(args.out / "circuits.png", dpi=110)
    print(f"wrote {folder}\nwrote {args.out / 'circuits.png'}")


if __name__ == "__main__":
    main()
