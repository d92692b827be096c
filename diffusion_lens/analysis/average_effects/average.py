"""Average effects over facts (Meng et al. 2022, arXiv 2202.05262, section 2.2): where do facts in general sit?

Every fact that the model knows is traced. The total effect of a fact is p_clean - p_corrupted, and their mean the ATE;
the indirect effect of a state is p_restored - p_corrupted. Sentences differ in length, so within a fact the indirect
effect is averaged over the places of one role (`token_roles`), and over the facts that have such a token after that:

    AIE(role, layer) = mean over facts of ( mean over the fact's places i with that role of IE(i, layer) )

so every fact counts once, however long its subject. Confidence intervals come from resampling the facts.

A fact whose likeliest tokens in the clean run are not its answer's is not known. One pass over one row shows that; no
grid is computed for it, and the result lists it apart.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.average_effects.fact_tracer import CanvasLayout, FactTracer
from diffusion_lens.analysis.average_effects.token_roles import mean_by_role, pick_roles
from diffusion_lens.analysis.bootstrap import bootstrap_interval
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restoration import Restoration
from diffusion_lens.analysis.causal_tracing.trace import CausalTrace, noise_scale, pick_indices
from diffusion_lens.analysis.fact_folder import (
    FactFolder,
    Shard,
    content,
    join_parts,
    name_facts,
    pick_shard,
    work_through,
)
from diffusion_lens.facts import Fact
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import load_fields, provenance, save_fields


@dataclass(frozen=True, eq=False)
class AverageEffect:
    """Facts traced, and what they have in common.

    Attributes:
        effects: Float[fact role layer], indirect effect, mean over the places of each role; NaN where a fact has none.
        clean: Float[fact], p(answer) of the clean runs.
        corrupted: Float[fact], p(answer) of the corrupted runs, mean over the draws.
        ids: the fact of each row.
        roles: the role of each row of the average.
        layers: the layer of each column.
        unknown: facts that the model does not know, set aside: p(answer) of their clean runs, by id.
        record: the settings, all facts of the run by id, model, weights' hash, versions.
    """

    effects: Float[Tensor, "fact role layer"]
    clean: Float[Tensor, "fact"]
    corrupted: Float[Tensor, "fact"]
    ids: list[str]
    roles: list[str]
    layers: list[int]
    unknown: dict[str, float]
    record: dict[str, Any]

    @property
    def total_effects(self) -> Float[Tensor, "fact"]:
        """How much the corruption takes away from each fact: clean - corrupted."""
        return self.clean - self.corrupted

    @property
    def ate(self) -> float:
        """Average total effect."""
        return self.total_effects.mean().item()

    @property
    def aie(self) -> Float[Tensor, "role layer"]:
        """Average indirect effect, over the facts that have such a token; NaN where none has."""
        return self.effects.nanmean(dim=0)

    def ate_interval(self, level: float = 0.95) -> tuple[float, float]:
        """Ends of the confidence interval of the ATE."""
        low, high = bootstrap_interval(self.total_effects[:, None], level, self.record["seed"])
        return low.item(), high.item()

    def aie_interval(self, level: float = 0.95) -> tuple[Float[Tensor, "role layer"], Float[Tensor, "role layer"]]:
        """Ends of the confidence intervals of the AIE, by role and layer."""
        having = [effect[~effect.isnan().any(dim=1)] for effect in self.effects.unbind(dim=1)]
        ends = [bootstrap_interval(effect, level, self.record["seed"]) for effect in having]
        return torch.stack([low for low, _ in ends]), torch.stack([high for _, high in ends])

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        return save_fields(path, "average effect", self)

    @classmethod
    def load(cls, path: str | Path) -> "AverageEffect":
        """Read what `save` wrote."""
        fields = load_fields(path, "average effect")
        return cls(**fields)

    def plot(self, level: float = 0.95, ax: Any = None, title: str | None = None) -> Any:
        """The AIE over layers, a curve with its interval for each role that occurs. Returns the matplotlib axes.

        Raises:
            ValueError: no fact is known.
        """
        if not self.ids:
            raise ValueError(
                f"there is no average to draw: {self.record['model']} knows none of the {len(self.unknown)} facts asked"
            )
        title = title or f"{self.record['model']}: {len(self.ids)} facts, average total effect {self.ate:.2f}"
        low, high = self.aie_interval(level)
        return plots.effect_curves(
            self.aie, low, high, self.roles, self.layers, self.record["kind"], ax=ax, title=title
        )


@begins_run
def average_indirect_effect(
    model: DiffusionTransformer,
    facts: Sequence[Fact],
    kind: str = "resid",
    *,
    window: int = 10,
    noise: float | None = None,
    samples: int = 10,
    seed: int = 1,
    corruption: str = "gaussian",
    severed: str | None = None,
    roles: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    answer_places: int | None = None,
    length: int | None = None,
    first_tokens: int | None = None,
    occurrence: int | None = None,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    max_bytes: int = 2**30,
    progress: bool = False,
) -> AverageEffect:
    """Trace many facts on either variant, and average.

    Args:
        kind, window, samples, severed, layers, max_bytes: as in `causal_trace`.
        noise: scale of the noise; by default `noise_scale` over the subjects of all facts, whatever the shard.
        seed: each fact draws from a seed made of this one and its id.
        corruption: as in `causal_trace`, but for "swap", which needs a partner for each fact.
        roles: the roles to trace; by default all. On a long canvas of masks most of the work is in "unasked".
        answer_places, first_tokens, occurrence: as in `Fact.to_query`.
        length: places of the canvas in all, the prompt included, instead of `answer_places`.
        out: a folder for a file a fact, `CausalTrace.load` reads it. A run that finds its facts there goes on after
            them. By default nothing is written.
        shard: (i, n) or "i/n": do the facts i, i + n, i + 2n, ... only; `merge` joins the shards, bit for bit what one
            run gives on the same machine.
        progress: show a bar.

    Raises:
        ValueError: a setting out of range, two facts with one id, or a folder that holds another run.
    """
    if corruption == "swap":
        raise ValueError("corruption='swap' needs another subject for each fact: call causal_trace fact by fact")
    layout = CanvasLayout(length, answer_places, first_tokens, occurrence)
    restoration = Restoration(kind, window, severed)
    corrupt = Corruption(corruption, 0.0 if noise is None else noise, samples, seed)
    named = name_facts(facts)
    mine = pick_shard(list(named), shard)
    queries = {fact_id: layout.query(model, fact) for fact_id, fact in named.items()}
    if noise is None and "noise" in corrupt.describe():
        # By id, so that the order of the facts does not move the last bit.
        corrupt = replace(corrupt, noise=noise_scale(model, [queries[fact_id] for fact_id in sorted(queries)]))
    tracer = FactTracer(
        restoration, corrupt, pick_roles(roles), pick_indices("layers", layers, model.cfg.n_layers), max_bytes
    )
    corrupt.hooks(
        model, next(iter(queries.values()))
    )  # refuses what this model cannot be asked, before a folder is made
    run = {
        **tracer.describe(),
        **asdict(layout),
        "facts": {fact_id: content(fact) for fact_id, fact in named.items()},
        **provenance(model, model.cfg),
    }
    folder = FactFolder.start(out, run) if out is not None else None

    traces = work_through(
        mine, lambda fact_id: tracer.trace(model, fact_id, queries[fact_id]), CausalTrace.load, folder, progress
    )
    return _average(traces, run)


def merge(parts: str | Path | AverageEffect | Sequence[str | Path | AverageEffect]) -> AverageEffect:
    """The shards of one run as one result, bit for bit what a single process on the same machine gives.

    Args:
        parts: folders that `out` named, saved results, or results; one folder may hold all shards.

    Raises:
        ValueError: parts of different runs, facts that no part holds, or a fact that came out in two ways.
    """
    given = [parts] if isinstance(parts, str | Path | AverageEffect) else list(parts)
    results = [part if isinstance(part, AverageEffect) else _read(Path(part)) for part in given]
    names = ["one of the results" if isinstance(part, AverageEffect) else str(part) for part in given]
    held = [(name, result.record, _by_fact(result)) for name, result in zip(names, results, strict=True)]
    run, found = join_parts(held, _FactEffect.equals)
    return _gather(found, run)


@dataclass(frozen=True, eq=False)
class _FactEffect:
    """One fact's share of the averages."""

    known: bool
    clean: float
    corrupted: float
    effect: Float[Tensor, "role layer"]

    @classmethod
    def of(cls, trace: CausalTrace, roles: Sequence[str]) -> "_FactEffect":
        held = [trace.record["roles"][place] for place in trace.positions]
        return cls(trace.known, trace.clean, trace.corrupted, mean_by_role(trace.indirect_effect, held, roles))

    def equals(self, other: "_FactEffect") -> bool:
        mine, theirs = (
            torch.tensor([each.known, each.clean, each.corrupted, *each.effect.flatten().tolist()], dtype=torch.float64)
            for each in (self, other)
        )
        return torch.allclose(mine, theirs, rtol=0, atol=0, equal_nan=True)


