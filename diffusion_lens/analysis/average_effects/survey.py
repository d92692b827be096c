"""A run over many facts, planned before anything is traced: who is asked, on which canvas, under which noise."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from diffusion_lens.analysis.average_effects.fact_tracer import FactTracer
from diffusion_lens.analysis.average_effects.known import (
    Known,
    LoopRuns,
    LoopSettings,
    refuse_step_hooks,
)
from diffusion_lens.analysis.canvas_layout import CanvasLayout
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restoration import Restoration
from diffusion_lens.analysis.causal_tracing.trace import noise_scale
from diffusion_lens.analysis.resumable import (
    FactFolder,
    Result,
    Shard,
    content,
    name_facts,
    pick_shard,
    work_through,
)
from diffusion_lens.analysis.usable_facts import sort_out
from diffusion_lens.facts import Fact
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.settings import pick_indices

R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class Survey:
    """A planned run.

    Attributes:
        tracer: what is done to a fact.
        run: what the work is, as `run.json` holds it.
    """

    tracer: FactTracer
    run: dict[str, Any]

    @classmethod
    def plan(
        cls,
        model: DiffusionTransformer,
        facts: Sequence[Fact],
        layout: CanvasLayout,
        restoration: Restoration,
        *,
        corruption: str,
        noise: float | None,
        samples: int,
        seed: int,
        roles: list[str],
        layers: Sequence[int] | None,
        known: str | Collection[str],
        loop: LoopSettings | None,
        canvas: str | None = None,
        max_bytes: int,
    ) -> "Survey":
        """Lay out the facts and measure the noise; the arguments are those of `average_indirect_effect`.

        Args:
            canvas: "forced" or "free" where the runs of the loop are traced; they are needed then, whatever `known` is.

        Raises:
            ValueError: a setting out of range, two facts with one id, a hook that would choose facts by another network
                than is traced, or no fact that can be asked.
        """
        if corruption == "swap":
            raise ValueError("corruption='swap' needs another subject for each fact: call causal_trace fact by fact")
        corrupt = Corruption.of(corruption, 0.0 if noise is None else noise, samples, seed)
        blocks = pick_indices("layers", layers, model.cfg.n_layers)
        named = name_facts(facts)
        layout, rule = layout.on(model), Known.of(known, named)
        if canvas is None:
            rule.check_loop(loop)
            if rule.rule == "recalled":
                refuse_step_hooks(model)
        loop = (loop or LoopSettings()) if canvas is not None or rule.rule == "recalled" else None
        queries, set_aside = sort_out(named, lambda fact: layout.query(model, fact, loop.check if loop else None))
        if noise is None and "noise" in corrupt.describe():
            # By id, so that the order of the facts does not move the last bit.
            corrupt = replace(corrupt, noise=noise_scale(model, [queries[fact_id] for fact_id in sorted(queries)]))
        corrupt.hooks(model, next(iter(queries.values())))  # refuses what this model cannot be asked
        runs = LoopRuns(model, queries, loop) if loop else None
        tracer = FactTracer(model, queries, rule, runs, restoration, corrupt, roles, blocks, max_bytes, canvas)
        run = {
            **tracer.describe(),
            **({} if canvas is None else {"canvas": canvas}),
            **({"loop": loop.describe(model)} if loop else {}),
            **asdict(layout),
            "facts": {fact_id: content(named[fact_id]) for fact_id in queries},
            "set_aside": set_aside,
            **provenance(model, model.cfg),
        }
        return cls(tracer, run)

    def work(
        self,
        trace: Callable[[str], R],
        load: Callable[[Path], R],
        out: str | Path | None,
        shard: Shard,
        progress: bool,
    ) -> Iterator[tuple[str, R]]:
        """Each fact's trace, read where the folder has it."""
        mine = pick_shard(list(self.run["facts"]), shard)
        folder = FactFolder.start(out, self.run) if out is not None else None
        return work_through(mine, trace, load, folder, progress)
