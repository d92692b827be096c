"""The two names of a cell of the reversal experiment, which read as opposites.

Berglund et al. 2023 (arXiv 2309.12288) name their files after the direction that was TRAINED: "p2d reverse" asks people
told name first ("person to description") for their name. Nie et al. 2024 (SMDM, arXiv 2410.18514) name their columns
after the QUESTION: that same cell is their "DtN reverse" ("description to name"). So both are printed together.
"""

Cell = tuple[str | None, str | None]

QUESTION = {"p2d": "NtD", "d2p": "DtN"}
TOLD = {"p2d": "told name first", "d2p": "told description first", "both": "told both ways"}
ASKED = {"p2d": "asked for the description", "d2p": "asked for the name"}


def cell_name(trained: str | None, asked: str | None) -> str:
    """Both names: `cell_name("p2d", "d2p")` is "p2d reverse = DtN reverse"; facts without directions are "facts".

    Args:
        trained: direction in which training told the fact, "p2d", "d2p" or "both".
        asked: direction of the question, "p2d" or "d2p".

    Raises:
        ValueError: a direction that is none of these.
    """
    trained, asked = _checked(trained, asked)
    if trained is None and asked is None:
        return "facts"
    if trained is None or asked is None:
        return f"trained {trained or '?'}, asked {asked or '?'}"
    if trained == "both":
        return f"both {asked} = {QUESTION[asked]} both"
    way = "same" if trained == asked else "reverse"
    return f"{trained} {way} = {QUESTION[asked]} {way}"


def cell_meaning(trained: str | None, asked: str | None) -> str:
    """The same in words: "told name first, asked for the name"; nothing of facts without directions."""
    trained, asked = _checked(trained, asked)
    if trained is None and asked is None:
        return ""
    told = "told in a direction not recorded" if trained is None else TOLD[trained]
    return f"{told}, {'asked in a direction not recorded' if asked is None else ASKED[asked]}"


def _checked(trained: str | None, asked: str | None) -> Cell:
    if (trained is not None and trained not in TOLD) or (asked is not None and asked not in ASKED):
        raise ValueError(
            f"there is no cell (trained={trained!r}, asked={asked!r}): facts are trained {', '.join(map(repr, TOLD))} "
            f"and asked {' or '.join(map(repr, ASKED))}"
        )
    return trained, asked
