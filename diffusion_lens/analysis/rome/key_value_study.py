"""Keys and values of many facts at several layers, queried in either direction: are both directions encoded alike?

The study computes k* (`rome.keys`) and v* (`rome.values`, with the fact's own answer as the object) for every fact and
layer. In a forward query ("Daphne Barrington was once ...") the name is the key and the description the value; in a
reverse query ("... was directed by ...") the description is the key and the name the value. `KeyValueStudy.compare`
pairs the two directions of each person, and compares their similarity (`representations.compare`) with chance.

The result of a fact does not depend on the other facts, except for rounding errors. Adam with ROME's learning rate of
0.5 amplifies these. To keep results bit-identical, the batches are fixed for the whole study, and a batch is always
computed in full, even to fill in one missing fact.
"""

import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.engine.layout import CanvasLayout, UsableFacts
from diffusion_lens.analysis.over_facts.executor import Executes
from diffusion_lens.analysis.over_facts.folder import Shard
from diffusion_lens.analysis.over_facts.intervals import mean_interval
from diffusion_lens.analysis.over_facts.study import FactResult, FactsJob, Study, StudyResult, in_batches_of
from diffusion_lens.analysis.representations import Comparisons, compare_along
from diffusion_lens.analysis.rome.keys import compute_keys, lay_out_request
from diffusion_lens.analysis.rome.values import optimize_values
from diffusion_lens.facts.fact import Direction, Fact, Query
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import Saved, Table, network_of, one_line, provenance, shown_model
from diffusion_lens.settings import checked_arguments, one_of, pick_indices, takes
from diffusion_lens.settings.figures import styled
from diffusion_lens.settings.shared import FIRST_TOKENS, VectorFields
from weight_conversion import Architecture

DIRECTIONS: dict[Direction, str] = {"p2d": "name to description", "d2p": "description to name"}
check_vectors = one_of("keys", "values", "outputs")


@dataclass(frozen=True, eq=False)
class FactVectors(FactResult, Saved):
    """One fact's keys and values.

    Attributes:
        keys: Float[layer d_mlp], k*.
        outputs: Float[layer d_model], m, output of the MLP in the plain request.
        deltas: Float[layer d_model], δ; v* = m + δ.
        before: p(answer) in the plain request.
        after: Float[layer], p(answer) with δ at that layer.
    """

    KIND = "key and values of a fact"

    keys: Float[Tensor, "layer d_mlp"]
    outputs: Float[Tensor, "layer d_model"]
    deltas: Float[Tensor, "layer d_model"]
    before: float
    after: Float[Tensor, "layer"]

    __repr__ = one_line


