"""ROME's experiment over many requests: key, value and rank-one edit of each, and what the edit changes.

For each request to write another object (`EditRequest`) the study computes k* (`rome.keys`) and v* (`rome.values`),
applies the rank-one edit (`rome.edit`), scores the probes of the request without and with it (`rome.success`), and
restores the weights, so that each edit is applied to the model as it was given. `EditStudy.table` gives the means over
requests, as in ROME's table 1.

The values of a batch of requests are searched together. The batches are fixed for the whole study, and a batch is
always computed in full, so results are bit-identical in one process, in shards, and after an interruption.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from diffusion_lens.analysis.canvas_layout import CanvasLayout
from diffusion_lens.analysis.over_facts import Study
from diffusion_lens.analysis.resumable import Shard
from diffusion_lens.analysis.rome.edit import RankOneEdit
from diffusion_lens.analysis.rome.edited_layer import pick_edited_layer
from diffusion_lens.analysis.rome.inverse_moment import (
    Covariance,
    InverseMoment,
    describe_covariance,
    require_covariance_of,
)
from diffusion_lens.analysis.rome.keys import check_key_position, compute_keys
from diffusion_lens.analysis.rome.many_edits_result import EditOutcome, EditStudy
from diffusion_lens.analysis.rome.request_plan import RequestPlan
from diffusion_lens.analysis.rome.search import ValueSettings
from diffusion_lens.analysis.rome.success import judge
from diffusion_lens.analysis.rome.values import optimize_values
from diffusion_lens.analysis.workers.executor import Executes
from diffusion_lens.analysis.workers.job import Compute
from diffusion_lens.data.rome_facts import EditRequest
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.settings import Whole, at_least


@dataclass(frozen=True)
class EditSettings:
    """Settings of the edits of a study.

    Attributes:
        layer: Block whose down-projection is edited, negative ones from the end.
        search: Settings of the search for v*.
        prefixes: Short texts before every request (`rome.sample_prefixes`), over which k* and the loss are averaged.
        at: Token at which the key is taken.
        layout: Layout of the canvases, of the requests and of all probes. By default those of a masked diffusion model
            have the length that it was trained on, if that is known.
        batch_size: Number of requests whose values are searched together.
    """

    layer: Whole
    search: ValueSettings = field(default_factory=ValueSettings)
    prefixes: Sequence[str] = ()
    at: str = "subject_last"
    layout: CanvasLayout = field(default_factory=CanvasLayout)
    batch_size: Whole = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefixes", tuple(self.prefixes))
        object.__setattr__(self, "batch_size", at_least(1, "batch_size", self.batch_size))
        check_key_position(self.at)

    def on(self, model: DiffusionTransformer) -> "EditSettings":
        """These settings with the layer counted from 0 and the length of canvas that applies to `model`."""
        return replace(self, layer=pick_edited_layer(model, self.layer), layout=self.layout.on(model))

    def describe(self) -> dict[str, Any]:
        """Settings for the record."""
        return {
            "layer": self.layer,
            "settings": asdict(self.search),
            "prefixes": list(self.prefixes),
            "at": self.at,
            **asdict(self.layout),
            "batch_size": self.batch_size,
        }


@begins_run
def edit_study(
    model: DiffusionTransformer,
    requests: Sequence[EditRequest],
    settings: EditSettings,
    *,
    covariance: Covariance | None = None,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    progress: bool = False,
    executor: Executes | None = None,
) -> EditStudy:
    """Edit the model by each request in turn, and score the request's probes without and with its edit.

    Args:
        model: Masked diffusion model or causal model. Its weights are restored after each edit.
        requests: Requests of `data.counterfact`, `data.bake` or `data.site_edits`, or your own.
        settings: Settings of the edits.
        covariance: C of the layer, `second_moment(...)` or Float[d_mlp d_mlp]; by default C = I.
        out: Folder for one file per request. A call that finds requests there computes only the others. By default
            nothing is written.
        shard: (i, n) or "i/n": compute the batches i, i + n, i + 2n, ... only; `EditStudy.merge` joins the shards.
        progress: Whether to show a progress bar.
        executor: `concurrent.futures.Executor`, or `Workers`, that computes the batches; by default this process does.

    Raises:
        ValueError: A setting is out of range, two requests have one id, the covariance belongs to another layer or
            model or is no second moment, the folder contains another study, or no request can be laid out. A single
            request that cannot be laid out, or one of whose probes cannot, is set aside, with the reason in
            `EditStudy.set_aside`.
    """
    settings = settings.on(model)
    if covariance is not None:
        require_covariance_of(model, int(settings.layer), covariance)
    plan = RequestPlan.of(model, requests, settings.prefixes, settings.layout)
    record = {
        **settings.describe(),
        "covariance": describe_covariance(covariance),
        **plan.describe(),
        **provenance(model, model.cfg),
    }
    ids, size = list(plan.requests), int(settings.batch_size)
    batches = [ids[start : start + size] for start in range(0, len(ids), size)]
    study = Study(model, record, batches, EditJob(plan.requests, settings, covariance))
    return study.collect(EditStudy, out, shard, progress, executor)


@dataclass(frozen=True, eq=False)
class EditJob:
    """The edits of requests, one by one.

    Attributes:
        requests: Requests by id.
        settings: Settings of the edits, with the layer and the length of this model.
        covariance: C of the layer; `None` for C = I.
    """

    requests: Mapping[str, EditRequest]
    settings: EditSettings
    covariance: Covariance | None

    def part(self, ids: Sequence[str]) -> "EditJob":
        """The job with these requests."""
        return replace(self, requests={request_id: self.requests[request_id] for request_id in ids})

    def on(self, model: DiffusionTransformer) -> Compute:
        """The function that applies and scores the edits of a batch."""
        plan = RequestPlan(model, dict(self.requests), {}, self.settings.prefixes, self.settings.layout)

        @cache
        def inverse() -> InverseMoment | None:
            return None if self.covariance is None else InverseMoment.of(self.covariance)

        return lambda batch: edit_each(plan, batch, self.settings, inverse())


def edit_each(
    plan: RequestPlan, ids: Sequence[str], settings: EditSettings, inverse: InverseMoment | None
) -> list[EditOutcome]:
    """Apply and revert the edit of each request in turn. Keys and values are computed on the unedited model."""
    model, layer = plan.model, int(settings.layer)
    queries = [plan.queries(request_id) for request_id in ids]
    keys = compute_keys(model, queries, layer, settings.at)
    values = optimize_values(model, queries, layer, settings=settings.search)
    outcomes = []
    for request_id, key, value in zip(ids, keys, values, strict=True):
        groups, probes = plan.probes(request_id)
        before = judge(model, probes)
        with RankOneEdit(model, layer, key, value, inverse):
            after = judge(model, probes)
        outcomes.append(EditOutcome.of(groups, before, after, value.probability_after))
    return outcomes