def _average(traces: Iterable[tuple[str, CausalTrace]], run: dict[str, Any]) -> AverageEffect:
    return _gather({fact_id: _FactEffect.of(trace, run["roles"]) for fact_id, trace in traces}, run)


def _gather(effects: Mapping[str, _FactEffect], run: dict[str, Any]) -> AverageEffect:
    known = {fact_id: each for fact_id, each in effects.items() if each.known}
    rows = [each.effect for each in known.values()]
    return AverageEffect(
        effects=torch.stack(rows) if rows else torch.empty(0, len(run["roles"]), len(run["layers"])),
        clean=torch.tensor([each.clean for each in known.values()], dtype=torch.float64),
        corrupted=torch.tensor([each.corrupted for each in known.values()], dtype=torch.float64),
        ids=list(known),
        roles=run["roles"],
        layers=run["layers"],
        unknown={fact_id: each.clean for fact_id, each in effects.items() if not each.known},
        record=run,
    )


def _by_fact(result: AverageEffect) -> dict[str, _FactEffect]:
    rows = zip(result.ids, result.clean.tolist(), result.corrupted.tolist(), result.effects, strict=True)
    known = {fact_id: _FactEffect(True, clean, corrupted, effect) for fact_id, clean, corrupted, effect in rows}
    nothing = torch.full((len(result.roles), len(result.layers)), torch.nan)
    return known | {fact_id: _FactEffect(False, clean, torch.nan, nothing) for fact_id, clean in result.unknown.items()}


def _read(path: Path) -> AverageEffect:
    """A saved result, or as many facts of a run as its folder holds."""
    if path.is_file():
        return AverageEffect.load(path)
    folder = FactFolder.open(path)
    return _average(folder.results(CausalTrace.load), folder.run)
