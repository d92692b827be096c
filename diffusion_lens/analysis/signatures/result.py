"""Results of the three signatures: of one pair, and of all pairs of a study with means, intervals and a picture."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.over_facts.intervals import mean_interval, share_interval
from diffusion_lens.analysis.over_facts.study import FactResult, StudyResult
from diffusion_lens.analysis.signatures.gradients import EMBEDDING, HEAD
from diffusion_lens.records.results import Saved, Table, one_line, shown_model
from diffusion_lens.settings import one_of
from diffusion_lens.settings.figures import styled


@dataclass(frozen=True, eq=False)
class FactSignatures(FactResult, Saved):
    """The signatures of one pair. The canvases are forward and reverse.

    Attributes:
        percentiles: Float[canvas estimate layer], share of the other candidates that the right answer's evidence
            exceeds, by the evidence of the own source, and in the mean by that of the sources of all facts of the
            batch.
        reuses: Float[layer], cosine of the evidence on the two canvases.
        cuts: Float[canvas layer], log p(answer) that is lost by cutting the edge from reader to source, in nats.
        routes: Float[route layer head], scores from reader to source: forward, reverse, and counterfactual. NaN where a
            causal model does not see the source.
        isotropic: Float[], correlation of the two scores for isotropic queries and keys; NaN without rotary positions.
        cosines: Float[parameter estimate], cosine of the gradients of the two losses: of the pair itself, and the mean
            over the forward gradient of this pair with the reverse gradients of the other pairs of its batch.
        transfers: Float[parameter], <g_forward, g_reverse> / |g_forward|².
        steps: Float[estimate], change of the reverse loss, in nats, by a small step on the forward loss: predicted to
            first order, and measured.
        probabilities: Float[canvas], p(answer).
    """

    KIND = "signatures of a fact"

    percentiles: Float[Tensor, "canvas estimate layer"]
    reuses: Float[Tensor, "layer"]
    cuts: Float[Tensor, "canvas layer"]
    routes: Float[Tensor, "route layer head"]
    isotropic: Float[Tensor, ""]
    cosines: Float[Tensor, "parameter estimate"]
    transfers: Float[Tensor, "parameter"]
    steps: Float[Tensor, "estimate"]
    probabilities: Float[Tensor, "canvas"]

    __repr__ = one_line


TENSORS = tuple(field.name for field in fields(FactSignatures))
CANVASES = ("forward", "reverse")
_CORRELATIONS = ("evidence_reuse", "route_correlation", "counterfactual_correlation", "gradient_cosine")
_RANGES = {"probability": (0.0, 1.0), **dict.fromkeys(_CORRELATIONS, (-1.0, 1.0))}


@dataclass(frozen=True, eq=False)
class ReversalSignatures(StudyResult[FactSignatures]):
    """The three signatures of taught pairs. Tensors have a row for each fact; properties are means over facts.

    Columns of the data frame: fact, layer, percentile_forward, percentile_reverse, reuse, cut_forward, cut_reverse,
    route_correlation.

    Attributes:
        percentiles, reuses, cuts, routes, isotropic, cosines, transfers, steps, probabilities: Those of
            `FactSignatures`, with a first axis for the facts.
        ids: The pair of each row.
        record: Settings, all pairs of the study by id, the names of the `parameters` in the order of their axis, model,
            weights' hash, versions.
    """

    percentiles: Float[Tensor, "fact canvas estimate layer"]
    reuses: Float[Tensor, "fact layer"]
    cuts: Float[Tensor, "fact canvas layer"]
    routes: Float[Tensor, "fact route layer head"]
    isotropic: Float[Tensor, "fact"]
    cosines: Float[Tensor, "fact parameter estimate"]
    transfers: Float[Tensor, "fact parameter"]
    steps: Float[Tensor, "fact estimate"]
    probabilities: Float[Tensor, "fact canvas"]
    ids: list[str]
    record: dict[str, Any]

    KIND = "reversal signatures"
    SHOWS = "evidence, cut edges, routes and gradients of facts by layer, in the trained and the reverse direction"
    ENTRIES: ClassVar[Mapping[str, Any]] = {
        "facts": dict[str, dict[str, Any]],
        "set_aside": dict[str, str],
        "model": str,
        "parameters": list[str],
    }
    FACT_FILE = FactSignatures
    CLUSTER: ClassVar[str] = "group"

    def _axes(self) -> Iterable[tuple[str, Any]]:
        sizes = (("canvas", 2), ("estimate", 2), ("route", 3))
        return (("fact", self.ids), ("parameter", self.record["parameters"]), *sizes)

    @classmethod
    def of(cls, results: Mapping[str, FactSignatures], record: dict[str, Any]) -> "ReversalSignatures":
        """One result from the signatures of some pairs of a study."""
        if results:
            tensors = [torch.stack([getattr(each, name) for each in results.values()]) for name in TENSORS]
        else:
            n_layers, n_heads = (record["architecture"][name] for name in ("n_layers", "n_heads"))
            n_parameters, layers = len(record["parameters"]), (n_layers,)
            shapes = [(2, 2, *layers), layers, (2, *layers), (3, *layers, n_heads), (), (n_parameters, 2)]
            tensors = [torch.empty(0, *shape) for shape in [*shapes, (n_parameters,), (2,), (2,)]]
        return cls(**dict(zip(TENSORS, tensors, strict=True)), ids=list(results), record=record)

    def by_fact(self) -> dict[str, FactSignatures]:
        """The inverse of `of`."""
        rows = zip(*(getattr(self, name) for name in TENSORS), strict=True)
        return {fact_id: FactSignatures(*row) for fact_id, row in zip(self.ids, rows, strict=True)}

    @property
    def candidates(self) -> list[int]:
        """Token ids among which the percentile is taken."""
        return list(self.record["candidates"])

    @property
    def parameters(self) -> list[str]:
        """Names of the weight matrices in which gradients are compared."""
        return list(self.record["parameters"])

    @property
    def evidence_percentile(self) -> Float[Tensor, "canvas layer"]:
        """Share of the other candidates that the right answer exceeds by the evidence of its source."""
        return self.percentiles[:, :, 0].mean(dim=0)

    @property
    def shuffled_percentile(self) -> Float[Tensor, "canvas layer"]:
        """The same in the mean over the sources of all facts: the baseline, 0.5 among the facts' own answers."""
        return self.percentiles[:, :, 1].mean(dim=0)

    @property
    def evidence_reuse(self) -> Float[Tensor, "layer"]:
        """Cosine of the evidence on the two canvases, centred over the candidates."""
        return self.reuses.mean(dim=0)

    @property
    def edge_cut(self) -> Float[Tensor, "canvas layer"]:
        """log p(answer) that is lost by cutting the edge from reader to source, in nats."""
        return self.cuts.mean(dim=0)

    @property
    def route_correlation(self) -> Float[Tensor, "layer"] | None:
        """Correlation over heads of the scores forward and in reverse; `None` if the reader does not see the source."""
        return self._mean_of_routes(1)

    @property
    def counterfactual_correlation(self) -> Float[Tensor, "layer"] | None:
        """Correlation over heads of the forward scores with those at the reverse positions; `None` also with learned
        positions, which queries and keys contain already."""
        return self._mean_of_routes(2)

    @property
    def isotropic_correlation(self) -> float | None:
        """Mean over facts of `isotropic_route_correlation` at their offsets and the model's own frequencies.

        `None` also without rotary positions.
        """
        return None if self._sees_nothing or bool(self.isotropic.isnan().any()) else float(self.isotropic.mean())

    @property
    def gradient_cosine(self) -> dict[str, tuple[float, float]]:
        """By parameter, the cosine of the two gradients of one pair, and of shuffled pairs."""
        means = self.cosines.mean(dim=0).tolist()
        return {name: (own, shuffled) for name, (own, shuffled) in zip(self.parameters, means, strict=True)}

    @property
    def transfer(self) -> dict[str, float]:
        """By parameter, <g_forward, g_reverse> / |g_forward|²: the fall of the reverse loss per fall of the forward
        one."""
        return dict(zip(self.parameters, self.transfers.mean(dim=0).tolist(), strict=True))

    @property
    def first_order(self) -> tuple[float, float]:
        """Change of the reverse loss, in nats, by a step that lowers the forward loss by 0.1%: predicted, and
        measured."""
        predicted, measured = self.steps.double().mean(dim=0).tolist()
        return predicted, measured

    @property
    def probability(self) -> Float[Tensor, "canvas"]:
        """Mean p(answer)."""
        return self.probabilities.mean(dim=0)

    def interval(self, name: str, level: float = 0.95, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Ends of the confidence interval of one of the means, with its axes.

        Persons are resampled, since pairs of one person (`TaughtPair.group`) are not independent. A pair without a
        person counts as one. Percentiles are shares and have Wilson's interval; of other means, fewer than four persons
        have none (NaN).

        Args:
            name: Name of the property. "gradient_cosine" has axes [parameter estimate], "transfer" [parameter] and
                "first_order" [estimate].
            level: Probability that such an interval covers the mean.
            seed: Seed of the resampling.

        Raises:
            ValueError: No mean has this name, or the result has no pairs.
        """
        if not self.ids:
            raise ValueError("the result has no pairs: there is nothing to average")
        values = self.values(name)
        if name.endswith("percentile"):
            return share_interval(values, self.clusters, level)
        return mean_interval(values, self.clusters, level, seed, _RANGES.get(name, (-math.inf, math.inf)))

    def values(self, name: str) -> Float[Tensor, "fact *rest"]:
        """The values of each fact whose mean has this name; the axes are those of `interval`, and the names too.

        Raises:
            ValueError: No mean has this name.
        """
        values = {
            "evidence_percentile": self.percentiles[:, :, 0],
            "shuffled_percentile": self.percentiles[:, :, 1],
            "evidence_reuse": self.reuses,
            "edge_cut": self.cuts,
            "route_correlation": self._route_correlations(1),
            "counterfactual_correlation": self._route_correlations(2),
            "gradient_cosine": self.cosines,
            "transfer": self.transfers,
            "first_order": self.steps,
            "probability": self.probabilities,
        }
        if name not in values:
            raise ValueError(f"name={name!r}; it must be one of {', '.join(values)}")
        return values[name]

    @styled
    def plot(
        self,
        against: "ReversalSignatures | Sequence[ReversalSignatures]" = (),
        level: float = 0.95,
        show: str | None = None,
        ax: Any = None,
    ) -> Any:
        """Draw evidence, cuts, routes and gradients by layer, with their intervals; returns the axes in reading order.

        Args:
            against: Results of other models on the same facts, such as the AR baseline: one row of panels for each.
            level: Level of the intervals.
            show: One panel, "evidence", "cuts", "routes" or "gradients", of this result alone; returns its axes.
            ax: Axes of this one panel.

        Raises:
            ValueError: Another result has other facts, or axes or other results do not fit `show`.
        """
        if show is not None:
            one_of(*plots.SIGNATURES)("show", show)
        others = [against] if isinstance(against, ReversalSignatures) else list(against)
        if different := [each for each in others if each.ids != self.ids]:
            raise ValueError(f"{different[0]!r} has other facts than {self!r}; compare results of the same facts")
        return plots.signature_panels([each.curves(level) for each in (self, *others)], show, ax)

    def curves(self, level: float = 0.95) -> plots.SignaturePanels:
        """The means over facts with their intervals, as curves by layer."""
        evidence = _by_canvas(self.evidence_percentile, self.interval("evidence_percentile", level))
        cosines = self.gradient_cosine
        return plots.SignaturePanels(
            name=shown_model(self.record),
            evidence={
                **{f"percentile, {name}": curve for name, curve in evidence.items()},
                "percentile, all sources": plots.Curve(self.shuffled_percentile.mean(dim=0)),
                "reuse": plots.Curve(self.evidence_reuse, *self.interval("evidence_reuse", level)),
            },
            cuts=_by_canvas(self.edge_cut, self.interval("edge_cut", level)),
            routes=self._curves_of_routes(level),
            why_no_routes="the reader does not see the source" if self._sees_nothing else "one head: no correlation",
            gradients=self._curves_of_gradients(level),
            embeddings={name: cosines[name][0] for name in (EMBEDDING, HEAD) if name in cosines},
        )

    def _curves_of_routes(self, level: float) -> dict[str, plots.Curve]:
        if self._sees_nothing:
            return {}
        measured, counterfactual = (self._route_correlations(other).mean(dim=0) for other in (1, 2))
        curves = {
            "measured": plots.Curve(measured, *self.interval("route_correlation", level)),
            "counterfactual": plots.Curve(counterfactual, *self.interval("counterfactual_correlation", level)),
            "isotropic": plots.Curve(torch.full_like(measured, float(self.isotropic.mean()))),
        }
        return {label: curve for label, curve in curves.items() if not curve.mean.isnan().all()}

    def _curves_of_gradients(self, level: float) -> dict[str, plots.Curve]:
        low, high = self.interval("gradient_cosine", level)
        mean, n_layers = self.cosines.mean(dim=0), self.reuses.shape[1]
        rows = {
            name: [self.parameters.index(f"blocks.{layer}.{name}.weight") for layer in range(n_layers)]
            for name in ("attn.v", "attn.o", "mlp.down", "attn.q", "attn.k")
        }
        shuffled = torch.stack([mean[own, 1] for own in rows.values()]).mean(dim=0)
        own = {name: plots.Curve(mean[i, 0], low[i, 0], high[i, 0]) for name, i in rows.items()}
        return {**own, "shuffled pairs": plots.Curve(shuffled)}

    def _table(self) -> Table:
        percentiles = {f"percentile_{name}": self.percentiles[:, i, 0] for i, name in enumerate(CANVASES)}
        cuts = {f"cut_{name}": self.cuts[:, i] for i, name in enumerate(CANVASES)}
        routes = {"route_correlation": self._route_correlations(1)}
        axes = {"fact": self.ids, "layer": range(self.reuses.shape[1])}
        return Table.of_cells(axes, {**percentiles, "reuse": self.reuses, **cuts, **routes})

    def __repr__(self) -> str:
        n_layers = self.reuses.shape[1]
        return f"ReversalSignatures({shown_model(self.record)}, {len(self.ids)} facts, {n_layers} layers)"

    @property
    def _sees_nothing(self) -> bool:
        return bool(self.routes.isnan().all())

    def _mean_of_routes(self, other: int) -> Tensor | None:
        return None if bool(self.routes[:, other].isnan().all()) else self._route_correlations(other).mean(dim=0)

    def _route_correlations(self, other: int) -> Float[Tensor, "fact layer"]:
        """Pearson's correlation over heads of the forward scores with those of another route."""
        scores = self.routes[:, [0, other]].double()
        a, b = (scores - scores.mean(dim=-1, keepdim=True)).unbind(dim=1)
        return ((a * b).sum(dim=-1) / (a.square().sum(dim=-1) * b.square().sum(dim=-1)).sqrt()).float()


def _by_canvas(mean: Tensor, ends: tuple[Tensor, Tensor]) -> dict[str, plots.Curve]:
    return {name: plots.Curve(mean[i], ends[0][i], ends[1][i]) for i, name in enumerate(CANVASES)}
