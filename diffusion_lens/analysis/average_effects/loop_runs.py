"""The denoising runs that write the answers of many facts."""

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

import torch

from diffusion_lens.analysis.loop_settings import LoopSettings
from diffusion_lens.analysis.traced_trajectory import loop_prompt
from diffusion_lens.denoising.canvas import lay_out
from diffusion_lens.denoising.prepare import denoise
from diffusion_lens.denoising.step_hooks import acts_by_step
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Query
from diffusion_lens.hook_names import loop_hook
from diffusion_lens.identity import name_of
from diffusion_lens.model.transformer import DiffusionTransformer


class LoopRuns:
    """The denoising run of each fact, as a trajectory of one row, by id.

    Batches are planned for all facts of a study, and a whole batch is denoised when one of its facts is first needed.
    So no number depends on the shard, and a study that is resumed denoises only the batches that it needs. Some whole
    batches of a study, given by themselves, are planned as the same batches.

    Attributes:
        batches: Ids of the facts that are denoised together.
    """

    def __init__(self, model: DiffusionTransformer, queries: Mapping[str, Query], settings: LoopSettings) -> None:
        self._model, self._settings, self._queries = model, settings, queries
        self._prompts = {fact_id: loop_prompt(model, query) for fact_id, query in queries.items()}
        self.batches = _equally_long(queries, self._shape, settings.facts_together(model.cfg))
        self._batch_of = {fact_id: batch for batch in self.batches for fact_id in batch}
        self._runs: dict[str, Trajectory] = {}

    def __getitem__(self, fact_id: str) -> Trajectory:
        if fact_id not in self._runs:
            batch = self._batch_of[fact_id]
            prompts = torch.stack([self._prompts[member][0] for member in batch])
            length = self._prompts[fact_id][1]
            canvas = lay_out(self._model, prompts, length, attention_mask=torch.ones_like(prompts))
            trajectory = denoise(self._model, canvas, self._settings.for_facts(batch, self._model.cfg))
            self._runs |= {member: trajectory.row(row) for row, member in enumerate(batch)}
        return self._runs[fact_id]

    def recalled(self, fact_id: str) -> bool:
        """Whether the run ends with the answer."""
        query = self._queries[fact_id]
        written = self[fact_id].tokens[0, list(query.answer_positions)].tolist()
        return written == list(query.answer_tokens)

    def _shape(self, fact_id: str) -> tuple[int, int, int]:
        prompt, length = self._prompts[fact_id]
        return length, len(prompt), int(prompt.eq(self._model.cfg.blank).sum() if self._model.cfg.has_mask else 0)


def refuse_step_hooks(model: DiffusionTransformer) -> None:
    """Raise a `ValueError` if a hook of the network acts in the loop only, and so not on a canvas outside it."""
    for name, point in model.hook_dict.items():
        for handle in () if name.startswith(loop_hook("")) else point.fwd_hooks:
            if acts_by_step(handle.user_hook):
                raise ValueError(
                    "known='recalled' selects facts by running the denoising loop. Hook "
                    f"{name_of(handle.user_hook)} at {name!r} acts in that loop but not in the traces, so the two "
                    "would use different models. Trace the loop's steps (average_trajectory_effect), attach a hook "
                    "that acts outside the loop too, or select facts without the loop (known= with their ids, 'all' "
                    "or 'one_canvas')"
                )


def _equally_long(ids: Iterable[str], shape: Callable[[str], Any], size: int) -> list[list[str]]:
    """Batches of facts of one shape, ordered by id, so that they do not depend on the order of the facts."""
    ordered = sorted(ids, key=lambda fact_id: (shape(fact_id), fact_id))
    groups = [list(group) for _, group in groupby(ordered, key=shape)]
    return [group[start : start + size] for group in groups for start in range(0, len(group), size)]
