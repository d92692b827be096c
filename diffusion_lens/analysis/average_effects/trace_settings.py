"""Settings with which the facts of an average are traced."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from diffusion_lens.analysis.average_effects.known import Known
from diffusion_lens.analysis.average_effects.token_roles import ROLES, STEP_ROLES, pick_roles
from diffusion_lens.analysis.canvas_layout import CanvasLayout
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restoration import Restoration
from diffusion_lens.analysis.causal_tracing.trajectory_trace import check_canvas
from diffusion_lens.analysis.loop_settings import LoopSettings
from diffusion_lens.analysis.selection import unique_indices
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.facts import Fact, Query
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import Real, Whole, pick_indices
from weight_conversion import Architecture


@dataclass(frozen=True)
class TraceSettings:
    """Settings with which every fact of a study is traced.

    Attributes:
        layout: Layout of the canvas of each fact.
        restoration: Kind and number of the states that are restored.
        corruption: Corruption of the subjects. Each fact has its own seed, derived from this one's and the fact's id.
        measures_noise: Whether the scale of the noise is measured on the subjects of all facts.
        roles: Roles of the tokens whose states are restored, in their usual order; by default all.
        layers: Layers whose states are restored, negative ones from the end; `None` selects all.
        known: Rule that selects the facts of the average.
        loop: Settings of the loop that writes the answers, by default those of `denoise`. `None` if neither the steps
            of the loop are traced nor the rule depends on the loop.
        canvas: "forced" or "free" to trace the steps of the loop; `None` to trace one canvas of each fact.
        max_bytes: Memory to use in addition to the weights, in bytes.

    Raises:
        ValueError: There is no such role or canvas, a layer is named twice, or there are settings of the loop, but it
            is not used.
    """

    layout: CanvasLayout
    restoration: Restoration
    corruption: Corruption
    measures_noise: bool
    known: Known
    roles: Sequence[str] | None = None
    layers: Sequence[int] | None = None
    loop: LoopSettings | None = None
    canvas: str | None = None
    max_bytes: int = 2**30

    def __post_init__(self) -> None:
        if self.canvas is not None:
            check_canvas(self.canvas)
        roles = pick_roles(self.roles, ROLES if self.canvas is None else STEP_ROLES)
        object.__setattr__(self, "roles", tuple(roles))
        object.__setattr__(self, "layers", unique_indices("layers", self.layers))
        uses_loop = self.canvas is not None or self.known.rule == "recalled"
        if self.loop is None and uses_loop:
            object.__setattr__(self, "loop", LoopSettings())
        if self.loop is not None and not uses_loop:
            raise ValueError(f"loop= requires known='recalled'; known={self.known.rule!r} does not use the loop")

    def query(self, model: DiffusionTransformer, fact: Fact) -> Query:
        """A fact on the canvas on which it is traced.

        Raises:
            ValueError: The model cannot be queried for the fact, or the loop cannot write its answer.
        """
        return self.layout.query(model, fact, self.loop.check if self.loop else None)

    def with_noise(self, noise: float) -> "TraceSettings":
        """The same settings with the scale of the noise that was measured."""
        return replace(self, corruption=replace(self.corruption, noise=noise), measures_noise=False)

    def describe(self, shape: Architecture | DiffusionConfig | None) -> dict[str, Any]:
        """Settings for the record.

        Args:
            shape: The model's architecture. Pass `None` before the model is loaded to omit the settings that depend on
                it, such as the layers and the sampler.
        """
        settings = {
            **self.restoration.describe(),
            **self.corruption.describe(),
            "seed": self.corruption.seed,
            "roles": list(self.roles or ()),
            **self.known.describe(),
            **({} if self.canvas is None else {"canvas": self.canvas}),
            **asdict(self.layout),
        }
        if self.measures_noise:
            settings.pop("noise", None)
        if shape is not None:
            settings["layers"] = pick_indices("layers", self.layers, shape.n_layers)
            return {**settings, **({} if self.loop is None else {"loop": self.loop.describe(shape)})}
        if self.layout.length is None:
            del settings["length"]
        return settings


def corruption_of_facts(
    corruption: str | Corruption, noise: Real | None, samples: Whole, seed: Whole
) -> tuple[Corruption, bool]:
    """The corruption of all facts, and whether its noise has to be measured first.

    Raises:
        ValueError: A setting is out of range, or each fact would need another subject of its own.
    """
    kind = corruption.kind if isinstance(corruption, Corruption) else corruption
    if kind == "swap":
        raise ValueError(
            "corruption='swap' needs another subject for each fact: call causal_trace for each fact instead"
        )
    measures_noise = noise is None and isinstance(corruption, str)
    return Corruption.of(corruption, 0.0 if measures_noise else noise, samples, seed), measures_noise
