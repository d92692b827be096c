"""ROME's edits of facts: what they change, on a diffusion model and on its autoregressive (AR) baseline.

The example edits facts of `site-mdm` and `site-ar` one at a time in one block, and measures with 95% intervals over
requests: efficacy, paraphrases, neighbours with the same old object, people who share a name, and the same person's
other relations. Attributes have one token. A description has three, and a question in reverse: does editing "NAME is
DESCRIPTION" change the answer to "DESCRIPTION is"? With --described unused, the new description pairs a role with
somebody else's place, and with --over-states partial the search for v* includes partially revealed objects.
Nearly all edits take hold, in all templates, and spare other people; the person's own other relations suffer (of ten,
four survive an edited attribute on the diffusion model and six on the AR baseline, and two or three survive an edited
description). The reverse question never changes, on either model: the old description still gives the name, and the
new one does not. docs/rome.md explains what this shows.
OUT contains a figure with a panel for each model and kind of fact, and a folder for each study. An interrupted run
resumes from there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from diffusion_lens import HookedDiffusionTransformer, plots
from diffusion_lens.analysis.engine.layout import CanvasLayout
from diffusion_lens.analysis.rome import EditSettings, EditStudy, ValueSettings, edit_study, second_moment
from diffusion_lens.data import site_facts
from diffusion_lens.data.site_documents import Documents
from diffusion_lens.data.site_edits import edit_requests

DOCUMENTS = 800  # of which the second moment C of the keys is taken


def print_study(study: EditStudy) -> None:
    """Print the share of probes won without and with the edits, by group."""
    for group, score in study.table().items():
        low, high = score.after_interval
        change = f"{score.before:.2f} -> {score.after:.2f} ({low:.2f} to {high:.2f})"
        print(f"  {group:15} {change}, {score.probes} probes")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="Only the bundled pair knows these people. For published models such as smdm-1028m, pass requests of "
        "data.counterfact() or data.bake() to edit_study.",
    )
    parser.add_argument("--model", nargs="+", default=["site-mdm", "site-ar"], help="names or paths")
    parser.add_argument("--edits", type=int, default=20, metavar="N", help="edits of each kind (default 20)")
    parser.add_argument("--layer", type=int, default=1, help="block to edit (default 1)")
    parser.add_argument("--described", default="person", choices=["person", "unused"], help="new descriptions")
    parser.add_argument("--over-states", default="masked", choices=["masked", "partial"], help="states of the object")
    parser.add_argument("--steps", type=int, default=40, help="largest number of iterations for v* (default 40)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for figure and results (default: out)")
    args = parser.parse_args(argv)

    world = site_facts.load()
    attributes, descriptions = world.facts("attribute"), world.facts("description", "both", "p2d")
    # One for each person, seven questions further on each time, so that all relations, verbs and templates occur.
    each = len(attributes) // len(world.people)
    asked = {
        "attribute": [attributes[i * each + 7 * i % each] for i in range(len(world.people))],
        "description": descriptions[:: max(1, len(descriptions) // args.edits) | 1],
    }
    kinds = {kind: edit_requests(world, facts[: args.edits], described=args.described) for kind, facts in asked.items()}
    corpus = Documents(world, description=0.4, tag=0.1, second_person=0.6).sample(DOCUMENTS)
    settings = EditSettings(
        layer=args.layer,
        search=ValueSettings(steps=args.steps, lr=0.2, stop_below=0.3, kl_factor=0.0, over_states=args.over_states),
        layout=CanvasLayout(length=16),
    )
    figure, axes = plots.panels(len(args.model), len(kinds), width=11.0, height=2.8 * len(args.model))
    panels = iter(axes)
    for name in args.model:
        model = HookedDiffusionTransformer.from_pretrained(name)
        moment = second_moment(model, corpus, layer=args.layer)
        for kind, requests in kinds.items():
            folder = args.out / "edit_facts" / f"{Path(name).name}_{kind}"
            study = edit_study(model, requests, settings, covariance=moment, out=folder)
            print(f"{name}, {kind}: {len(study.ids)} edits, p with v* is {study.searched.mean():.2f} on average")
            print_study(study)
            ax = study.plot(ax=next(panels), title=f"{Path(name).name}: {len(study.ids)} edits of {kind}s")
            ax.tick_params(axis="x", labelsize=7)
            ax.get_legend().remove()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(args.out / "edit_facts.png", dpi=110)
    print(f"wrote {args.out / 'edit_facts'}\nwrote {args.out / 'edit_facts.png'}")


if __name__ == "__main__":
    main()
