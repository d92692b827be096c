"""Keys and values of many facts at several layers, queried in either direction: are both directions encoded alike?

The study computes k* (`rome.keys`) and v* (`rome.values`, with the fact's own answer as the object) for every fact and
layer. In a forward query ("Daphne Barrington was once ...") the name is the key and the description the value; in a
reverse query ("... was directed by ...") the description is the key and the name the value. `KeyValueStudy.compare`
pairs the two directions of each person, and compares their similarity (`representations.compare`) with chance.

The result of a fact does not depend on the other facts, except for rounding errors. Adam with ROME's learning rate of
0.5 amplifies these. To keep results bit-identical, the batches are fixed for the whole study, and a batch is always
computed in full, even to fill in one missing fact.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from diffusion_lens.analysis.canvas_layout import CanvasLayout
from diffusion_lens.analysis.over_facts import Study
from diffusion_lens.analysis.resumable import Shard
from diffusion_lens.analysis.rome.keys import check_key_position, compute_keys
from diffusion_lens.analysis.rome.prompts import lay_out_request
from diffusion_lens.analysis.rome.search import ValueSettings
from diffusion_lens.analysis.rome.study_result import FactVectors, KeyValueStudy
from diffusion_lens.analysis.rome.values import optimize_values
from diffusion_lens.analysis.selection import unique_indices
from diffusion_lens.analysis.usable_facts import UsableFacts
from diffusion_lens.analysis.workers.executor import Executes
from diffusion_lens.analysis.workers.job import Compute
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.facts import Fact, Query
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.settings import Whole, at_least, naming_the_nearest, pick_indices
from weight_conversion import Architecture


@dataclass(frozen=True)
class KeyValueSettings:
    """Settings of a study of keys and values.

    Attributes:
        layers: Blocks, negative ones from the end; `None` selects all but the last.
        prefixes: Short texts before every request, over which k* and the loss are averaged.
        at: Token at which the key is taken.
        search: Settings of the search for v*.
        batch_size: Number of facts searched together.
        layout: Layout of the canvas of each request.
    """

    layers: Iterable[Whole] | None = None
    prefixes: Sequence[str] = ()
    at: str = "subject_last"
    search: ValueSettings = field(default_factory=ValueSettings)
    batch_size: Whole = 32
    layout: CanvasLayout = field(default_factory=CanvasLayout)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", unique_indices("layers", self.layers))
        object.__setattr__(self, "prefixes", tuple(self.prefixes))
        object.__setattr__(self, "batch_size", at_least(1, "batch_size", self.batch_size))
        check_key_position(self.at)

    def blocks(self, shape: Architecture | DiffusionConfig) -> list[int]:
        """The selected blocks of a model, counted from 0; by default those with one MLP, without the last block."""
        every = range(shape.n_layers - 1)
        dense = [i for i in every if shape.experts is None or not shape.experts.layers[i]]
        return pick_indices("layers", (dense or every) if self.layers is None else self.layers, shape.n_layers)

    def request(self, model: DiffusionTransformer, fact: Fact) -> list[Query]:
        """The plain request of a fact, and the request after each prefix."""
        return lay_out_request(model, fact, self.prefixes, self.layout)

    def describe(self, shape: Architecture | DiffusionConfig | None) -> dict[str, Any]:
        """Settings for the record.

        Args:
            shape: The model's architecture. Pass `None` before the model is loaded to omit the settings that depend on
                it, such as the layers.
        """
        settings = {
            "prefixes": list(self.prefixes),
            "at": self.at,
            "settings": asdict(self.search),
            "batch_size": self.batch_size,
            "length": self.layout.length,
            "first_tokens": self.layout.first_tokens,
            "occurrence": self.layout.occurrence,
            **({} if self.layout.n_masks is None else {"n_masks": self.layout.n_masks}),
        }
        if shape is not None:
            return {"layers": self.blocks(shape), **settings}
        if self.layout.length is None:
            del settings["length"]
        return settings


@naming_the_nearest
def key_value_study(
    model: DiffusionTransformer,
    facts: Sequence[Fact],
    layers: Iterable[Whole] | None = None,
    *,
    prefixes: Sequence[str] = (),
    at: str = "subject_last",
    settings: ValueSettings | None = None,
    length: int | None = None,
    first_tokens: int | None = None,
    occurrence: int | None = None,
    batch_size: Whole = 32,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    progress: bool = False,
    executor: Executes | None = None,
) -> KeyValueStudy:
    """k* and v* of every fact at every layer.

    `study_keys_and_values` takes the settings as one object, `KeyValueSettings`.

    Args:
        facts: Facts, with `person` and `asked` if the directions are to be compared.
        layers: Blocks whose MLPs are studied; by default all but the last, whose output reaches no other position.
        prefixes: Short texts before every request (`rome.sample_prefixes`), over which k* and the loss are averaged.
        at: Token at which the key is taken, as in `compute_key`.
        settings: Settings of the search for v*.
        length: Length of every canvas of a masked diffusion model, prefix and prompt included; by default, as in
            `average_indirect_effect`, the length that it was trained on, if that is known. The record's `length` says
            which. A fact that needs a longer canvas is set aside.
        first_tokens, occurrence: The same as in `rome.query_with_prefixes`.
        batch_size: Number of facts searched together.
        out: Folder for one file per fact. A call that finds facts there computes only the others. By default nothing is
            written.
        shard: (i, n) or "i/n": compute the batches i, i + n, i + 2n, ... only; `KeyValueStudy.merge` joins the shards,
            bit for bit what one process gives on the same machine.
        progress: Whether to show a progress bar.
        executor: `concurrent.futures.Executor`, or `Workers`, that computes the batches; by default this process does.

    Raises:
        ValueError: A setting is out of range, two facts have one id, the folder contains another study,
            `rome.optimize_value` refuses a request, or the model can be queried for none of the facts. A single fact
            that `rome.query_with_prefixes` refuses is set aside, with the reason in `KeyValueStudy.set_aside`.
    """
    chosen = KeyValueSettings(
        layers=layers,
        prefixes=prefixes,
        at=at,
        search=settings or ValueSettings(),
        batch_size=batch_size,
        layout=CanvasLayout(length, first_tokens=first_tokens, occurrence=occurrence),
    )
    return study_keys_and_values(model, facts, chosen, out, shard, progress, executor)


@begins_run
def study_keys_and_values(
    model: DiffusionTransformer,
    facts: Sequence[Fact],
    settings: KeyValueSettings,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    progress: bool = False,
    executor: Executes | None = None,
) -> KeyValueStudy:
    """k* and v* of every fact at every layer, like `key_value_study`, with settings given as one object.

    Args:
        model: Masked diffusion model or causal model.
        facts: Facts, with `person` and `asked` if the directions are to be compared.
        settings: Settings of the study.
        out: Folder for one file per fact. A call that finds facts there computes only the others. By default nothing is
            written.
        shard: (i, n) or "i/n": compute the batches i, i + n, i + 2n, ... only.
        progress: Whether to show a progress bar.
        executor: `concurrent.futures.Executor`, or `Workers`, that computes the batches; by default this process does.

    Raises:
        ValueError: The same as in `key_value_study`.
    """
    settings = replace(settings, layers=settings.blocks(model.cfg), layout=settings.layout.on(model))
    usable = UsableFacts.of(facts, lambda fact: settings.request(model, fact))
    ids, size = list(usable.prepared), int(settings.batch_size)
    record = {**settings.describe(model.cfg), **usable.describe(), **provenance(model, model.cfg)}
    batches = [ids[start : start + size] for start in range(0, len(ids), size)]
    study = Study(model, record, batches, VectorJob(usable.prepared, settings))
    return study.collect(KeyValueStudy, out, shard, progress, executor)


@dataclass(frozen=True)
class VectorJob:
    """The keys and values of requests.

    Attributes:
        requests: The plain request of each fact, and the request after each prefix, by id.
        settings: Settings of the study.
    """

    requests: Mapping[str, list[Query]]
    settings: KeyValueSettings

    def part(self, ids: Sequence[str]) -> "VectorJob":
        """The job with these facts."""
        return replace(self, requests={fact_id: self.requests[fact_id] for fact_id in ids})

    def on(self, model: DiffusionTransformer) -> Compute:
        """The function that computes the vectors of a batch."""
        return lambda batch: find_vectors(model, [self.requests[fact_id] for fact_id in batch], self.settings)


def find_vectors(
    model: DiffusionTransformer, requests: list[list[Query]], settings: KeyValueSettings
) -> list[FactVectors]:
    """k* and v* of a batch of requests at every layer."""
    layers = settings.blocks(model.cfg)
    keys = [compute_keys(model, requests, layer, settings.at) for layer in layers]
    values = [optimize_values(model, requests, layer, settings=settings.search) for layer in layers]
    return [
        FactVectors(
            keys=torch.stack([of_layer[row].vector for of_layer in keys]),
            outputs=torch.stack([of_layer[row].initial for of_layer in values]),
            deltas=torch.stack([of_layer[row].delta for of_layer in values]),
            before=values[0][row].probability_before,
            after=torch.tensor([of_layer[row].probability_after for of_layer in values]),
        )
        for row in range(len(requests))
    ]
