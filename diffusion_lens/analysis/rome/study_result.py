"""Results of a study of keys and values: by fact, by person, and the two directions compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.bootstrap import bootstrap_interval
from diffusion_lens.analysis.over_facts import StudyResult
from diffusion_lens.analysis.representations import Comparisons, compare_along
from diffusion_lens.display import Table
from diffusion_lens.facts import Direction
from diffusion_lens.records import load_fields, network_of, one_line, save_fields, shown_model

DIRECTIONS: dict[Direction, str] = {"p2d": "name to description", "d2p": "description to name"}
VECTORS = ("keys", "values", "outputs")


@dataclass(frozen=True, eq=False)
class FactVectors:
    """One fact's keys and values.

    Attributes:
        keys: Float[layer d_mlp], k*.
        outputs: Float[layer d_model], m, output of the MLP in the plain request.
        deltas: Float[layer d_model], δ; v* = m + δ.
        before: p(answer) in the plain request.
        after: Float[layer], p(answer) with δ at that layer.
    """

    keys: Float[Tensor, "layer d_mlp"]
    outputs: Float[Tensor, "layer d_model"]
    deltas: Float[Tensor, "layer d_model"]
    before: float
    after: Float[Tensor, "layer"]

    __repr__ = one_line

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "key and values of a fact", self)

    @classmethod
    def load(cls, path: str | Path) -> "FactVectors":
        """Read what `save` wrote."""
        return load_fields(path, "key and values of a fact", cls)

    def equals(self, other: "FactVectors") -> bool:
        """Whether both are identical to the bit."""
        tensors = (self.keys, other.keys), (self.outputs, other.outputs), (self.deltas, other.deltas)
        same = all(torch.equal(*pair) for pair in tensors) and torch.equal(self.after, other.after)
        return same and self.before == other.before


@dataclass(frozen=True, eq=False, repr=False)
class KeyValueStudy(StudyResult[FactVectors]):
    """Keys and values of facts at several layers.

    Columns of the data frame: fact, layer, before, after, key_norm, value_norm.

    Attributes:
        keys: Float[fact layer d_mlp], k*.
        outputs: Float[fact layer d_model], m.
        deltas: Float[fact layer d_model], δ.
        before: Float[fact], p(answer) in the plain request.
        after: Float[fact layer], p(answer) with δ.
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

    KIND: ClassVar[str] = "key and value study"
    FACT_FILE: ClassVar[type[Any]] = FactVectors

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
        check_vectors(vectors)
        if asked not in DIRECTIONS:
            raise ValueError(f"asked={asked!r}; it must be 'p2d' (queried from name to description) or 'd2p'")
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
        self, vectors: str = "values", against: str | None = None, *, progress: bool = False, **settings: Any
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
            progress: Whether to show a progress bar.
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
        return _compare(
            self._by_layer(forward),
            self._by_layer(reverse),
            names=[f"{kind}, {way}" for kind, way in zip(kinds, DIRECTIONS.values(), strict=True)],
            source={
                "model": shown_model(self.record),
                "networks": [network_of(self.record)] * 2,
                "vectors": list(kinds),
            },
            groups=self._trained(),
            shared_axes=kinds[0] == kinds[1],
            progress=progress,
            **settings,
        )

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
            other: Study of the other model.
            vectors, asked: The same as in `by_person`.
            progress: Whether to show a progress bar.
            settings: The same as in `compare`.

        Raises:
            ValueError: `by_person` refuses an argument, or the studies share no layer or person.
        """
        mine, theirs = (study._by_layer(study.by_person(vectors, asked)) for study in (self, other))
        models = [shown_model(study.record) for study in (self, other)]
        if not mine.keys() & theirs.keys():
            raise ValueError(
                f"the studies have no layer in common: {models[0]} has the layers {self.layers}, {models[1]} has "
                f"{other.layers}"
            )
        networks = [network_of(study.record) for study in (self, other)]
        source = {"model": " and ".join(models), "networks": networks, "vectors": [vectors, vectors]}
        return _compare(
            mine,
            theirs,
            names=models,
            source=source,
            groups=self._trained(),
            shared_axes=False,
            progress=progress,
            **settings,
        )

    def _trained(self) -> dict[str, str]:
        """The direction in which each person was trained."""
        facts = [self.record["facts"][fact_id] for fact_id in self.ids]
        return {fact["person"]: str(fact["trained"]) for fact in facts}

    def _by_layer(self, vectors: Mapping[str, Tensor]) -> "ByLayer":
        """The vectors of each person by layer."""
        return {
            layer: {person: own[column] for person, own in vectors.items()} for column, layer in enumerate(self.layers)
        }

    def _table(self) -> Table:
        values = {
            "before": self.before[:, None],
            "after": self.after,
            "key_norm": self.keys.norm(dim=-1),
            "value_norm": self.values.norm(dim=-1),
        }
        return Table.of_cells({"fact": self.ids, "layer": self.layers}, values)

    def plot(self, level: float = 0.95, ax: Any = None, title: str | None = None) -> Any:
        """Plot p(answer) with v* by layer, one curve with its interval for each direction. Returns the axes."""
        rows: dict[str, list[int]] = {}
        for row, fact_id in enumerate(self.ids):
            rows.setdefault(DIRECTIONS.get(self.record["facts"][fact_id]["asked"], "all facts"), []).append(row)
        return plots.probability_by_layer(
            {
                way: (self.after[own].mean(dim=0), *bootstrap_interval(self.after[own], level, seed=0))
                for way, own in rows.items()
            },
            {way: self.before[own].mean().item() for way, own in rows.items()},
            self.layers,
            ax=ax,
            title=title or f"{shown_model(self.record)}: {len(self.ids)} facts",
        )


def _no_rows(record: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a study of no facts."""
    n_layers, architecture = len(record["layers"]), record["architecture"]
    widths = {"keys": "d_mlp", "outputs": "d_model", "deltas": "d_model"}
    by_width = {name: torch.empty(0, n_layers, architecture[width]) for name, width in widths.items()}
    return {**by_width, "after": torch.empty(0, n_layers)}


def check_vectors(name: str) -> None:
    """Raise a `ValueError` unless a study has vectors of this name."""
    if name not in VECTORS:
        raise ValueError(f"vectors={name!r}; it must be one of {', '.join(VECTORS)}")


ByLayer = dict[int, dict[str, Tensor]]


def _compare(
    one: ByLayer, other: ByLayer, *, names: Sequence[str], groups: Mapping[str, str], **settings: Any
) -> Comparisons:
    """Compare the vectors of the persons that both sets have, at each layer that both have."""
    layers = [layer for layer in one if layer in other]
    persons = [person for person in one[layers[0]] if person in other[layers[0]]]
    sets = {
        layer: (
            torch.stack([one[layer][person] for person in persons]),
            torch.stack([other[layer][person] for person in persons]),
        )
        for layer in layers
    }
    trained = [groups[person] for person in persons]
    return compare_along("layer", sets, ids=persons, names=(names[0], names[1]), groups=trained, **settings)
