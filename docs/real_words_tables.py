"""The study on real facts: `{real-words} TABLE` and the figures of its page, from `real_words.json`.

Every build draws `_made/real_words_traces.png`, `_made/real_words_steps.png` and `_made/real_words_signatures.png`.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tables import markdown, parsed

from diffusion_lens import plots

FILE = Path(__file__).with_name("real_words.json")
MODELS = {"causal": "causal model", "twin": "diffusion twin"}
CANVASES = {"one": "one [MASK]", "many": "the first of many", "loop": "the denoising loop"}
FORMS = {"forward": "attribute after the statement", "masked": "subject masked", "asked": "subject after the question"}
KINDS = {"resid": "residual stream", "mlp": "MLPs", "attn": "attention"}
WAYS = {"p2d": "forward", "d2p": "in reverse"}
SHOWN = 12  # facts that the twin lost

Row = tuple[str, ...]


def study() -> dict[str, Any]:
    """What the command wrote."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def numbers(values: Any) -> torch.Tensor:
    """A tensor of numbers, of which JSON has null for NaN."""
    if isinstance(values, list):
        return torch.stack([numbers(each) for each in values])
    return torch.tensor(math.nan if values is None else float(values))


def of_models(part: Any) -> list[tuple[str, Any]]:
    """The results of each model."""
    return [(name, part[name]) for name in MODELS]


def with_interval(ends: Sequence[float | None]) -> str:
    """A mean, and its interval if there is one: "0.81 (0.74–0.87)"."""
    mean, low, high = (math.nan if each is None else round(each, 2) + 0.0 for each in ends[:3])  # no -0.00
    if math.isnan(mean):
        return "–"
    return f"{mean:.2f}" if math.isnan(low) or math.isnan(high) else f"{mean:.2f} ({low:.2f}–{high:.2f})"


def recall_rows(results: Any) -> tuple[Row, list[Row]]:
    """Shares of the facts that each model names; of the twin, of those that the causal model names."""
    recall = results["recall"]
    causal, held_out = set(recall["known"]["causal"]["one"]), set(recall["held_out"])
    rows = [("causal model", "next token", str(len(causal & held_out)), str(len(causal - held_out)))]
    for canvas, label in CANVASES.items():
        named = set(recall["known"]["twin"][canvas])
        shares = (
            f"{len(named & known)} ({len(named & known) / len(known):.2f})" if known else "–"
            for known in (causal & held_out, causal - held_out)
        )
        rows.append(("diffusion twin", label, *shares))
    return ("", "canvas", "held-out facts", "other facts"), rows


def step_rows(results: Any) -> tuple[Row, list[Row]]:
    """Recall of held-out facts by number of steps."""
    tables = results["recall"]["by_steps"]["held_out"]
    columns = list(tables["twin"])
    (alone,) = tables["causal"].values()
    rows = [("diffusion twin", *(with_interval(share) for share in tables["twin"].values()))]
    rows.append(("causal model, left to right", with_interval(alone), *[""] * (len(columns) - 1)))
    return ("steps", *columns), rows


def lost_rows(results: Any) -> tuple[Row, list[Row]]:
    """Facts that the causal model names and the twin does not."""
    lost = results["recall"]["lost"][:SHOWN]
    rows = [(each["prompt"], each["attribute"], each["twin"].strip() or "(a space)") for each in lost]
    return ("prompt", "causal model", "diffusion twin"), [
        tuple(cell.replace("|", "\\|") for cell in row) for row in rows
    ]


def direction_rows(results: Any) -> tuple[Row, list[Row]]:
    """Log odds ratios of pairs of facts in all forms."""
    rows = []
    for name, form, label, found in of_directions(results):
        n = str(found["odds"][3]) if "odds" in found else "0"
        cells = (with_interval(found[key]) if key in found else "–" for key in ("prior", "share", "odds"))
        rows.append((MODELS[name], FORMS[form], label, n, *cells))
    return ("", "asked", "facts", "", "likelier as it is", "D > 0", "D in nats"), rows


def control_rows(results: Any) -> tuple[Row, list[Row]]:
    """The same of mixed names, beside the subjects that have one."""
    rows = []
    for name, form, label, found in of_directions(results):
        n = str(found["beyond"][3]) if "beyond" in found else "0"
        keys = ("whole_odds", "mixed_odds", "beyond", "mixed_share")
        cells = (with_interval(found[key]) if key in found else "–" for key in keys)
        rows.append((MODELS[name], FORMS[form], label, n, *cells))
    return ("", "asked", "facts", "", "D of subjects", "D of mixed names", "difference", "mixed names: D > 0"), rows


def agreement_rows(results: Any) -> tuple[Row, list[Row]]:
    """Pearson's correlation over pairs of D forward with D in the other forms."""
    rows = [
        (MODELS[name], FORMS[form], label, str(found["agreement"][3]), with_interval(found["agreement"]))
        for name, form, label, found in of_directions(results)
        if "agreement" in found
    ]
    return ("", "asked", "facts", "pairs", "correlation with D forward"), rows


def of_directions(results: Any) -> Iterator[tuple[str, str, str, Any]]:
    """Model, form, which facts, and what was found."""
    for name, of_model in of_models(results["directions"]):
        for form, of_form in of_model.items():
            for label, found in of_form.items():
                yield name, form, label.replace("_", "-"), found