@dataclass(frozen=True, eq=False, repr=False)
class KeyValueStudy(StudyResult[FactVectors]):
    """Keys and values of facts at several layers.

    Columns of the data frame: fact, layer, before, after, key_norm, value_norm.

    Attributes:
        keys, outputs, deltas, before, after: Those of `FactVectors`, with a first axis for the facts.
        ids: The fact of each row.
        layers: The layer of each column.
        record: Settings, all facts of the study by id, those `set_aside`, model, weights' hash, versions.
    """

    keys: Float[Tensor, "fact layer d_mlp"]
    outputs: Float[Tensor, "fact layer d_model"]
    deltas: Float[Tensor, "fact layer d_model"]
    before: Float[Tensor, "fact"]
    after: Float[Tensor, "fact layer"]
    ids: list[str]
    layers: list[int]
    record: dict[str, Any]

    KIND = "key and value study"
    SHOWS = "p(answer) with the optimised value, by the layer of the value"
    ENTRIES: ClassVar[Mapping[str, Any]] = {
        "facts": dict[str, dict[str, Any]],
        "set_aside": dict[str, str],
        "model": str,
    }
    FACT_FILE = FactVectors
    AXES = (("fact", "ids"), ("layer", "layers"))

    @classmethod
    def of(cls, results: Mapping[str, FactVectors], record: dict[str, Any]) -> "KeyValueStudy":
        """One result from the vectors of some facts of a study."""
        names = ("keys", "outputs", "deltas", "after")
        rows = {name: [getattr(vectors, name) for vectors in results.values()] for name in names}
        stacked = {name: torch.stack(rows[name]) for name in names} if results else _no_rows(record)
        before = torch.tensor([vectors.before for vectors in results.values()])
        return cls(**stacked, before=before, ids=list(results), layers=record["layers"], record=record)

    def by_fact(self) -> dict[str, FactVectors]:
        """The inverse of `of`."""
        rows = zip(self.keys, self.outputs, self.deltas, self.before.tolist(), self.after, strict=True)
        return {fact_id: FactVectors(*row) for fact_id, row in zip(self.ids, rows, strict=True)}

    @property
    def values(self) -> Float[Tensor, "fact layer d_model"]:
        """v* = m + δ."""
        return self.outputs + self.deltas

    def by_person(self, vectors: str, asked: str) -> dict[str, Float[Tensor, "layer d"]]:
        """Each person's vectors in one direction, averaged over the templates of the queries.

        Args:
            vectors: "keys" (k*), "values" (v*) or "outputs" (m).
            asked: Direction of the queries: "p2d" (name to description) or "d2p".

        Raises:
            ValueError: An argument has another value, or a fact has no person or direction.
        """
        check_vectors("vectors", vectors)
        one_of(*DIRECTIONS)("asked", asked)
        rows: dict[str, list[Tensor]] = {}
        for fact_id, row in zip(self.ids, getattr(self, vectors), strict=True):
            fact = self.record["facts"][fact_id]
            if not fact["person"] or fact["asked"] is None:
                raise ValueError(
                    f"the fact {fact_id!r} does not name its person or the direction of its query: give it person= and "
                    "asked=, by which the two directions are paired"
                )
            if fact["asked"] == asked:
                rows.setdefault(fact["person"], []).append(row)
        return {person: torch.stack(own).mean(dim=0) for person, own in rows.items()}

    def compare(
        self, vectors: str = "keys", against: str | None = None, *, progress: bool = False, **settings: Any
    ) -> Comparisons:
        """Compare the two directions of the same persons, layer by layer.

        The same vectors represent different words in the two directions: v* is the value of the description in a
        forward query, and of the name in a reverse query. Keys against values, `compare("keys", "values")`, compare the
        name with the name. Persons trained in different directions ("p2d", "d2p", "both") differ as groups, which could
        be mistaken for symmetry. So the group means are subtracted, and random pairings stay within the groups.

        Args:
            vectors: Vectors of the queries from name to description, as in `by_person`.
            against: Vectors of the queries from description to name; by default the same. Keys and values have no
                common axes: for them "procrustes" and "cka" are computed.
            settings: rank, resamples and seed of `representations.compare`.

        Raises:
            ValueError: `by_person` refuses an argument, or too few persons were queried in both directions.
        """
        kinds = (vectors, against or vectors)
        forward, reverse = (self.by_person(kind, asked) for kind, asked in zip(kinds, DIRECTIONS, strict=True))
        if not forward.keys() & reverse.keys():
            raise ValueError(
                f"no person was queried in both directions: {len(forward)} persons by name, {len(reverse)} others by "
                "description"
            )
        names = [f"{kind}, {way}" for kind, way in zip(kinds, DIRECTIONS.values(), strict=True)]
        settings |= {"shared_axes": kinds[0] == kinds[1], "progress": progress}
        return _compare((self, self), (forward, reverse), names, kinds, **settings)

    def compare_with(
        self,
        other: "KeyValueStudy",
        vectors: str = "keys",
        asked: str = "p2d",
        *,
        progress: bool = False,
        **settings: Any,
    ) -> Comparisons:
        """Compare the same persons in two models, queried in one direction, at the layers that both studies have.

        The models share no axes: "procrustes" and "cka" are computed.

        Args:
            vectors, asked: The same as in `by_person`.
            settings: The same as in `compare`.

        Raises:
            ValueError: `by_person` refuses an argument, or the studies share no layer or person.
        """
        sides = self.by_person(vectors, asked), other.by_person(vectors, asked)
        models = [shown_model(study.record) for study in (self, other)]
        if set(self.layers).isdisjoint(other.layers):
            raise ValueError(
                f"the studies have no layer in common: {models[0]} has the layers {self.layers}, {models[1]} has "
                f"{other.layers}"
            )
        if sides[0].keys().isdisjoint(sides[1]):
            raise ValueError(f"the studies of {models[0]} and {models[1]} have no person in common")
        settings |= {"shared_axes": False, "progress": progress}
        return _compare((self, other), sides, models, (vectors, vectors), **settings)

    def _table(self) -> Table:
        values = {
            "before": self.before[:, None],
            "after": self.after,
            "key_norm": self.keys.norm(dim=-1),
            "value_norm": self.values.norm(dim=-1),
        }
        return Table.of_cells({"fact": self.ids, "layer": self.layers}, values)

    @styled
    def plot(self, level: float = 0.95, ax: Any = None, title: str | None = None) -> Any:
        """Plot p(answer) with v* by layer, one curve with its interval for each direction. Returns the axes."""
        rows: dict[str, list[int]] = {}
        for row, fact_id in enumerate(self.ids):
            rows.setdefault(DIRECTIONS.get(self.record["facts"][fact_id]["asked"], "all facts"), []).append(row)
        clusters = self.clusters

        def curve(own: list[int]) -> tuple[Tensor, Tensor, Tensor]:
            ends = mean_interval(self.after[own], [clusters[row] for row in own], level, seed=0, within=(0.0, 1.0))
            return self.after[own].mean(dim=0), *ends

        return plots.probability_by_layer(
            {way: curve(own) for way, own in rows.items()},
            {way: self.before[own].mean().item() for way, own in rows.items()},
            self.layers,
            ax=ax,
            title=title or f"{shown_model(self.record)}: {len(self.ids)} facts",
        )


