"""Spread the facts of a study over the workers of an executor, and collect their results.

Where the study has a folder that workers see, they write results there, and a task that is tried again computes only
what is missing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion_lens.analysis.resumable import FactFolder
from diffusion_lens.analysis.workers.executor import Executes, Workers
from diffusion_lens.analysis.workers.facts_task import FactsTask
from diffusion_lens.analysis.workers.job import Job
from diffusion_lens.analysis.workers.progress import Progress
from diffusion_lens.analysis.workers.running import run_tasks
from diffusion_lens.analysis.workers.shared_folder import SharedFolder
from diffusion_lens.model.transformer import DiffusionTransformer


@dataclass(frozen=True)
class Work:
    """What is spread.

    Attributes:
        model: Model of the study; `None` if it trains its own.
        job: What is computed.
        batches: Ids of the facts that are computed together.
        neighbours: Groups of facts that share work, so that a task should contain whole groups.
        folder: Folder of the study; `None` if nothing is written.
        unit: What the progress bar calls a fact.
    """

    model: DiffusionTransformer | None
    job: Job
    batches: Sequence[Sequence[str]]
    neighbours: Sequence[Sequence[str]] = ()
    folder: FactFolder | None = None
    unit: str = "fact"

    def tasks(self, workers: Workers) -> list[FactsTask]:
        """The tasks, of batches that are not in the folder yet."""
        has = self.folder.has if self.folder else lambda fact_id: False
        batches = [batch for batch in self.batches if not all(has(fact_id) for fact_id in batch)]
        place = {fact_id: i for i, group in enumerate(self.neighbours) for fact_id in group}
        batches.sort(key=lambda batch: place.get(batch[0], 0))
        size = workers.facts_per_task or -(-sum(map(len, batches)) // workers.tasks)
        shared = SharedFolder.of(self.folder.path, self.folder.record) if self.folder else None
        return [
            FactsTask(self.job.part([fact_id for batch in chunk for fact_id in batch]), chunk, shared)
            for chunk in _chunks(batches, size)
        ]


def spread(
    work: Work, executor: Executes, load: Callable[[Path], Any] = Path, progress: bool = False
) -> tuple[list[tuple[str, Any]], dict[str, str]]:
    """Compute what is not in the folder yet on the workers.

    Args:
        load: Function that reads the result of a fact from its file, if there is a folder.

    Returns:
        The results of all facts with their ids, and the errors of the facts that failed.

    Raises:
        ValueError: The model or its hooks cannot be sent, or a worker gets another network.
        RuntimeError: A task was given up after its workers died, or the executor takes no more tasks. What was
            computed is in the folder.
    """
    workers = Workers.of(executor)
    results: dict[str, Any] = {}
    failed: dict[str, str] = {}
    tasks = work.tasks(workers)
    all_ids = [fact_id for batch in work.batches for fact_id in batch]
    with Progress(all_ids, work.folder, work.unit, progress) as bar:
        bar.update(len(all_ids) - sum(task.size for task in tasks))
        ended = run_tasks(tasks, work.model, workers, bar, while_waiting=bar.look)
        for done in (done for _, of_task in ended for done in of_task):
            if done.error is not None:
                failed[done.fact] = done.error
            elif work.folder is None:
                results[done.fact] = done.result
            elif done.result is not None and not work.folder.has(done.fact):
                work.folder.save(done.fact, done.result)
    if work.folder is None:
        return list(results.items()), failed
    ids = [fact_id for fact_id in all_ids if fact_id not in failed]
    if unseen := [fact_id for fact_id in ids if not work.folder.has(fact_id)]:
        raise RuntimeError(
            f"workers have written {len(unseen)} {work.unit}s to {work.folder.path} that this process does not see, "
            f"first {unseen[0]!r}. A network file system may show them later: call again"
        )
    return [(fact_id, load(work.folder.file(fact_id))) for fact_id in ids], failed


def _chunks(batches: Sequence[Sequence[str]], size: int) -> Iterator[list[Sequence[str]]]:
    """Consecutive batches with at least so many facts; the last chunk may have fewer."""
    chunk: list[Sequence[str]] = []
    for batch in batches:
        chunk.append(batch)
        if sum(map(len, chunk)) >= size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
