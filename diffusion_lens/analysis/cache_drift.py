"""Cache drift: how far the keys and values that a run holds in its cache are from those of its present canvas.

Where later positions cannot change earlier ones, on a causal model or in the filled blocks of one that writes block
after block, a cache is exact. With full attention every key and value depends on the whole canvas from the second layer
on, and a cache holds those of an earlier one (`approximate_cache` of `samplers.threshold`; Wu et al. 2025, Fast-dLLM,
arXiv 2505.22618). The drift of a step and layer is the relative distance

    ‖K_held - K_exact‖ / ‖K_exact‖,

over all positions at which later passes read the cache, and likewise for the values. The exact ones are of a forward
pass over the canvas that the step read, without a cache. A step that computes everything again has a drift of 0.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens import plots
from diffusion_lens.denoising.canvas import Canvas
from diffusion_lens.denoising.loop import run_loop
from diffusion_lens.denoising.predictor import Predictor
from diffusion_lens.denoising.same_network import canvas_provenance
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.hooks.step import StepState
from diffusion_lens.model.attention import HeldCache
from diffusion_lens.model.shapes import PosMask
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import begins_run
from diffusion_lens.records.results import PicturedResult, Saved, Table, provenance
from diffusion_lens.settings import one_of


@dataclass(frozen=True, eq=False)
class CacheDrift(PicturedResult, Saved):
    """The relative distance of cached keys and values from exact ones, by step and layer.

    Columns of the data frame: step, layer, keys, values, n_held.

    Attributes:
        keys: Float[step layer], drift of the keys. The first layer has none: its keys and values depend on their own
            token alone.
        values: Float[step layer], drift of the values.
        n_held: Int[step], number of positions that the cache holds, in all rows together.
        record: Steps, approximate cache ("prefix", "dual", or `None` for an exact one), trajectory, model, hash of the
            weights, hooks, versions.
    """

    KIND: ClassVar[str] = "cache drift"
    ENTRIES: ClassVar[Mapping[str, Any]] = {"steps": list[int], "approximate_cache": str | None}

    keys: Float[Tensor, "step layer"]
    values: Float[Tensor, "step layer"]
    n_held: Int[Tensor, "step"]
    record: dict[str, Any]

    def _axes(self) -> Iterable[tuple[str, Any]]:
        return (("step", self.steps),)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps with a forward pass after which the cache holds something."""
        return tuple(self.record["steps"])

    def plot(self, what: str = "keys", ax: Any = None, title: str | None = None) -> Any:
        """The drift of the "keys" or "values" by layer and step; returns the matplotlib axes."""
        drift: Tensor = getattr(self, one_of("keys", "values")("what", what))
        kind = self.record["approximate_cache"]
        return plots.labelled_map(
            drift.mT,
            rows=[f"layer {layer}" for layer in range(drift.shape[1])],
            layers=self.steps,
            xlabel="denoising step",
            hue="Purples",
            limits=(0.0, float(drift.max())),
            bar="drift",
            title=title or f"Drift of the {what} in the {'exact' if kind is None else kind} cache",
            ax=ax,
        )

    def _table(self) -> Table:
        axes = {"step": self.steps, "layer": range(self.keys.shape[1])}
        n_held = self.n_held[:, None].expand_as(self.keys)
        return Table.of_cells(axes, {"keys": self.keys, "values": self.values, "n_held": n_held}, most="keys")

    def __repr__(self) -> str:
        largest = ", ".join(f"{name} up to {float(getattr(self, name).max()):.3g}" for name in ("keys", "values"))
        return f"CacheDrift({len(self.steps)} steps, {self.keys.shape[1]} layers, {largest})"


@begins_run
@torch.no_grad()
def cache_drift(model: DiffusionTransformer, trajectory: Trajectory) -> CacheDrift:
    """How far the keys and values that a run holds in its cache are from exact ones, by step and layer.

    The run is taken again with its cache, on its recorded canvases (a forced replay), with a second pass at each step.

    Args:
        model: Model that wrote the trajectory.
        trajectory: Run with an approximate cache, or of a model that writes block after block or next tokens, which has
            an exact one.

    Raises:
        ValueError: The run has no cache, or its cache never holds anything, as while something is hooked on a model
            with an exact one.
    """
    run = trajectory.started(model, forced=True)
    if run.predictor.held() is None:
        raise ValueError(
            f"a run of {model.cfg.model_name!r} with these settings has no key/value cache, so nothing drifts: denoise "
            "with samplers.threshold(approximate_cache='prefix') or 'dual'"
        )
    measured = run.predictor = _Measured(run.predictor, model, run.canvas)
    run_loop(run, trajectory.first_step)
    if not measured.drift:
        raise ValueError(
            "the cache of this run holds nothing after any step: one block is written, rows are padded, or something "
            "is hooked"
        )
    distances, steps = torch.stack(list(measured.drift.values())), list(measured.drift)
    record = {
        "steps": steps,
        "approximate_cache": run.sampler.approximate_cache,
        "trajectory": canvas_provenance(trajectory.record),
        **provenance(model, model.cfg),
    }
    return CacheDrift(distances[:, 0], distances[:, 1], torch.tensor([measured.n_held[step] for step in steps]), record)


class _Measured(Predictor):
    """Another predictor, whose cache is compared with the keys and values of a pass without one after each step.

    Attributes:
        drift: Float[2 layer] by step, of the keys and of the values.
        n_held: Number of positions that are held, by step.
    """

    def __init__(self, inner: Predictor, model: DiffusionTransformer, canvas: Canvas) -> None:
        self.inner, self.model, self.canvas = inner, model, canvas
        self.drift: dict[int, Tensor] = {}
        self.n_held: dict[int, int] = {}

    def __call__(self, state: StepState, positions: PosMask) -> Float[Tensor, "selected d_vocab_out"]:
        logits = self.inner(state, positions)
        held = self.inner.held()
        assert held is not None
        layers, where = held
        if not bool(where.any()):
            return logits
        exact = HeldCache(self.model.cfg.n_layers)
        tokens = self.model.cfg.readable(state.tokens)
        self.model.forward(tokens, attention_mask=self.canvas.real, past_kv_cache=exact, return_type=None)
        pairs = [
            [(getattr(each, name), getattr(own, name)) for each, own in zip(layers, exact.layers, strict=True)]
            for name in ("keys", "values")
        ]
        self.drift[state.index] = torch.tensor([[_distance(*pair, where) for pair in of_kind] for of_kind in pairs])
        self.n_held[state.index] = int(where.sum())
        return logits


def _distance(
    held: Float[Tensor, "batch key kv_head d_head"], exact: Float[Tensor, "batch pos kv_head d_head"], where: PosMask
) -> float:
    """The relative distance at some of the positions that `held` begins with."""
    n_pos = held.shape[1]
    inside = where[:, :n_pos].to(held.device)
    was, now = held[inside].double(), exact[:, :n_pos][inside].double()
    return float((was - now).norm() / now.norm())
