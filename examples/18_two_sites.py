"""Two sites of a fact: MLPs look it up at the subject's last token, and attention carries it to the read-out later.

The example makes ROME's average traces on the pair `site-mdm` and `site-ar`. The questions ask for an attribute ("NAME
plays"), for a description by the name, and for a name by the description. For each it prints the average indirect
effect by block at both sites: the residual stream, each MLP and each attention output, and the residual stream with the
later MLPs or attention outputs at the subject severed. On attributes, the subject's last token carries the whole effect
in blocks 1 and 2 of the diffusion model (block 1 of the AR baseline), and the read-out carries it from block 3 (2) on.
Without the later MLPs a state of block 0 has less than half of its effect. A description is looked up in part at the
read-out: MLPs there matter in the last blocks. docs/two_sites.md explains what this shows.
OUT contains a figure with a row for each model and a column for each question, and a folder for each trace. An
interrupted run resumes from there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffusion_lens import Fact, HookedDiffusionTransformer, plots
from diffusion_lens.analysis import AverageEffect, average_indirect_effect
from diffusion_lens.data import site_facts

# Kind of the restored state, and the outputs that stay corrupted in the blocks above.
TRACES = (("resid", None), ("mlp", None), ("attn", None), ("resid", "mlp"), ("resid", "attn"))
COLOURS = {"resid": "C0", "mlp": "C2", "attn": "C3"}


def questions(count: int) -> dict[str, list[Fact]]:
    """Questions about different people: attributes, and descriptions of people told in both directions."""
    world = site_facts.load()
    attributes = world.facts("attribute")
    # One for each person, seven questions further on each time, so that all relations, verbs and templates occur.
    each = len(attributes) // len(world.people)
    asked = {"attribute": [attributes[i * each + 7 * i % each] for i in range(len(world.people))]}
    for label, direction in (("NAME is", "p2d"), ("DESCRIPTION is", "d2p")):
        facts = world.facts("description", "both", direction)
        asked[label] = facts[:: max(1, len(facts) // count) | 1]
    return {label: facts[:count] for label, facts in asked.items()}


def print_sites(average: AverageEffect, sites: dict[str, str], label: str) -> None:
    """Print the effects by block at both sites."""
    for site, role in sites.items():
        effects = " ".join(f"{effect:5.2f}" for effect in average.aie[average.roles.index(role)].tolist())
        print(f"    {label:30} {site:20} {effects}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="Only the bundled pair knows these people. For smdm-1028m and ar-1028m use 08_average_effect.py --file.",
    )
    parser.add_argument("--model", nargs="+", default=["site-mdm", "site-ar"], help="names or paths")
    parser.add_argument("--facts", type=int, default=20, metavar="N", help="facts of each question (default 20)")
    parser.add_argument("--samples", type=int, default=10, help="noise samples of each trace (default 10)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for figure and results (default: out)")
    args = parser.parse_args(argv)

    asked = questions(args.facts)
    figure, axes = plots.panels(len(args.model), len(asked), width=9.5, height=2.8 * len(args.model))
    panels, handles = iter(axes), {}
    for name in args.model:
        model = HookedDiffusionTransformer.from_pretrained(name)
        sites = {
            "subject's last token": "subject_last",
            "read-out": "prompt_last" if model.cfg.is_autoregressive else "answer",
        }
        for question, facts in asked.items():
            ax = next(panels)
            for kind, severed in TRACES:
                label = f"{kind}, later {severed} severed" if severed else kind
                folder = args.out / "two_sites" / f"{Path(name).name}_{question}_{label}".replace(" ", "_")
                settings: dict[str, Any] = {"severed": severed, "window": 1, "samples": args.samples}
                layout: dict[str, Any] = {"length": 16, "first_tokens": 1, "roles": list(sites.values())}
                average = average_indirect_effect(model, facts, kind, **settings, **layout, out=folder)
                if (kind, severed) == TRACES[0]:
                    low, high = average.ate_interval()
                    print(f"{name}, {question}: knows {len(average.ids)} of {len(facts)},", end=" ")
                    print(f"average total effect {average.ate:.2f} ({low:.2f} to {high:.2f})")
                print_sites(average, sites, label)
                if severed is None:
                    for (site, role), style in zip(sites.items(), ("-", ":"), strict=True):
                        row, (low, high) = average.roles.index(role), average.aie_interval()
                        colour, legend = COLOURS[kind], f"{kind}, {site}"
                        handles[legend] = ax.plot(average.layers, average.aie[row], style, color=colour)[0]
                        ax.fill_between(average.layers, low[row], high[row], color=colour, alpha=0.15, linewidth=0)
            ax.set(title=f"{Path(name).name}, {question} ...", xlabel="block", ylim=(-0.05, 1.0))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(args.out / "two_sites.png", dpi=110)
    print(f"wrote {args.out / 'two_sites'}\nwrote {args.out / 'two_sites.png'}")


if __name__ == "__main__":
    main()
