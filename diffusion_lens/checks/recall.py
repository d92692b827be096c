"""Recall of a model that was fine-tuned on the reversal curse: 40 questions, ten a cell, beside the published numbers.

Ten questions tell little, and the interval says how little: Wilson's at 99 %, so that one of four right cells falls
outside by chance in one run of 25. Published runs of one checkpoint differ by up to 7 points, which is allowed on top.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from diffusion_lens.checks.expected import Expected
from diffusion_lens.checks.finding import Finding
from diffusion_lens.data.sources import FactSource, default_source, open_source
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.evaluation.naming import Cell, cell_name
from diffusion_lens.evaluation.published import DTN_REVERSE, DTN_SAME, NTD_REVERSE, NTD_SAME, published_rows
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer

CELLS = (NTD_SAME, NTD_REVERSE, DTN_SAME, DTN_REVERSE)
A_CELL = 10
STEPS = 8
LEVEL = 0.99
BETWEEN_RUNS = 0.07
HOLDS = (
    'It has to hold facts with a prompt, a subject, an answer and two directions, "trained" (how it was told) and '
    f'"asked", each p2d or d2p, and some of all {len(CELLS)} pairs of directions'
)
OWN_DATA = "toy"
# Shares of the embedded pair, from its own results.
OWN: dict[str, dict[Cell, float]] = {
    "tiny-mdm": {NTD_SAME: 1.0, NTD_REVERSE: 1.0, DTN_SAME: 1.0, DTN_REVERSE: 1.0},
    "tiny-ar": {NTD_SAME: 1.0, NTD_REVERSE: 0.0, DTN_SAME: 1.0, DTN_REVERSE: 0.0},
}


def open_questions(data: str) -> FactSource:
    """The 40 questions of a data set or file, as `open_source` takes it.

    Raises:
        ValueError: it holds no such facts; the message says what it has to hold.
        FileNotFoundError: a data set that is neither here nor to be fetched.
    """
    try:
        source = open_source(data)
        return replace(source, facts=[fact for cell in CELLS for fact in source.pick(*cell, A_CELL)])
    except ValueError as error:
        raise ValueError(f"data={data!r} is not what recall is asked from: {error}. {HOLDS}") from error


def require_askable(model: HookedDiffusionTransformer, questions: FactSource) -> None:
    """Raise a `ValueError` unless the model's tokenizer has words for one of the questions."""
    refused = ""
    for fact in questions.facts:
        try:
            fact.check_words(model)
            fact.tokenize(model)
        except ValueError as error:
            refused = refused or str(error)
        else:
            return
    raise ValueError(f"data={questions.name!r} holds no fact that {model.cfg.model_name!r} can be asked: {refused}")


def check_recall(
    model: HookedDiffusionTransformer,
    expected: Expected | None,
    questions: FactSource | None = None,
    asked: bool | None = None,
) -> Finding:
    """Ask 40 questions and hold each cell against what was published.

    Args:
        questions: as `open_questions` gives them; by default those that the name was tuned on.
        asked: whether to ask; by default if the catalogue says that it was tuned on these facts.
    """
    name = "recall"
    if asked is None:
        asked = expected is not None and expected.tuned_on_reversals
    if not asked:
        return Finding(name, "not run", "not asked: the catalogue knows of no fine-tuning on the reversal curse")
    try:
        source = questions or open_questions(default_source(expected.name if expected else ""))
    except (FileNotFoundError, OSError) as error:
        return Finding(name, "not run", f"the facts are not here, name them with --data: {error}")
    settings: dict[str, Any] = {
        "length": source.length or model.cfg.trained_length or 52,
        "cfg_scale": source.cfg_scale,
    }
    if not model.cfg.has_mask:
        settings["cfg_scale"] = 0.0
    found = recall_by_steps(model, source.facts, [STEPS], **settings)
    cells: dict[Cell, tuple[int, int]] = {}
    for cell, rows in found.cells.items():
        cells[cell] = (int(found.contained[rows, 0].sum()), len(rows))
    known = _known(expected, model.cfg.has_mask) if _is_theirs(source, expected) else {}
    told, numbers, wrong = [], {}, []
    for cell, (right, n) in cells.items():
        low, high = binomial_interval(right, n)
        label = cell_name(*cell)
        there = known.get(cell)
        numbers[label] = {"right": right, "asked": n, "low": low, "high": high, "known": there}
        beside = "nothing to compare" if there is None else f"known {there:.0%}"
        told.append(f"{label} {right}/{n} ({100 * low:.0f}-{100 * high:.0f} %), {beside}")
        if there is not None and not low - BETWEEN_RUNS <= there <= high + BETWEEN_RUNS:
            wrong.append(label)
    how = f"in {STEPS} steps" if model.cfg.has_mask else "from left to right"
    said = f"{how}: " + "; ".join(told)
    if not wrong:
        return Finding(name, "ok" if known else "noted", said, numbers=numbers)
    cause = (
        f"recall of {', '.join(wrong)} is not the known one: other weights, or another fine-tuning, than the name says"
    )
    return Finding(name, "off", said, cause, numbers)


def binomial_interval(right: int, n: int) -> tuple[float, float]:
    """Wilson's interval of a share."""
    from scipy.stats import binomtest  # scipy takes its time to import

    low, high = binomtest(right, n).proportion_ci(LEVEL, method="wilson")
    return float(low), float(high)


def _is_theirs(source: FactSource, expected: Expected | None) -> bool:
    """Whether the questions are of the data set whose shares are known of the name; of facts of one's own none are."""
    theirs = default_source(expected.name if expected else "")
    return bool(source.training) and (source.name == OWN_DATA) == (theirs == OWN_DATA)


def _known(expected: Expected | None, masked: bool) -> dict[Cell, float]:
    """Of the embedded pair its own numbers, else the published ones of models that take these steps."""
    if expected is not None and expected.name in OWN:
        return OWN[expected.name]
    if expected is None or not masked or not expected.tuned_on_reversals:
        return {}
    return {cell: share for cell in CELLS if (share := _published(cell)) is not None}


def _published(cell: Cell) -> float | None:
    rows: Sequence[Any] = list(published_rows(cell, "contained").values())
    return next((row[STEPS].value for row in rows if STEPS in row), None)