def _compare(
    studies: tuple[KeyValueStudy, KeyValueStudy],
    sides: tuple[dict[str, Tensor], dict[str, Tensor]],
    names: Sequence[str],
    kinds: Sequence[str],
    **settings: Any,
) -> Comparisons:
    """Compare the vectors of two studies, or of one with itself, of the persons and at the layers that both have."""
    persons = [person for person in sides[0] if person in sides[1]]

    def at(layer: int, study: KeyValueStudy, vectors: dict[str, Tensor]) -> Tensor:
        column = study.layers.index(layer)
        return torch.stack([vectors[person][column] for person in persons])

    shared_layers = [layer for layer in studies[0].layers if layer in studies[1].layers]
    facts = [studies[0].record["facts"][fact_id] for fact_id in studies[0].ids]
    trained = {fact["person"]: str(fact["trained"]) for fact in facts}
    return compare_along(
        "layer",
        {layer: (at(layer, studies[0], sides[0]), at(layer, studies[1], sides[1])) for layer in shared_layers},
        ids=persons,
        names=(names[0], names[1]),
        groups=[trained[person] for person in persons],
        source={
            "model": " and ".join(shown_model(study.record) for study in dict.fromkeys(studies)),
            "networks": [network_of(study.record) for study in studies],
            "vectors": list(kinds),
        },
        **settings,
    )


