"""What a study of keys and values holds: by fact, by person, and the two directions compared."""

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
from diffusion_lens.facts import Direction
from diffusion_lens.records import load_fields, network_of, save_fields

DIRECTIONS: dict[Direction, str] = {"p2d": "name to description", "d2p": "description to name"}
VECTORS = ("keys", "values", "outputs")


@dataclass(frozen=True, eq=False)
class FactVectors:
    """One fact's keys and values.

    Attributes:
        keys: Float[layer d_mlp], k*.
        outputs: Float[layer d_model], m, what the MLP answers in the plain request.
        deltas: Float[layer d_model], δ; v* = m + δ.
        before: p(answer) in the plain request.
        after: Float[layer], the same with δ at that layer.
    """

    keys: Float[Tensor, "layer d_mlp"]
    outputs: Float[Tensor, "layer d_model"]
    deltas: Float[Tensor, "layer d_model"]
    before: float
    after: Float[Tensor, "layer"]

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "key and values of a fact", self)

    @classmethod
    def load(cls, path: str | Path) -> "FactVectors":
        """Read what `save` wrote."""
        return load_fields(path, "key and values of a fact", cls)

    def equals(self, other: "FactVectors") -> bool:
        """Whether both are the same to the bit."""
        tensors = (self.keys, other.keys), (self.outputs, other.outputs), (self.deltas, other.deltas)
        same = all(torch.equal(*pair) for pair in tensors) and torch.equal(self.after, other.after)
        return same and self.before == other.before


