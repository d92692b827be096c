"""Extract a key k* and a value v* for many facts, asked both ways: does a model encode a fact symmetrically?

Asked by name, the name is the key and the description the value; asked by description it is the other way round. Every
person gives a key and a value for each direction, in two blocks. Are a person's two keys more alike than those of two
persons? The similarity is linear CKA without its bias, 0 by chance and 1 for sets that agree up to a rotation.
120 people were told both ways, so both models know them both ways. On the diffusion model their two keys are alike, .11
and .07 in blocks 0 and 1 where chance stays below .04, and so are the two values, and a name as key with the same name
as value; on the twin hardly the keys, .03 in block 1. That is a trace of symmetry in the one and next to none in the
other. It is small: at the subject's last token the two directions are mostly two facts, and two principal components
show nothing in common. In block 1 attention has also seen the answer's places, already filled in. The 40 told one way
are too few to say so of a direction that was left out: in block 1 .10 for the keys, with an interval that holds 0. Half
of them are known by name, half by description: what such groups differ in is taken out, or on the twin it alone would
look like symmetry (values .32). With v* the twin says in reverse more of what it was not told, .45 for .05.
OUT gets a picture of those told both ways, a row a model, and a folder with a file a fact: an interrupted run goes on.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from diffusion_lens import Fact, HookedDiffusionTransformer, plots
from diffusion_lens.analysis import Comparisons, KeyValueStudy, key_value_study
from diffusion_lens.data.sources import default_source, open_source

COMPARED = {
    "keys of a person": ("keys", "keys"),
    "values of a person": ("values", "values"),
    "a name as key and value": ("keys", "values"),
}


def print_study(study: KeyValueStudy) -> None:
    """What v* does to p(answer), as the facts were told and against it."""
    reverse = [Fact(**study.record["facts"][each]).is_reverse for each in study.ids]
    for way, is_reverse in (("as they were told", False), ("against it", True)):
        if rows := [row for row, each in enumerate(reverse) if each == is_reverse]:
            after = " ".join(f"{p:5.2f}" for p in study.after[rows].mean(dim=0).tolist())
            print(f"  asked {way}, {len(rows)} facts: p(answer) {study.before[rows].mean():.2f}, with v* {after}")


def print_similarity(label: str, comparisons: Comparisons) -> None:
    """CKA by layer, beside the range of chance."""
    for layer, row in comparisons.table("cka").items():
        chance = f"chance {row['chance_low']:5.2f} to {row['chance_high']:.2f}, p {row['p']:.3f}"
        print(f"  {label:24} block {layer}: {row['value']:.2f} ({row['low']:.2f} to {row['high']:.2f}), {chance}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="The default models are small and come with the library. The real thing is --model smdm-1028m-reverse.",
    )
    parser.add_argument("--model", nargs="+", default=["tiny-mdm", "tiny-ar"], help="names or paths")
    parser.add_argument("--data", help="toy, reversal-curse or a folder of its files (default: what the model learned)")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 1], help="blocks whose MLP is asked (default 0 1)")
    parser.add_argument("--length", type=int, help="places of the canvas, the prompt included (default: the data's)")
    parser.add_argument("--draws", type=int, default=99, help="random pairings that say what chance gives")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for pictures and numbers (default: out)")
    args = parser.parse_args(argv)

    source = open_source(args.data or default_source(args.model[0]))
    length = args.length or source.length
    figure, axes = plots.panels(len(args.model), 3, width=14.0, height=3.6 * len(args.model))
    for row, name in enumerate(args.model):
        model, label = HookedDiffusionTransformer.from_pretrained(name), Path(name).name
        pca, spectra, similarity = axes[3 * row : 3 * row + 3]
        for told, groups in (("both ways", ["both"]), ("one way", ["p2d", "d2p"])):
            # Everyone in both directions, in the first of the held-out templates.
            firsts = {(fact.person, fact.asked): fact for fact in reversed(source.facts) if fact.trained in groups}
            facts = list(firsts.values())[::-1]
            folder = args.out / "keys_and_values" / f"{label}_{told.replace(' ', '_')}"
            study = key_value_study(model, facts, args.layers, length=length, first_tokens=1, out=folder)
            print(f"{label}, {len(facts) // 2} people told {told}, v* in blocks {', '.join(map(str, study.layers))}")
            print_study(study)
            for what, (vectors, against) in COMPARED.items():
                found = study.compare(vectors, against, only=["cka"], draws=args.draws)
                found.save(folder.with_name(f"{folder.name}_{vectors}_{against}.safetensors"))
                print_similarity(what, found)
                if told == "both ways":
                    found.plot("cka", ax=similarity, label=what, title=f"{label}: both directions of a person")
                if told == "both ways" and vectors == against == "keys":
                    found.at[study.layers[0]].plot(ax=pca)
                    found.at[study.layers[0]].plot_spectra(ax=spectra)
        similarity.set_ylim(-0.05, 0.25)
    figure.savefig(args.out / "keys_and_values.png", dpi=110)
    print(f"wrote {args.out / 'keys_and_values'}\nwrote {args.out / 'keys_and_values.png'}")


if __name__ == "__main__":
    main()