def _no_rows(record: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a study of no facts."""
    n_layers, architecture = len(record["layers"]), record["architecture"]
    widths = {"keys": "d_mlp", "outputs": "d_model", "deltas": "d_model"}
    by_width = {name: torch.empty(0, n_layers, architecture[width]) for name, width in widths.items()}
    return {**by_width, "after": torch.empty(0, n_layers)}


@dataclass(frozen=True)
class KeyValueSettings(CanvasLayout, VectorFields):
    """Settings of a study of keys and values."""

    first_tokens: int | None = copy(FIRST_TOKENS)

    def blocks(self, shape: Architecture | DiffusionConfig) -> list[int]:
        """The selected blocks of a model, counted from 0; by default those with one MLP, without the last block."""
        every = range(shape.n_layers - 1)
        dense = [i for i in every if shape.experts is None or not shape.experts.layers[i]]
        return pick_indices("layers", (dense or every) if self.layers is None else self.layers, shape.n_layers)

    def request(self, model: DiffusionTransformer, fact: Fact) -> list[Query]:
        """The plain request of a fact, and the request after each prefix."""
        return lay_out_request(model, fact, self.prefixes, self)

    def describe_on(self, shape: Architecture | DiffusionConfig | None) -> dict[str, Any]:
        """The settings for the record of a study.

        Args:
            shape: The model's architecture. Without it, as before the model is loaded, the settings that depend on it
                are left out: the layers, and the length if it is the model's own.
        """
        described = self.describe()
        described["settings"] = asdict(described.pop("search"))
        if self.n_masks is None:
            del described["n_masks"]
        if shape is not None:
            return described | {"layers": self.blocks(shape)}
        del described["layers"]
        return {name: value for name, value in described.items() if (name, value) != ("length", None)}


@takes(KeyValueSettings)
@begins_run
def key_value_study(
    model: DiffusionTransformer,
    facts: Sequence[Fact],
    settings: KeyValueSettings,
    *,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    progress: bool = False,
    executor: Executes | None = None,
) -> KeyValueStudy:
    """k* and v* of every fact at every layer.

    Args:
        model: Masked diffusion model or causal model.
        facts: Facts, with `person` and `asked` if the directions are to be compared.
        settings: Settings of the study.
        out: Folder for one file per fact. A call that finds facts there computes only the others.
        shard: (i, n) or "i/n": compute the batches i, i + n, i + 2n, ... only; `KeyValueStudy.merge` joins the shards,
            bit for bit what one process gives on the same machine.
        executor: `concurrent.futures.Executor`, or `Workers`, that computes the batches; by default this process does.

    Raises:
        ValueError: A setting is out of range, two facts have one id, the folder contains another study,
            `rome.optimize_value` refuses a request, or the model can be queried for none of the facts. A single fact
            that `rome.query_with_prefixes` refuses is set aside, with the reason in `KeyValueStudy.set_aside`.
    """
    settings = replace(settings.on(model), layers=settings.blocks(model.cfg))
    usable = UsableFacts.of(facts, lambda fact: settings.request(model, fact))
    record = {**settings.describe_on(model.cfg), **usable.describe(), **provenance(model, model.cfg)}
    batches = in_batches_of(settings.batch_size, usable.prepared)
    study = Study(model, record, batches, FactsJob(usable.prepared, partial(find_vectors, settings=settings)))
    return study.collect(KeyValueStudy, out, shard, progress, executor)


@checked_arguments
def study_keys_and_values(
    model: DiffusionTransformer, facts: Sequence[Fact], settings: KeyValueSettings, *args: Any, **more: Any
) -> KeyValueStudy:
    """The same as `key_value_study(model, facts, settings, ...)`; will be removed."""
    warnings.warn(
        "study_keys_and_values will be removed; use key_value_study(model, facts, settings, ...)",
        DeprecationWarning,
        stacklevel=2,
    )
    given = dict(zip(("out", "shard", "progress", "executor"), args, strict=False))
    return key_value_study(model, facts, settings=settings, **given, **more)


def find_vectors(
    model: DiffusionTransformer, requests: Mapping[str, list[Query]], settings: KeyValueSettings
) -> list[FactVectors]:
    """k* and v* of a batch of requests at every layer."""
    layers, queries = settings.blocks(model.cfg), list(requests.values())
    keys = [compute_keys(model, queries, layer, settings.at) for layer in layers]
    values = [optimize_values(model, queries, layer, settings=settings.search) for layer in layers]
    return [
        FactVectors(
            keys=torch.stack([of_layer[row].vector for of_layer in keys]),
            outputs=torch.stack([of_layer[row].initial for of_layer in values]),
            deltas=torch.stack([of_layer[row].delta for of_layer in values]),
            before=values[0][row].probability_before,
            after=torch.tensor([of_layer[row].probability_after for of_layer in values]),
        )
        for row in range(len(queries))
    ]
