"""The two names of a cell of the reversal experiment, which read as opposites.

Berglund et al. 2023 (arXiv 2309.12288) name their files after the TRAINED direction: "p2d reverse" queries the names of
people trained name first ("person to description"). Nie et al. 2024 (SMDM, arXiv 2410.18514) name their columns after
the QUERIED direction: that same cell is their "DtN reverse" ("description to name"). So both names are printed.
"""

DirectionPair = tuple[str | None, str | None]  # trained, queried

QUESTION = {"p2d": "NtD", "d2p": "DtN"}
TOLD = {"p2d": "told name first", "d2p": "told description first", "both": "told both ways"}
ASKED = {"p2d": "asked for the description", "d2p": "asked for the name"}


def cell_name(trained: str | None, asked: str | None) -> str:
    """Both names: `cell_name("p2d", "d2p")` is "p2d reverse = DtN reverse"; facts without directions are "facts".

    Args:
        trained: Direction in which the fact was trained: "p2d", "d2p" or "both".
        asked: Direction in which it is queried: "p2d" or "d2p".

    Raises:
        ValueError: A direction is none of these.
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
    """The same in words: "told name first, asked for the name"; empty for facts without directions."""
    trained, asked = _checked(trained, asked)
    if trained is None and asked is None:
        return ""
    told = "told in a direction not recorded" if trained is None else TOLD[trained]
    return f"{told}, {'asked in a direction not recorded' if asked is None else ASKED[asked]}"


def _checked(trained: str | None, asked: str | None) -> DirectionPair:
    if (trained is not None and trained not in TOLD) or (asked is not None and asked not in ASKED):
        raise ValueError(
            f"there is no cell (trained={trained!r}, asked={asked!r}): facts are trained {', '.join(map(repr, TOLD))} "
            f"and asked {' or '.join(map(repr, ASKED))}"
        )
    return trained, asked
