"""Compute a key k* and a value v* of many facts in both directions. Does a model encode a fact symmetrically?

In a query by name, the name is the key and the description the value; in a query by description it is the opposite.
Every person has a key and a value for each direction, in two blocks. Are the two keys of one person more similar than
the keys of two people? The similarity is unbiased linear CKA, 0 by chance and 1 for sets that agree up to a rotation.
90 people were trained in both directions, so both models know them in both. On the diffusion model, the similarity of
their two keys is .09 in block 0, where chance stays below .04, and .01 in block 1. Their two values, and a name as key
and the same name as value, are similar in block 0 only (.06 and .07). On the autoregressive (AR) baseline all
similarities are .06 or less, some of them above chance. So both directions share a little in the first block (the last
name, docs/rome.md), and in block 1, where edits are made, the diffusion model has two facts with separate
keys, although tracing finds both at the subject's last token. The first two principal components show no structure.
The 30 people trained in one direction are too few for a conclusion: most intervals include 0. Half of them are known by
name, half by description. The comparison removes the difference between these groups, which alone would look like
symmetry. With v*, the AR baseline's p(answer) in the untrained direction rises from .09 to .84, so a v* that works is
no evidence that the model stored the fact.
OUT contains a figure of the people trained in both directions, one row per model, and a folder with one file per fact.
An interrupted run resumes from there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from diffusion_lens import Fact, HookedDiffusionTransformer, plots
from diffusion_lens.analysis import Comparisons, KeyValueStudy, key_value_study
from diffusion_lens.data.fact_files import default_source, open_source

COMPARED = {
    "keys of a person": ("keys", "keys"),
    "values of a person": ("values", "values"),
    "a name as key and value": ("keys", "values"),
}


def print_study(study: KeyValueStudy) -> None:
    """Print the mean p(answer) without and with v*, in the trained direction and in reverse."""
    reverse = [Fact(**study.record["facts"][fact_id]).is_reverse for fact_id in study.ids]
    for direction, is_reverse in (("in the trained direction", False), ("in reverse", True)):
        if rows := [row for row, fact_is_reverse in enumerate(reverse) if fact_is_reverse == is_reverse]:
            after = " ".join(f"{p:5.2f}" for p in study.after[rows].mean(dim=0).tolist())
            print(f"  {len(rows)} facts {direction}: p(answer) {study.before[rows].mean():.2f}, with v* {after}")


def print_similarity(label: str, comparisons: Comparisons) -> None:
    """Print CKA by layer with its confidence interval and the range of chance."""
    for layer, row in comparisons.table("cka").items():
        chance = f"chance {row['chance_low']:5.2f} to {row['chance_high']:.2f}, p {row['p']:.3f}"
        print(f"  {label:24} block {layer}: {row['value']:.2f} ({row['low']:.2f} to {row['high']:.2f}), {chance}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and bundled. For the published model, use --model smdm-1028m-reverse.",
    )
    parser.add_argument("--model", nargs="+", default=["site-mdm", "site-ar"], help="names or paths")
    parser.add_argument("--data", help="site, toy, reversal-curse or a folder of its files (default: the model's)")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 1], help="blocks whose MLP is read (default 0 1)")
    parser.add_argument("--length", type=int, help="positions of the canvas with the prompt (default: the data set's)")
    parser.add_argument("--people", type=int, help="people per group of the comparison (default: all)")
    parser.add_argument("--resamples", type=int, default=99, help="random pairings that estimate chance (default 99)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for figures and results (default: out)")
    args = parser.parse_args(argv)

    source = open_source(args.data or default_source(args.model[0]))
    length = args.length or source.length
    figure, axes = plots.panels(len(args.model), 3, width=14.0, height=3.6 * len(args.model))
    for row, name in enumerate(args.model):
        model, label = HookedDiffusionTransformer.from_pretrained(name), Path(name).name
        pca, spectra, similarity = axes[3 * row : 3 * row + 3]
        for trained, groups in (("both directions", ["both"]), ("one direction", ["p2d", "d2p"])):
            # One query per person and direction, in the first of the held-out templates.
            people = list(dict.fromkeys(fact.person for fact in source.facts if fact.trained in groups))[: args.people]
            firsts = {(fact.person, fact.asked): fact for fact in reversed(source.facts) if fact.person in people}
            facts = list(firsts.values())[::-1]
            folder = args.out / "keys_and_values" / f"{label}_{trained.replace(' ', '_')}"
            study = key_value_study(model, facts, args.layers, length=length, first_tokens=1, out=folder)
            print(f"{label}, {len(facts) // 2} people trained in {trained}, v* in blocks", *study.layers)
            print_study(study)
            for pair, (vectors, against) in COMPARED.items():
                similarities = study.compare(vectors, against, only=["cka"], resamples=args.resamples)
                similarities.save(folder.with_name(f"{folder.name}_{vectors}_{against}.safetensors"))
                print_similarity(pair, similarities)
                if trained == "both directions":
                    similarities.plot("cka", ax=similarity, label=pair, title=f"{label}: both directions of a person")
                if trained == "both directions" and vectors == against == "keys":
                    similarities.at[study.layers[0]].plot(ax=pca)
                    similarities.at[study.layers[0]].plot_spectra(ax=spectra)
        similarity.set_ylim(-0.05, 0.25)
    figure.savefig(args.out / "keys_and_values.png", dpi=110)
    print(f"wrote {args.out / 'keys_and_values'}\nwrote {args.out / 'keys_and_values.png'}")


if __name__ == "__main__":
    main()
