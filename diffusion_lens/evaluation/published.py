"""Published numbers of the reversal experiment on Berglund's facts, each with the certainty of its source.

They are printed next to a measured table for comparison. They come from other weights and other facts than those of the
bundled models. Numbers that nobody has read in a text that states them are left out. A replication with the same
checkpoint can be 7 points below the paper when it queries descriptions in reverse, as Rai's is.
"""

from dataclasses import dataclass

from diffusion_lens.evaluation.naming import DirectionPair

MARKS = {"verified": "", "second-hand": "*"}
SOURCES = {
    "Rai 2025": (
        "Ashish Rai, raishish.github.io, 2025-07-14: SMDM-1028M reverse checkpoint, guidance 0.8, length 52; an "
        "independent replication, 300 questions per cell"
    ),
    "Nie 2024": (
        "Nie et al. 2024, arXiv 2410.18514, as a review of the paper quotes it; SMDM with guidance 0.8, assumed to use "
        "32 steps, the default of evaluate_reverse.py"
    ),
}


@dataclass(frozen=True)
class PublishedNumber:
    """One number of a table.

    Attributes:
        source: Key of `SOURCES`.
        model: Name of the model that was measured.
        cell: Trained direction and queried direction.
        steps: Number of denoising steps; `None` for models that write from left to right.
        score: "contained" for accuracies, "character_bleu" for BLEU. This is how SMDM's numbers are computed; for the
            other models it is not known.
        value: Share between 0 and 1.
        certainty: "verified" (read in the source) or "second-hand" (another public text quotes it).
    """

    source: str
    model: str
    cell: DirectionPair
    steps: int | None
    score: str
    value: float
    certainty: str

    @property
    def label(self) -> str:
        """The model and the source."""
        return f"{self.model} ({self.source})"


NTD_SAME, DTN_REVERSE = ("p2d", "p2d"), ("p2d", "d2p")
DTN_SAME, NTD_REVERSE = ("d2p", "d2p"), ("d2p", "p2d")

# Steps, then percent in the order of the table.
_RAI_CELLS = (DTN_SAME, NTD_REVERSE, NTD_SAME, DTN_REVERSE)
_RAI = {
    1: (91.3, 0, 0, 40.3),
    2: (97, 0.7, 2.3, 79),
    4: (96.3, 17, 25, 87.7),
    8: (97.3, 27.3, 37.7, 87.3),
    16: (98, 31, 42, 88.3),
    32: (97.7, 29.7, 43, 90),
}

# Percent and mark of certainty, in the paper's order of columns; "-" marks a number that is not in our source.
_NIE_COLUMNS = (
    (DTN_SAME, "contained"),
    (DTN_REVERSE, "contained"),
    (NTD_SAME, "contained"),
    (NTD_REVERSE, "contained"),
    (NTD_SAME, "character_bleu"),
    (NTD_REVERSE, "character_bleu"),
)
_NIE: dict[tuple[str, int | None], str] = {
    ("SMDM-1028M", 32): "- 92* - 37* - 67*",
    ("GPT-3 175B", None): "- 0* - 0* - -",
    ("Llama-2 13B", None): "- 0* - - - -",
}


def _rai() -> list[PublishedNumber]:
    return [
        PublishedNumber("Rai 2025", "SMDM-1028M", cell, steps, "contained", round(percent / 100, 3), "verified")
        for steps, row in _RAI.items()
        for cell, percent in zip(_RAI_CELLS, row, strict=True)
    ]


def _nie() -> list[PublishedNumber]:
    certainty = {mark: name for name, mark in MARKS.items()}
    numbers = []
    for (model, steps), row in _NIE.items():
        for (cell, score), entry in zip(_NIE_COLUMNS, row.split(), strict=True):
            if entry != "-":
                percent = entry.rstrip("*")
                mark = certainty[entry.removeprefix(percent)]
                numbers.append(PublishedNumber("Nie 2024", model, cell, steps, score, int(percent) / 100, mark))
    return numbers


PUBLISHED = (*_rai(), *_nie())


def published_rows(cell: DirectionPair, score: str) -> dict[str, dict[int | None, PublishedNumber]]:
    """The published numbers of a cell: a row for each model and source, by number of steps."""
    rows: dict[str, dict[int | None, PublishedNumber]] = {}
    for number in PUBLISHED:
        if number.cell == cell and number.score == score:
            rows.setdefault(number.label, {})[number.steps] = number
    return rows
