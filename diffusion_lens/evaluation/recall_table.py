"""The recall table as text: cells down, steps across, published numbers below the measured ones."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from diffusion_lens.analysis.usable_facts import say_set_aside
from diffusion_lens.evaluation.naming import DirectionPair, cell_meaning, cell_name
from diffusion_lens.evaluation.published import MARKS, SOURCES, PublishedNumber, published_rows
from diffusion_lens.evaluation.scores import SCORES
from diffusion_lens.records import shown_model

LEFT_TO_RIGHT = "left to right"
_WIDTH = 15


class Share(NamedTuple):
    """The mean of a score over the questions of a cell, the ends of its interval, and the numbers behind them.

    Attributes:
        units: Number of people that were resampled for the interval, or of questions if they do not name people.
    """

    mean: float
    low: float
    high: float
    questions: int
    units: int


def steps_label(steps: int | None) -> str:
    """The head of a column."""
    return LEFT_TO_RIGHT if steps is None else f"{steps} step{'s' * (steps > 1)}"


def recall_table(
    table: Mapping[DirectionPair, Mapping[int | None, Share]],
    steps: Sequence[int | None],
    score: str,
    level: float,
    record: Mapping[str, Any],
) -> str:
    """The result of `Recall.table` as text, in percent, with the settings of the study."""
    lines = [
        f"{shown_model(record)}: {SCORES[score]}, percent, with {100 * level:g} % intervals",
        f"length {record['length']}, sampler {record['sampler']['name']}, guidance {record['cfg_scale']:g}, "
        f"temperature {record['temperature']:g}, seed {record['seed']}, {record['dtype']}, "
        f"weights {record['weights_sha256'][:12]}",
    ]
    if record["too_long"]:
        lines.append(f"{len(record['too_long'])} of {len(record['facts'])} answers do not fit on the canvas")
    if record["set_aside"]:
        lines.append(say_set_aside(record["set_aside"]))
    shown: dict[str, PublishedNumber] = {}
    for cell, shares in table.items():
        first = next(iter(shares.values()))
        counted = f"n = {first.questions}" + (f" about {first.units} people" if first.units < first.questions else "")
        meaning = f" ({cell_meaning(*cell)})" if cell_meaning(*cell) else ""
        lines += ["", f"{cell_name(*cell)}{meaning}, {counted}"]
        lines.append(_line("", [steps_label(column) for column in steps]))
        lines.append(_line(shown_model(record), [f"{100 * shares[column].mean:.1f}" for column in steps]))
        lines.append(_line("", [_interval(shares[column]) for column in steps]))
        for label, row in published_rows(cell, score).items():
            if any(column in row for column in steps):
                lines.append(_line(label, [_published(row.get(column)) for column in steps]))
                shown |= {f"{number.source} {number.certainty}": number for number in row.values()}
            elif list(steps) == [None]:  # the published number at most steps, beside a model that writes in order
                last = row[max(filter(None, row))]
                lines.append(_line(label, [f"{_published(last)} at {steps_label(last.steps)}"]))
                shown[f"{last.source} {last.certainty}"] = last
    if any(math.isnan(share.low) for shares in table.values() for share in shares.values()):
        lines += ["", "A cell of one fact or one person has no interval: there is nothing to resample"]
    sources = {number.source: SOURCES[number.source] for number in shown.values()}
    marks = {MARKS[number.certainty]: number.certainty for number in shown.values() if MARKS[number.certainty]}
    if sources:
        lines += ["", "Published numbers, of the models named, on Berglund's facts:"]
        lines += [f"  {source}: {text}" for source, text in sources.items()]
        lines += [f"  {mark} {certainty}, not read in the source" for mark, certainty in marks.items()]
    return "\n".join(lines)


def _line(name: str, entries: Sequence[str]) -> str:
    return f"  {name:<26}{''.join(f'{entry:>{_WIDTH}}' for entry in entries)}".rstrip()


def _interval(share: Share) -> str:
    """The ends of the interval, or why there is none: a single fact or person, or equal scores."""
    if math.isnan(share.low) or math.isnan(share.high):
        return "one fact" if share.questions == 1 else "one person"
    return "no spread" if share.low == share.high else f"{100 * share.low:.1f} to {100 * share.high:.1f}"


def _published(number: PublishedNumber | None) -> str:
    return "-" if number is None else f"{100 * number.value:.1f}{MARKS[number.certainty]}"
