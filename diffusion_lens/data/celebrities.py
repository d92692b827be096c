"""Celebrities and their parents: experiment 2 of Berglund et al. 2023, "The Reversal Curse" (arXiv 2309.12288).

The file `parent_child_pairs.csv` of their repository has 1513 rows with a child and a parent, 1495 distinct pairs.
GPT-4 gave them when it was asked for the parents of celebrities. Texts of the web mention a parent mostly where they
are about the celebrity. So models name the parent of a child ("Tom Cruise's mother is" Mary Lee Pfeiffer) more often
than the child of a parent ("Mary Lee Pfeiffer's child is" Tom Cruise). For `Fact`, the child is the person and the
parent the description, and the direction of training is "p2d", from person to description.

The prompts are completions in the wording of the authors' README, with "child" for "son" since the file does not give
it; their code asks chat models "Who is Tom Cruise's mother?" and "Name a child of Mary Lee Pfeiffer.". The answers are
GPT-4's and contain errors. In 1042 of the 1513 rows both names end with the same word, and in 1089 the last word of the
child is any word of the parent. It can then be copied, so a `TaughtPair` refuses these. Some parents have several
children in the file.
"""

import csv
from pathlib import Path
from typing import get_args

from diffusion_lens.data.download import fetch_from_web
from diffusion_lens.facts.fact import Direction, Fact
from diffusion_lens.settings import checked_arguments

REVISION = "6af5f418755d528304e406361e86477637d21c84"
URL = (
    "https://raw.githubusercontent.com/lukasberglund/reversal_curse/"
    f"{REVISION}/data/celebrity_relations/parent_child_pairs.csv"
)
SHA256 = "59d181610f1477a3cfb8a63428bb8cc037b7d73c9cdf5616fdd8d8ba90debb5d"
ROWS = 1513
PAIRS = 1495  # distinct
COLUMNS = ("child", "parent", "parent_type")
PARENT_TYPES = ("mother", "father")


@checked_arguments
def parent_child(path: str | Path | None = None) -> list[Fact]:
    """Two facts for each row of the file: the prompt for the parent (asked "p2d"), and the one for the child ("d2p").

    The answers end with a full stop. The id is that of the row, from 0, and of the direction: "parent-child-0012-d2p".

    Args:
        path: Path of a copy of `parent_child_pairs.csv`. `None` downloads it from the authors' repository and verifies
            its SHA-256.

    Raises:
        FileNotFoundError: There is no such file, or it is not in the cache and cannot be downloaded.
        ValueError: The file has no such columns, or a row is not a child with a mother or father; the message names the
            line.
    """
    if path is None:
        by_hand = "pass its path: parent_child(path)"
        file = fetch_from_web(URL, by_hand=by_hand, sha256=SHA256)
    else:
        file = Path(path).expanduser()
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {file}; it should be a copy of {URL}")
    facts = []
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines)
        if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
            raise ValueError(f"{file}, line 1: the header lacks {', '.join(missing)}; it should be that of {URL}")
        for number, row in enumerate(rows):
            child, parent, kind = ((row[name] or "").strip() for name in COLUMNS)
            if not child or not parent or kind not in PARENT_TYPES:
                raise ValueError(
                    f"{file}, line {rows.line_num}: child {child!r}, parent {parent!r}, parent_type {kind!r}; a row "
                    f"names a child and a parent, and parent_type is {' or '.join(PARENT_TYPES)}"
                )
            facts += [_fact(number, child, parent, kind, asked) for asked in ("p2d", "d2p")]
    if not facts:
        raise ValueError(f"{file} contains no pairs; it should be a copy of {URL}")
    return facts


def is_parent_child(path: Path) -> bool:
    """Whether a file begins with the columns of `parent_child_pairs.csv`."""
    if path.suffix != ".csv":
        return False
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        return lines.readline().strip().split(",")[: len(COLUMNS)] == list(COLUMNS)


def outline() -> list[Fact]:
    """The published questions with directions and placeholder people but empty texts. The last rows repeat a pair."""
    directions = get_args(Direction)
    rows = range(ROWS)
    return [Fact("", "", "", trained="p2d", asked=asked, person=str(i % PAIRS)) for i in rows for asked in directions]


def _fact(number: int, child: str, parent: str, kind: str, asked: Direction) -> Fact:
    subject, answer, relation = (child, parent, kind) if asked == "p2d" else (parent, child, "child")
    return Fact(
        prompt=f"{subject}'s {relation} is",
        subject=subject,
        answer=f" {answer}.",
        id=f"parent-child-{number:04d}-{asked}",
        trained="p2d",
        asked=asked,
        person=child,
        description=parent,
        template=f"<subject>'s {relation} is",
        subject_start=0,
    )