@dataclass(frozen=True, eq=False)
class KeyValueStudy(StudyResult[FactVectors]):
    """Keys and values of facts at several layers.

    Attributes:
        keys: Float[fact layer d_mlp], k*.
        outputs: Float[fact layer d_model], m.
        deltas: Float[fact layer d_model], δ.
        before: Float[fact], p(answer) in the plain request.
        after: Float[fact layer], the same with δ.
        ids: the fact of each row.
        layers: the layer of each column.
        record: the settings, all facts of the run by id, those `set_aside`, model, weights' hash, versions.
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
        """The vectors of some facts of a study side by side."""
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
        """Each person's vectors in one direction, the mean over the templates in which they were asked for.

        Args:
            vectors: "keys" (k*), "values" (v*) or "outputs" (m).
            asked: "p2d" (name to description) or "d2p".

        Raises:
            ValueError: another name, or a fact that does not say its person and direction.
        """
        check_vectors(vectors)
        if asked not in DIRECTIONS:
            raise ValueError(f"asked={asked!r}; facts are asked 'p2d' (name to description) or 'd2p'")
        rows: dict[str, list[Tensor]] = {}
        for fact_id, row in zip(self.ids, getattr(self, vectors), strict=True):
            fact = self.record["facts"][fact_id]
            if not fact["person"] or fact["asked"] is None:
                raise ValueError(
                    f"the fact {fact_id!r} does not say whom it is about, or which way it asks: give it "
                    "person= and asked=, by which the two directions are paired"
                )
            if fact["asked"] == asked:
                rows.setdefault(fact["person"], []).append(row)
        return {person: torch.stack(each).mean(dim=0) for person, each in rows.items()}

    def compare(
        self, vectors: str = "values", against: str | None = None, *, progress: bool = False, **settings: Any
    ) -> Comparisons:
        """The two directions of the same persons, layer by layer.

        The same vectors in both directions stand for different words: v* is the description's when asked by name, and
        the name's when asked by description. Keys against values, `compare("keys", "values")`, is the name in both.
        Persons told in different ways ("p2d", "d2p", "both") differ as groups, which would pass for symmetry: what the
        groups differ in is taken out, and chance pairs within them.

        Args:
            vectors: of the questions from name to description, as in `by_person`.
            against: of those from description to name, by default the same. Keys and values have no common axes: of
                them "procrustes" and "cka" are computed.
            settings: rank, draws and seed of `representations.compare`.

        Raises:
            ValueError: as in `by_person`, or too few persons that were asked for both ways.
        """
        kinds = (vectors, against or vectors)
        forward, reverse = (self.by_person(kind, asked) for kind, asked in zip(kinds, DIRECTIONS, strict=True))
        if not forward.keys() & reverse.keys():
            raise ValueError(
                f"nobody was asked for both ways: {len(forward)} persons by name, {len(reverse)} by "
                "description, none the same"
            )
        return _compare(
            self._by_layer(forward),
            self._by_layer(reverse),
            names=[f"{kind}, {way}" for kind, way in zip(kinds, DIRECTIONS.values(), strict=True)],
            source={
                "model": self.record["model"],
                "networks": [network_of(self.record)] * 2,
                "vectors": list(kinds),
            },
            groups=self._told(),
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
        """The same persons in two models, asked the same way, at the layers that both studies have.

        The models share no axes: "procrustes" and "cka" are computed.

        Args:
            vectors, asked: as in `by_person`.
            settings: as in `compare`.

        Raises:
            ValueError: as in `by_person`, or no layer or person in common.
        """
        mine, theirs = (study._by_layer(study.by_person(vectors, asked)) for study in (self, other))
        models = [self.record["model"], other.record["model"]]
        if not mine.keys() & theirs.keys():
            raise ValueError(f"{models[0]} was asked at the layers {self.layers}, {models[1]} at {other.layers}")
        networks = [network_of(study.record) for study in (self, other)]
        source = {"model": " and ".join(models), "networks": networks, "vectors": [vectors, vectors]}
        return _compare(
            mine,
            theirs,
            names=models,
            source=source,
            groups=self._told(),
            shared_axes=False,
            progress=progress,
            **settings,
        )

    def _told(self) -> dict[str, str]:
        """How each person was told."""
        facts = [self.record["facts"][fact_id] for fact_id in self.ids]
        return {fact["person"]: str(fact["trained"]) for fact in facts}

    def _by_layer(self, vectors: Mapping[str, Tensor]) -> "ByLayer":
        """Each person's vectors taken apart by layer."""
        return {
            layer: {person: each[column] for person, each in vectors.items()}
            for column, layer in enumerate(self.layers)
        }

    def plot(self, level: float = 0.95, ax: Any = None, title: str | None = None) -> Any:
        """p(answer) with v* by layer, a curve with its interval for each direction. Returns the matplotlib axes."""
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
            title=title or f"{self.record['model']}: {len(self.ids)} facts",
        )


def _no_rows(record: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a study of no facts."""
    n_layers, architecture = len(record["layers"]), record["architecture"]
    widths = {"keys": "d_mlp", "outputs": "d_model", "deltas": "d_model"}
    by_width = {name: torch.empty(0, n_layers, architecture[width]) for name, width in widths.items()}
    return {**by_width, "after": torch.empty(0, n_layers)}


def check_vectors(name: str) -> None:
    """Raise a `ValueError` unless a study holds vectors of this name."""
    if name not in VECTORS:
        raise ValueError(f"vectors={name!r}; there are {', '.join(VECTORS)}")


ByLayer = dict[int, dict[str, Tensor]]


def _compare(
    one: ByLayer, other: ByLayer, *, names: Sequence[str], groups: Mapping[str, str], **settings: Any
) -> Comparisons:
    """Two sets of persons' vectors, layer by layer, person by person."""
    layers = [layer for layer in one if layer in other]
    persons = [person for person in one[layers[0]] if person in other[layers[0]]]
    sets = {
        layer: (
            torch.stack([one[layer][each] for each in persons]),
            torch.stack([other[layer][each] for each in persons]),
        )
        for layer in layers
    }
    told = [groups[person] for person in persons]
    return compare_along("layer", sets, ids=persons, names=(names[0], names[1]), groups=told, **settings)