def vector_rows(results: Any) -> tuple[Row, list[Row]]:
    """Similarity of keys and values of both directions."""
    rows = []
    for name, found in of_models(results["vectors"]):
        for kind, of_kind in found["compared"].items():
            for site, table in of_kind.items():
                for statistic, label in (("cka", "CKA"), ("subspace", "subspaces")):
                    if statistic not in table:
                        continue
                    row = table[statistic]
                    ends = (row["value"], row["low"], row["high"])
                    chance = f"{row['chance_low']:.2f}–{row['chance_high']:.2f}"
                    where = f"{found['sites'][site]} ({site})"
                    rows.append((MODELS[name], kind, where, label, with_interval(ends), chance, f"{row['p']:.3f}"))
    return ("", "", "layer", "similarity", "value", "chance", "p"), rows


def value_rows(results: Any) -> tuple[Row, list[Row]]:
    """p(answer) without v* and with it."""
    rows = [
        (MODELS[name], WAYS[asked], *(f"{p[site]:.2f}" for site in ("before", "early", "random")))
        for name, found in of_models(results["vectors"])
        for asked, p in found["p"].items()
    ]
    return ("", "", "p(answer)", "with v\\* at the early site", "in the random layer"), rows


def edit_rows(results: Any) -> tuple[Row, list[Row]]:
    """Shares of probes won without and with the edits."""
    rows = []
    for name, of_model in of_models(results["edits"]):
        for site, found in of_model.items():
            for group, score in found["groups"].items():
                after = with_interval((score["after"], *score["after_interval"]))
                where = f"{found['layer']} ({site})"
                before = f"{score['before']:.2f}"
                probability = f"{score['probability_before']:.3f} → {score['probability_after']:.3f}"
                rows.append((MODELS[name], where, group, str(score["requests"]), before, after, probability))
    return ("", "layer", "probes", "edits", "won before", "won after", "p(answer)"), rows


TABLES: dict[str, Callable[[Any], tuple[Row, list[Row]]]] = {
    "recall": recall_rows,
    "steps": step_rows,
    "lost": lost_rows,
    "directions": direction_rows,
    "control": control_rows,
    "agreement": agreement_rows,
    "vectors": vector_rows,
    "values": value_rows,
    "edits": edit_rows,
}


def settings_lines(written: dict[str, Any]) -> list[str]:
    """What was run, in a sentence."""
    settings, record, results = written["settings"], written["record"], written["results"]
    traced = results["traces"]["twin"]["resid"]["facts"]
    hours = sum(part["seconds"] for part in results.values()) / 3600
    deltas = record["twin"].get("deltas", [])
    return [
        f"`{record['causal']['model']}` (weights {record['causal']['weights_sha256'][:12]}) and "
        f"`{record['twin']['model']}` (weights {record['twin']['weights_sha256'][:12]}"
        f"{', the causal model with a delta' if deltas else ''}); {results['recall']['facts']} facts, "
        f"{len(results['recall']['held_out'])} of them held out; {traced} traced, with {settings['samples']} samples "
        f"of the noise, in every {settings['every']}. layer, windows of {settings['window']}; seed {settings['seed']}; "
        f"{hours:.1f} hours."
    ]


class RealWords(SphinxDirective):
    """`{real-words} recall`, or `settings`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        written, (name,) = study(), self.arguments
        lines = settings_lines(written) if name == "settings" else markdown(*TABLES[name](written["results"]))
        return parsed(self, lines)


def trace_figure(results: Any) -> Any:
    """Average indirect effects by role and layer: a row for each model, a column for each kind of state."""
    figure, axes = plots.panels(2, 3, width=11.0, height=6.0)
    panels = iter(axes)
    for name, label in MODELS.items():
        for kind, state in KINDS.items():
            found = results["traces"][name][kind]
            _draw(next(panels), found, kind, f"{label}, {state}\ntotal effect {with_interval(found['total'])}")
    return figure


def step_figure(results: Any) -> Any:
    """The same of the twin, at the step that writes the attribute."""
    found = results["by_step"]
    figure, axes = plots.panels(1, max(1, len(found["steps"])), width=5.0, height=3.2)
    for step, ax in zip(found["steps"], axes, strict=False):
        title = f"{step['facts']} facts, total effect {with_interval(step['total'])}"
        _draw(ax, {**step, "layers": found["layers"]}, "resid", title)
    return figure


def _draw(ax: Any, found: Any, kind: str, title: str) -> None:
    effects = found["effects"]
    mean, low, high = (
        torch.stack([numbers(effect[end]) for effect in effects.values()]) for end in ("mean", "low", "high")
    )
    plots.effect_curves(mean, low, high, list(effects), found["layers"], kind, ax=ax, title=title)
    ax.title.set_fontsize(9)


def signature_figure(results: Any) -> Any:
    """Evidence, cuts, routes and gradients of both models."""
    drawn = [
        plots.SignaturePanels(
            name=MODELS[name],
            why_no_routes=found["why_no_routes"],
            embeddings=found["embeddings"],
            **{
                panel: {
                    label: plots.Curve(**{end: numbers(values) for end, values in curve.items()})
                    for label, curve in found[panel].items()
                }
                for panel in ("evidence", "cuts", "routes", "gradients")
            },
        )
        for name, found in of_models(results["signatures"])
    ]
    return plots.signature_panels(drawn)[0].get_figure()


FIGURES = {"traces": trace_figure, "steps": step_figure, "signatures": signature_figure}


def draw_figures(app: Sphinx) -> None:
    """Write the figures of the page."""
    results = study()["results"]
    for name, draw in FIGURES.items():
        plots.save_figure(draw(results), Path(app.srcdir) / "_made" / f"real_words_{name}.png")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("real-words", RealWords)
    app.connect("builder-inited", draw_figures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
