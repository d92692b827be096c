"""A task of a study: a chunk of its facts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from diffusion_lens.analysis.resumable import FactFolder
from diffusion_lens.analysis.workers.job import Compute, Job
from diffusion_lens.analysis.workers.shared_folder import SharedFolder

_NAMED = 5  # facts of a task in an error message


@dataclass(frozen=True)
class Done:
    """What became of one fact.

    Attributes:
        fact: Id of the fact.
        result: Its result; `None` if the worker has written it to the study's folder, or failed.
        error: Why it failed, or `None`.
    """

    fact: str
    result: Any = None
    error: str | None = None


@dataclass(frozen=True)
class FactsTask:
    """Some batches of a study. A fact that raises an error does not stop the others.

    Facts that are in the folder already, from an earlier attempt, are not computed again.

    Attributes:
        job: What is computed of these facts.
        batches: Ids of the facts that are computed together.
        folder: Folder of the study; `None` if nothing is written.
    """

    job: Job
    batches: Sequence[Sequence[str]]
    folder: SharedFolder | None

    @property
    def name(self) -> str:
        """What error messages call it: the facts that it has not computed, as far as this process sees."""
        left = [repr(fact_id) for fact_id in self._left()]
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        return f"that still has to compute {', '.join(left[:_NAMED])}{more}"

    @property
    def size(self) -> int:
        """Number of facts."""
        return sum(map(len, self.batches))

    @property
    def n_kept(self) -> int:
        """Number of facts in the folder."""
        return self.size - len(self._left())

    def compute(self, model: Any) -> list[Done]:
        """What became of each fact."""
        folder, compute = self.folder.facts() if self.folder else None, self.job.on(model)
        return [done for batch in self.batches for done in _of_batch(compute, batch, folder)]

    def _left(self) -> list[str]:
        folder = self.folder.facts() if self.folder else None
        ids = [fact_id for batch in self.batches for fact_id in batch]
        return [fact_id for fact_id in ids if folder is None or not folder.file(fact_id).exists()]


def _of_batch(compute: Compute, batch: Sequence[str], folder: FactFolder | None) -> Iterator[Done]:
    missing = [fact_id for fact_id in batch if folder is None or not folder.has(fact_id)]
    try:
        results = compute(batch) if missing else [None] * len(batch)
    except Exception as error:  # whatever it is, it belongs to these facts and not to the others
        yield from (Done(fact_id, error=f"{type(error).__name__}: {error}") for fact_id in batch)
        return
    for fact_id, result in zip(batch, results, strict=True):
        if folder is None:
            yield Done(fact_id, result)
            continue
        if fact_id in missing:
            folder.save(fact_id, result)
        yield Done(fact_id)
