"""The two names of a cell of the reversal experiment, which seem to contradict each other.

Berglund et al. 2023 (arXiv 2309.12288) name their files after the TRAINED direction: "p2d reverse" queries the names of
people trained name first ("person to description"). Nie et al. 2024 (SMDM, arXiv 2410.18514) name their columns after
the QUERIED direction: that same cell is their "DtN reverse" ("description to name"). So both names are printed.
"""

DirectionPair = tuple[str | None, str | None]  # trained, queried

QUESTION = {"p2d": "NtD", "d2p": "DtN"}
TRAINED = {"p2d": "trained name first", "d2p": "trained description first", "both": "trained both ways"}
QUERIED = {"p2d": "queried for the description", "d2p": "queried for the name"}


def cell_name(trained: str | None, queried: str | None) -> str:
    """Both names: `cell_name("p2d", "d2p")` is "p2d reverse = DtN reverse"; facts without directions are "facts".

    Args:
        trained: Direction in which the fact was trained: "p2d", "d2p" or "both".
        queried: Direction in which it is queried: "p2d" or "d2p".

    Raises:
        ValueError: A direction is none of these.
    """
    trained, queried = _checked(trained, queried)
    if trained is None and queried is None:
        return "facts"
    if trained is None or queried is None:
        return f"trained {trained or '?'}, queried {queried or '?'}"
    if trained == "both":
        return f"both {queried} = {QUESTION[queried]} both"
    way = "same" if trained == queried else "reverse"
    return f"{trained} {way} = {QUESTION[queried]} {way}"


def cell_meaning(trained: str | None, queried: str | None) -> str:
    """The same in words: "trained name first, queried for the name"; empty for facts without directions."""
    trained, queried = _checked(trained, queried)
    if trained is None and queried is None:
        return ""
    training = "trained in a direction not recorded" if trained is None else TRAINED[trained]
    return f"{training}, {'queried in a direction not recorded' if queried is None else QUERIED[queried]}"


def _checked(trained: str | None, queried: str | None) -> DirectionPair:
    if (trained is not None and trained not in TRAINED) or (queried is not None and queried not in QUERIED):
        raise ValueError(
            f"there is no cell (trained={trained!r}, asked={queried!r}): trained= is one of "
            f"{', '.join(map(repr, TRAINED))}, and asked=, the queried direction, is {' or '.join(map(repr, QUERIED))}"
        )
    return trained, queried
