"""The experiment of `edit_study` with all requests edited at once: what one MEMIT edit changes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from diffusion_lens.analysis.canvas_layout import CanvasLayout
from diffusion_lens.analysis.over_facts import Study
from diffusion_lens.analysis.rome.edited_layer import pick_edited_layers
from diffusion_lens.analysis.rome.inverse_moment import describe_covariance
from diffusion_lens.analysis.rome.many_edits_result import EditOutcome, EditStudy
from diffusion_lens.analysis.rome.mass_edit import (
    COV_WEIGHT,
    SEARCH,
    Covariances,
    covariances_of,
    memit,
    positive_weight,
)
from diffusion_lens.analysis.rome.request_plan import RequestPlan
from diffusion_lens.analysis.rome.search import Number, ValueSettings
from diffusion_lens.analysis.rome.success import judge
from diffusion_lens.analysis.workers.job import Compute
from diffusion_lens.data.rome_facts import EditRequest
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.settings import Whole


@dataclass(frozen=True)
class MemitSettings:
    """Settings of edits that are made at once.

    Attributes:
        layers: Blocks whose down-projections are edited, negative ones from the end.
        search: Settings of the search for the targets; by default the authors' for GPT-J.
        prefixes: Short texts before every request, over which keys and the loss are averaged.
        cov_weight: λ, the weight of C against the keys of the requests.
        layout: Layout of the canvases, of the requests and of all probes, as in `EditSettings`.
    """

    layers: Iterable[Whole]
    search: ValueSettings = SEARCH
    prefixes: Sequence[str] = ()
    cov_weight: Number = COV_WEIGHT
    layout: CanvasLayout = field(default_factory=CanvasLayout)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "prefixes", tuple(self.prefixes))
        object.__setattr__(self, "cov_weight", positive_weight(self.cov_weight))

    def on(self, model: DiffusionTransformer) -> "MemitSettings":
        """These settings with the layers counted from 0 and the length of canvas that applies to `model`."""
        layers = pick_edited_layers(model, self.layers)
        return replace(self, layers=layers, layout=self.layout.on(model))

    def describe(self) -> dict[str, Any]:
        """Settings for the record."""
        return {
            "layers": list(self.layers),
            "settings": asdict(self.search),
            "prefixes": list(self.prefixes),
            "cov_weight": self.cov_weight,
            **asdict(self.layout),
        }


@begins_run
def memit_study(
    model: DiffusionTransformer,
    requests: Sequence[EditRequest],
    settings: MemitSettings,
    *,
    covariances: Covariances | None = None,
    out: str | Path | None = None,
    progress: bool = False,
) -> EditStudy:
    """Edit the model by all requests at once, and score each request's probes without and with that edit.

    Intervals of the result are over the requests of this one edit; another set of requests is another edit.

    Args:
        model: Masked diffusion model or causal model. Its weights are restored.
        requests: Requests of `data.counterfact`, `data.bake` or `data.site_edits`, or your own.
        settings: Settings of the edit.
        covariances: C of each layer by its number, as in `memit`.
        out: Folder for one file per request; a call that finds them all there computes nothing.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: The same as in `memit`, or the folder contains another study. A single request that cannot be laid
            out is set aside, as in `edit_study`.
    """
    settings = settings.on(model)
    used = covariances_of(model, [int(layer) for layer in settings.layers], covariances)
    plan = RequestPlan.of(model, requests, settings.prefixes, settings.layout)
    described = {str(layer): describe_covariance(each) for layer, each in used.items()}
    record = {**settings.describe(), "covariances": described, **plan.describe(), **provenance(model, model.cfg)}

    job = MassEditJob(plan.requests, settings, covariances)
    return Study(model, record, [list(plan.requests)], job).collect(EditStudy, out, (0, 1), progress, None)


@dataclass(frozen=True, eq=False)
class MassEditJob:
    """One edit of all requests.

    Attributes:
        requests: Requests by id.
        settings: Settings of the edit, with the layers and the length of this model.
        covariances: C of each layer by its number.
    """

    requests: Mapping[str, EditRequest]
    settings: MemitSettings
    covariances: Covariances | None

    def part(self, ids: Sequence[str]) -> "MassEditJob":
        """The job itself: the requests are edited together."""
        return self

    def on(self, model: DiffusionTransformer) -> Compute:
        """The function that applies and scores the edit."""
        plan = RequestPlan(model, dict(self.requests), {}, self.settings.prefixes, self.settings.layout)
        return lambda batch: edit_together(plan, batch, self.settings, self.covariances)


def edit_together(
    plan: RequestPlan, ids: Sequence[str], settings: MemitSettings, covariances: Covariances | None
) -> list[EditOutcome]:
    """Apply one edit of all requests, and score the probes of each."""
    edit = memit(
        plan.model,
        [plan.queries(request_id) for request_id in ids],
        settings.layers,
        covariances=covariances,
        settings=settings.search,
        cov_weight=settings.cov_weight,
    )
    probes = [plan.probes(request_id) for request_id in ids]
    before = [judge(plan.model, own) for _, own in probes]
    with edit:
        after = [judge(plan.model, own) for _, own in probes]
    return [
        EditOutcome.of(groups, *states, searched)
        for (groups, _), states, searched in zip(probes, zip(before, after, strict=True), edit.searched, strict=True)
    ]
