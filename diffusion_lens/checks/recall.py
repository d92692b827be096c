"""Checks the recall of a model that was fine-tuned on the reversal curse: 40 questions, ten per pair of directions.

The uncertainty of ten questions is given by Wilson's interval at 99 %: of four correct cells, one is outside by chance
in one check of 25. Published results of one checkpoint differ by up to 7 points, which are allowed in addition.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from diffusion_lens.catalogue import BUNDLED
from diffusion_lens.checks.expected import Expected
from diffusion_lens.checks.finding import Finding
from diffusion_lens.data.sources import FactSource, default_source, open_source
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.evaluation.naming import DirectionPair, cell_name
from diffusion_lens.evaluation.published import DTN_REVERSE, DTN_SAME, NTD_REVERSE, NTD_SAME, published_rows
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer

CELLS = (NTD_SAME, NTD_REVERSE, DTN_SAME, DTN_REVERSE)
A_CELL = 10
STEPS = 8
LEVEL = 0.99
BETWEEN_RUNS = 0.07
HOLDS = (
    'It has to contain facts with a prompt, a subject, an answer and two directions, "trained" and "asked" (the '
    f"direction of the query), each p2d or d2p, and facts of all {len(CELLS)} pairs of directions"
)
OWN_DATA = {model.data for model in BUNDLED.values()}
# Recall of the bundled models, from their own results.
OWN: dict[str, dict[DirectionPair, float]] = {
    "site-mdm": {NTD_SAME: 1.0, NTD_REVERSE: 1.0, DTN_SAME: 1.0, DTN_REVERSE: 1.0},
    "site-ar": {NTD_SAME: 1.0, NTD_REVERSE: 0.0, DTN_SAME: 1.0, DTN_REVERSE: 0.0},
    "tiny-mdm": {NTD_SAME: 1.0, NTD_REVERSE: 1.0, DTN_SAME: 1.0, DTN_REVERSE: 1.0},
    "tiny-ar": {NTD_SAME: 1.0, NTD_REVERSE: 0.0, DTN_SAME: 1.0, DTN_REVERSE: 0.0},
    "tiny-block": {NTD_SAME: 1.0, NTD_REVERSE: 0.0, DTN_SAME: 1.0, DTN_REVERSE: 0.0},
    "tiny-uniform": {NTD_SAME: 1.0, NTD_REVERSE: 0.77, DTN_SAME: 0.94, DTN_REVERSE: 0.58},
}


def open_questions(data: str) -> FactSource:
    """The 40 questions of a data set or file.

    Args:
        data: Argument of `open_source`.

    Raises:
        ValueError: The data contain no such facts; the message says what they have to contain.
        FileNotFoundError: The data set is not on this machine and cannot be fetched.
    """
    try:
        source = open_source(data)
        return replace(source, facts=[fact for cell in CELLS for fact in source.pick(*cell, A_CELL)])
    except ValueError as error:
        raise ValueError(f"data={data!r} cannot be used to check recall: {error}. {HOLDS}") from error


def require_known_words(model: HookedDiffusionTransformer, questions: FactSource) -> None:
    """Raise a `ValueError` unless the model's tokenizer knows the words of at least one question."""
    refused = ""
    for fact in questions.facts:
        try:
            fact.check_words(model)
            fact.tokenize(model)
        except ValueError as error:
            refused = refused or str(error)
        else:
            return
    raise ValueError(
        f"data={questions.name!r} contains no fact that {model.cfg.model_name!r} can be queried for: {refused}"
    )


def check_recall(
    model: HookedDiffusionTransformer,
    expected: Expected | None,
    questions: FactSource | None = None,
    requested: bool | None = None,
) -> Finding:
    """Measure recall on 40 questions and compare each cell with the published number.

    Args:
        model: Model to check.
        expected: Model that it should be.
        questions: Return value of `open_questions`; by default the facts that the expected model was tuned on.
        requested: Whether recall is measured; by default, if the expected model was tuned on these facts.
    """
    name = "recall"
    # 1. The questions.
    if requested is None:
        requested = expected is not None and expected.tuned_on_reversals
    if not requested:
        return Finding(name, "not run", "not requested: the catalogue lists no fine-tuning on the reversal curse")
    try:
        source = questions or open_questions(default_source(expected.name if expected else ""))
    except (FileNotFoundError, OSError) as error:
        return Finding(name, "not run", f"the facts are not on this machine, name them with --data: {error}")
    # 2. The model's recall in each cell.
    recall = recall_by_steps(model, source.facts, [STEPS], length=source.length, cfg_scale=source.cfg_scale)
    counts: dict[DirectionPair, tuple[int, int]] = {}
    for cell, rows in recall.cells.items():
        counts[cell] = (int(recall.contained[rows, 0].sum()), len(rows))
    # 3. The comparison.
    known = _known(expected, model.cfg.has_mask) if _is_data_of(expected, source) else {}
    lines, numbers, wrong = [], {}, []
    for cell, (right, n) in counts.items():
        lower, upper = binomial_interval(right, n)
        label = cell_name(*cell)
        share = known.get(cell)
        numbers[label] = {"right": right, "queried": n, "low": lower, "high": upper, "known": share}
        comparison = "nothing to compare" if share is None else f"known {share:.0%}"
        lines.append(f"{label} {right}/{n} ({100 * lower:.0f}-{100 * upper:.0f} %), {comparison}")
        if share is not None and not lower - BETWEEN_RUNS <= share <= upper + BETWEEN_RUNS:
            wrong.append(label)
    how = "from left to right" if model.cfg.grows else f"in {STEPS} steps"
    said = f"{how}: " + "; ".join(lines)
    if not wrong:
        return Finding(name, "ok" if known else "noted", said, numbers=numbers)
    cause = (
        f"recall of {', '.join(wrong)} differs from the published value: the weights or the fine-tuning do not match "
        "the claimed model"
    )
    return Finding(name, "off", said, cause, numbers)


def binomial_interval(right: int, n: int) -> tuple[float, float]:
    """Wilson's interval of a share, at `LEVEL`."""
    from scipy.stats import binomtest  # imported here, because importing scipy takes long

    lower, upper = binomtest(right, n).proportion_ci(LEVEL, method="wilson")
    return float(lower), float(upper)


def _is_data_of(expected: Expected | None, source: FactSource) -> bool:
    """Whether the questions are from the data set for which the expected model's recall is known."""
    default = default_source(expected.name if expected else "")
    return bool(source.training) and (source.name == default or not OWN_DATA & {source.name, default})


def _known(expected: Expected | None, masked: bool) -> dict[DirectionPair, float]:
    """The known recall: of a bundled model its own, otherwise the published one at this number of steps."""
    if expected is not None and expected.name in OWN:
        return OWN[expected.name]
    if expected is None or not masked or not expected.tuned_on_reversals:
        return {}
    return {cell: share for cell in CELLS if (share := _published(cell)) is not None}


def _published(cell: DirectionPair) -> float | None:
    rows: Sequence[Any] = list(published_rows(cell, "contained").values())
    return next((row[STEPS].value for row in rows if STEPS in row), None)
