"""Average effects over facts (Meng et al. 2022, arXiv 2202.05262, section 2.2): where is factual recall located?

Every fact that the model knows is traced. The total effect of a fact is p_clean - p_corrupted, and its mean over facts
the ATE; the indirect effect of a state is p_restored - p_corrupted. Sentences differ in length, so within a fact the
indirect effect is averaged over the positions of one role (`token_roles`), and then over the facts that have such a
token:

    AIE(role, layer) = mean over facts of ( mean over the fact's positions i with that role of IE(i, layer) )

so every fact counts once, however long its subject. Confidence intervals come from resampling the facts.

The rule `known` says which facts are averaged (see `average_effects.known`): by default those whose answer the
denoising loop writes; for the first token alone, ROME's question, those whose token is the likeliest on the traced
canvas. No grid is computed for the others, and the result lists them in `unknown`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.analysis.average_effects.fact_average import FactAverage
from diffusion_lens.analysis.average_effects.known import Known, default_rule
from diffusion_lens.analysis.average_effects.study import average_facts
from diffusion_lens.analysis.average_effects.trace_settings import TraceSettings, corruption_of_facts
from diffusion_lens.analysis.bootstrap import bootstrap_interval
from diffusion_lens.analysis.canvas_layout import CanvasLayout
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restoration import Restoration
from diffusion_lens.analysis.causal_tracing.trace import CausalTrace
from diffusion_lens.analysis.loop_settings import LoopSettings
from diffusion_lens.analysis.resumable import Shard
from diffusion_lens.analysis.workers.executor import Executes
from diffusion_lens.facts import Fact
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import shown_model


@dataclass(frozen=True, eq=False, repr=False)
class AverageEffect(FactAverage):
    """Facts traced on one canvas each, and their average.

    Columns of the data frame: fact, role, layer, effect, clean, corrupted.

    Attributes:
        effects: Float[fact role layer], indirect effect, mean over the positions of each role; NaN where a fact has
            none.
        clean: Float[fact], p(answer) of the clean runs.
        corrupted: Float[fact], p(answer) of the corrupted runs, mean over the samples.
        ids: The fact of each row.
        roles: The role of each row of the average.
        layers: The layer of each column of the average.
        unknown: p(answer) of the clean run, by id, of the facts that the rule of the study leaves out as not known.
        record: The settings, the rule (`known`, and `loop` where the loop writes the answers), all facts of the study
            by id, those `set_aside`, model, weights' hash, versions.
    """

    KIND: ClassVar[str] = "average effect"
    FACT_FILE: ClassVar[type[Any]] = CausalTrace
    BY_STEP: ClassVar[bool] = False

    effects: Float[Tensor, "fact role layer"]
    clean: Float[Tensor, "fact"]
    corrupted: Float[Tensor, "fact"]

    @property
    def ate(self) -> float:
        """Average total effect."""
        return self.total_effects.mean().item()

    def ate_interval(self, level: float = 0.95) -> tuple[float, float]:
        """Ends of the confidence interval of the ATE."""
        low, high = bootstrap_interval(self.total_effects[:, None], level, self.record["seed"])
        return low.item(), high.item()

    def aie_interval(self, level: float = 0.95) -> tuple[Float[Tensor, "role layer"], Float[Tensor, "role layer"]]:
        """Ends of the confidence intervals of the AIE, by role and layer."""
        having = [effect[~effect.isnan().any(dim=1)] for effect in self.effects.unbind(dim=1)]
        ends = [bootstrap_interval(effect, level, self.record["seed"]) for effect in having]
        return torch.stack([low for low, _ in ends]), torch.stack([high for _, high in ends])

    def plot(self, level: float = 0.95, ax: Any = None, title: str | None = None) -> Any:
        """The AIE over layers, a curve with its interval for each role that occurs. Returns the matplotlib axes.

        Raises:
            ValueError: No fact is averaged.
        """
        if not self.ids:
            raise ValueError(
                f"there is no average to plot: {shown_model(self.record)} knows none of the {len(self.unknown)} facts "
                "that it was queried for"
            )
        title = title or f"{shown_model(self.record)}: {self.rule}\naverage total effect {self.ate:.2f}"
        low, high = self.aie_interval(level)
        return plots.effect_curves(
            self.aie, low, high, self.roles, self.layers, self.record["kind"], ax=ax, title=title
        )


@begins_run
def average_indirect_effect(
    model: DiffusionTransformer,
    facts: Sequence[Fact],
    kind: str | Restoration = "resid",
    *,
    window: int = 10,
    noise: float | None = None,
    samples: int = 10,
    seed: int = 1,
    corruption: str | Corruption = "gaussian",
    severed: str | None = None,
    roles: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    n_masks: int | None = None,
    length: int | None = None,
    first_tokens: int | None = None,
    occurrence: int | None = None,
    known: str | Collection[str] | None = None,
    loop: LoopSettings | None = None,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    max_bytes: int = 2**30,
    progress: bool = False,
    executor: Executes | None = None,
) -> AverageEffect:
    """Trace many facts on either variant, and average.

    `average_facts` takes the settings as one object, `TraceSettings`.

    Args:
        facts: Facts to trace.
        kind, window, samples, severed, layers, max_bytes: The same as in `causal_trace`.
        noise: Scale of the noise; by default `noise_scale` over the subjects of all facts, whatever the shard.
        seed: Seed of the study; each fact has its own seed, made of this one and its id.
        corruption: The same as in `causal_trace`, except for "swap", which needs another subject for each fact.
        roles: Roles to trace; by default all. On a long canvas of masks most of the work is in "other_masks".
        n_masks, first_tokens, occurrence: The same as in `Fact.to_query`.
        length: Length of the canvas, the prompt included, instead of `n_masks`. With neither, a masked diffusion
            model gets the length that it was trained on, if it is known (`cfg.trained_length`), as in `denoise`; the
            record's `length` says which. A fact that needs a longer canvas is set aside.
        known: Rule for the facts to average: "recalled", whose answer the loop writes; "one_canvas", whose answer's
            tokens are the likeliest at all its positions at once; "all"; or the ids of facts, such as those that both
            models of a pair recall (`recalled_facts`). By default "recalled"; with `first_tokens=1` "one_canvas",
            since one canvas answers that question. "recalled" is refused under a hook of the network that acts at some
            steps only (`at_steps`, `on_branch`, `while_masked`): it would act in the loop and not in the traces. If a
            hook of your own reads `hook.step`, make sure that it does the same where that is `None`. Hooks on the
            loop's own hook points (`denoise.hook_*`) act in the loop alone, and decide what is recalled as `loop` does.
        loop: Settings of the loop for "recalled"; by default those of `denoise`.
        out: Folder for one file per fact, which `CausalTrace.load` reads. A call that finds facts there computes only
            the others. By default nothing is written.
        shard: (i, n) or "i/n": trace the facts i, i + n, i + 2n, ... only; `AverageEffect.merge` joins the shards, bit
            for bit what one process gives on the same machine.
        progress: Whether to show a progress bar.
        executor: `concurrent.futures.Executor`, or `Workers`, that traces the facts; by default this process does. The
            numbers are the same to the bit on the same kind of machine.

    Raises:
        ValueError: A setting is out of range, two facts have one id, the folder contains another study, a hook acts by
            step with "recalled", or the model can be queried for none of the facts. A single fact that it cannot be
            queried for (its answer is merged into the prompt, its sentence does not fit, ...) is set aside, with the
            reason in `AverageEffect.set_aside`.

    Warns:
        UserWarning: The rule leaves out all facts, so that nothing is averaged.
    """
    corrupted, measures_noise = corruption_of_facts(corruption, noise, samples, seed)
    settings = TraceSettings(
        layout=CanvasLayout(length, n_masks, first_tokens, occurrence),
        restoration=Restoration.of(kind, window, severed),
        corruption=corrupted,
        measures_noise=measures_noise,
        known=Known.of(default_rule(first_tokens) if known is None else known),
        roles=roles,
        layers=layers,
        loop=loop,
        max_bytes=max_bytes,
    )
    return average_facts(AverageEffect, model, facts, settings, out, shard, progress, executor)


def merge(parts: str | Path | AverageEffect | Sequence[str | Path | AverageEffect]) -> AverageEffect:
    """The same as `AverageEffect.merge`."""
    return AverageEffect.merge(parts)
