"""MEMIT, several edits at once in several layers (Meng et al. 2023, "Mass-Editing Memory", arXiv 2210.07229).

1. For each request i, a vector δ_i is searched that makes the model write the new object when it is added to the
   residual stream h_L behind the last edited block L, at the subject's last token. The loss is that of v*
   (`rome.values`), except that ‖δ‖ is measured in ‖h_L‖. The target is z_i = h_L + δ_i.
2. For each edited block l in increasing order, the keys k_i of the subjects become the columns of K. The columns of
   R are (z_i - h_L) / n, where h_L is that of the model with the blocks edited so far, and n counts the blocks that are
   not yet edited, l included. The update of the down-projection W of block l is the ridge regression

       ΔW = R Kᵀ (λ C + K Kᵀ)⁻¹

   λ C stands for the other contents of the memory, as if it stored λ keys of the corpus (section 4.2).

In a time-conditioned network, R is divided by the gate of the block at that time, which multiplies what W writes.

C is the second moment of the unedited model (`rome.covariance`). One request in one block gets the direction C⁻¹ k of
the rank-one edit, scaled by s / (λ + s) with s = kᵀ C⁻¹ k, because the ridge does not enforce the target.

The steps and the defaults follow the authors' code for GPT-J (kmeng01/memit, `memit_main.py` and `compute_z.py`), with
two differences. Their key is the mean of the key in the plain prompt and the mean key after the prefixes; here all
prompts count the same. Their essence is read at the subject's last token; here that is `essence_at="subject_last"`.

Their λ of 15000 is for an MLP of 16384 units. The share of the target that an update reaches depends on the size of
kᵀ C⁻¹ k, about the number of units for an average key of the corpus, so a smaller model needs a smaller λ.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import MISSING, asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.analysis.engine.layout import Queries, as_queries
from diffusion_lens.analysis.over_facts.study import FactsJob, Study
from diffusion_lens.analysis.rome.covariance import (
    Covariance,
    InverseMoment,
    describe_covariance,
    matrix_of,
    require_covariance_of,
)
from diffusion_lens.analysis.rome.edit import judge_by_token
from diffusion_lens.analysis.rome.edit_study import EditOutcome, EditStudy, RequestSettings
from diffusion_lens.analysis.rome.keys import (
    Factors,
    WeightEdit,
    before_gate,
    compute_keys,
    pick_edited_layers,
    states_at,
)
from diffusion_lens.analysis.rome.values import search_together
from diffusion_lens.data.rome_facts import EditRequest
from diffusion_lens.facts.fact import Query
from diffusion_lens.hooks.names import resid_post
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import network_of, provenance
from diffusion_lens.settings import Whole, positive, setting, unique_indices
from diffusion_lens.settings.shared import Number, ValueSettings

COV_WEIGHT = 15000.0
SEARCH = ValueSettings(steps=25, clamp_norm_factor=0.75)  # The authors' for GPT-J.

Covariances = Mapping[int, Covariance]


class MemitEdit(WeightEdit):
    """Edits of many facts in several layers, which `memit` computes, applied and reverted like every `WeightEdit`.

    The updates do not depend on the weights at the time they are applied.

    Attributes:
        searched: p(new object) of each request with δ added to the residual stream, before the weights are edited.
        errors: Float[entry request], ‖z - h_L‖ of each request before each block is edited, and after all are.
        record: Layers, λ, C and ridge of each layer (the ridge is 0 unless λ C + K Kᵀ was singular), settings of the
            search, and under "taken_from" the network for which the updates were computed.
    """

    def __init__(
        self,
        model: DiffusionTransformer,
        updates: Mapping[int, Factors],
        searched: Sequence[float] = (),
        errors: Float[Tensor, "entry request"] | None = None,
        record: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self._updates = model, dict(updates)
        self.searched, self.record = list(searched), dict(record or {})
        self.errors = torch.empty(0, len(self.searched)) if errors is None else errors

    @property
    def layers(self) -> list[int]:
        """The edited blocks, in increasing order."""
        return sorted(self._updates)

    def factors(self, layer: int) -> Factors:
        """R and (λ C + K Kᵀ)⁻¹ K of block `layer`, whose product is ΔW."""
        return self._updates[layer]

    def describe(self) -> dict[str, Any]:
        """The edited layers, and the record."""
        return {"layers": self.layers, **self.record}


@begins_run
def memit(
    model: DiffusionTransformer,
    requests: Sequence[Queries],
    layers: Iterable[Whole],
    *,
    covariances: Covariances | None = None,
    settings: ValueSettings | None = None,
    cov_weight: Number = COV_WEIGHT,
    essences: Sequence[Query] | None = None,
    progress: bool = False,
) -> MemitEdit:
    """Compute the updates that make a model write the objects of all requests. The model is left as it was.

    Args:
        requests: The plain request and the same after prefixes (`query_with_prefixes`) of each fact, or a single query.
            Their answer is the object to write.
        layers: Blocks whose down-projections are edited; negative ones count from the end.
        covariances: C of each of these blocks, by their number from 0: `second_moment(...)` or Float[d_mlp d_mlp]. By
            default C = I.
        settings: Settings of the search for δ; by default the authors' for GPT-J.
        cov_weight: λ, the weight of C against the keys of the requests.
        essences: One essence per request; by default "{subject} is a".

    Raises:
        ValueError: There are no requests, a layer is out of range or has no covariance, a covariance belongs to
            another layer or model, λ is not positive, or `optimize_value` refuses a request.
    """
    settings, given = settings or SEARCH, [as_queries(model, request) for request in requests]
    if not given:
        raise ValueError("there are no requests: give at least one")
    chosen = pick_edited_layers(model, layers)
    used, weight = covariances_of(model, chosen, covariances), positive("cov_weight", cov_weight)

    # 1. The targets z.
    plain, last = [request[0] for request in given], chosen[-1]
    found = search_together(model, given, essences, last, settings, measured_by="resid_post", progress=progress)
    deltas = torch.stack([result.delta for result in found]).double()
    states = states_at(model, plain, resid_post(last), last).double()
    targets = states + deltas

    # 2. The update of each layer, upon those of the layers before it.
    updates: dict[int, Factors] = {}
    ridges, errors = {}, []
    with ExitStack() as applied:
        for n, layer in enumerate(chosen):
            missing = targets - states
            errors.append(missing.norm(dim=1))
            keys = torch.stack([key.vector for key in compute_keys(model, given, layer)], dim=1).double()
            c = torch.eye(len(keys), dtype=keys.dtype) if (own := used[layer]) is None else matrix_of(own)
            inverse = InverseMoment.of(weight * c + keys @ keys.T)
            ridges[layer] = inverse.ridge
            gate = model.time.gates(layer)[1] if model.cfg.time_conditioning else None
            written = before_gate(missing / (len(chosen) - n), gate)
            updates[layer] = Factors(written.T.contiguous(), inverse.times(keys))
            applied.enter_context(MemitEdit(model, {layer: updates[layer]}))
            states = states_at(model, plain, resid_post(last), last).double()
        errors.append((targets - states).norm(dim=1))
    record = {
        "layers": chosen,
        "cov_weight": weight,
        "covariances": {str(layer): describe_covariance(each) for layer, each in used.items()},
        "ridges": {str(layer): ridge for layer, ridge in ridges.items()},
        "settings": asdict(settings),
        "requests": len(given),
        "taken_from": network_of(provenance(model, model.cfg)),
    }
    return MemitEdit(model, updates, [result.probability_after for result in found], torch.stack(errors), record)


def covariances_of(
    model: DiffusionTransformer, layers: Sequence[int], covariances: Covariances | None
) -> dict[int, Covariance | None]:
    """C of each layer that is edited, checked; `None` stands for the identity."""
    if covariances is None:
        return dict.fromkeys(layers)
    if missing := [layer for layer in layers if layer not in covariances]:
        raise ValueError(
            f"there is no covariance of layer {missing[0]}; covariances has those of {sorted(covariances)}"
        )
    for layer in layers:
        require_covariance_of(model, layer, covariances[layer])
    return {layer: covariances[layer] for layer in layers}


@dataclass(frozen=True)
class MemitSettings(RequestSettings):
    """Settings of edits that are made at once."""

    layers: Iterable[Whole] = setting(
        MISSING, "Blocks whose down-projections are edited, negative ones from the end.", unique_indices
    )
    search: ValueSettings = setting(
        SEARCH, "Settings of the search for the targets; by default the authors' for GPT-J.", option=False
    )
    cov_weight: Number = setting(COV_WEIGHT, "λ, the weight of C against the keys of the requests.", positive)

    def on(self, model: DiffusionTransformer) -> "MemitSettings":
        """These settings with the layers counted from 0 and the length of canvas that applies to `model`."""
        layers = pick_edited_layers(model, self.layers)
        return replace(self, layers=layers, layout=self.layout.on(model))


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
        model, requests, progress: The same as in `edit_study`, which also says when a request is set aside.
        settings: Settings of the edit.
        covariances: C of each layer by its number, as in `memit`.
        out: Folder for one file per request; a call that finds them all there computes nothing.

    Raises:
        ValueError: The same as in `memit`, or the folder contains another study.
    """
    settings = settings.on(model)
    used = covariances_of(model, [int(layer) for layer in settings.layers], covariances)
    usable, facts = settings.usable(model, requests)
    described = {str(layer): describe_covariance(each) for layer, each in used.items()}
    record = {**settings.describe(), "covariances": described, **facts, **provenance(model, model.cfg)}
    job = FactsJob(usable, partial(edit_together, settings=settings, covariances=covariances))
    return Study(model, record, [list(usable)], job).collect(EditStudy, out, (0, 1), progress, None)


def edit_together(
    model: DiffusionTransformer,
    requests: Mapping[str, EditRequest],
    settings: MemitSettings,
    covariances: Covariances | None,
) -> list[EditOutcome]:
    """Apply one edit of all requests, and score the probes of each."""
    queries = [settings.queries(model, request) for request in requests.values()]
    edit = memit(
        model,
        queries,
        settings.layers,
        covariances=covariances,
        settings=settings.search,
        cov_weight=settings.cov_weight,
    )
    probes = [settings.probes(model, request) for request in requests.values()]
    before = [judge_by_token(model, own) for _, own in probes]
    with edit:
        after = [judge_by_token(model, own) for _, own in probes]
    parts = zip(before, after, probes, queries, edit.searched, strict=True)
    return [EditOutcome.of(one, other, groups, own[0], p) for one, other, (groups, _), own, p in parts]
