"""Edits of down-projections that are written into a model and taken out again, bit for bit.

An edit adds to the down-projection W of each of its blocks a product A Bᵀ of few columns. The sum is computed in
float64 and rounded to the dtype of W.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from diffusion_lens.hooks.clock import Restoring, interruptible, uninterrupted
from diffusion_lens.model.transformer import DiffusionTransformer
from weight_conversion import export

W = TypeVar("W", bound="WeightEdit")
_Weights = dict[int, tuple[Tensor, Tensor]]  # W of each edited block before the update, and with it (on the CPU)


class Factors(NamedTuple):
    """The factors of an update ΔW = A Bᵀ, A and B, in float64 on the CPU."""

    left: Float[Tensor, "d_model rank"]
    right: Float[Tensor, "d_mlp rank"]


def before_gate(added: Float[Tensor, "*rest d_model"], gate: Float[Tensor, "d_model"] | None) -> Tensor:
    """What a down-projection has to write so that `added` is added to the stream behind its gate; a `ValueError` if an
    entry of the gate is 0, so that nothing reaches the stream there."""
    if gate is None:
        return added
    if not bool(gate.all()):
        raise ValueError(
            "the gate of this MLP is 0 in some entries at this time, so no weight can write there: edit another layer, "
            "or at another time, `with model.at_time(t):`"
        )
    return added / gate.cpu().double()


class WeightEdit(Restoring, ABC):
    """An edit of one model: `with edit: ...`, or `edit.apply()` and `edit.revert()`.

    The weights are written in place, and restored bit for bit. Edits can be nested: each starts from the current W, and
    the last one applied is the first to be reverted. A `with` restores the weights that it began with, also after an
    exception or Ctrl-C. Other changes to those weights inside it are undone too, which raises a `ValueError`. An edit
    that cannot be taken out, as when its device fails, is known to the model, whose analyses are refused until
    `model.restore_edits()` or the next edit takes it out. Inside a `with`, no other thread may use the model.
    """

    model: DiffusionTransformer
    _applied: _Weights | None = None
    _failed = False  # Whether the weights could not be restored, and may be edited in some layers only.
    _holds: "tuple[AbstractContextManager[None], ...]" = ()  # of the model, for each `with` of this edit that is open

    @property
    @abstractmethod
    def layers(self) -> list[int]:
        """The blocks whose down-projections the edit changes."""

    @abstractmethod
    def factors(self, layer: int) -> Factors:
        """The update of the down-projection of block `layer`, for the weight as it is now."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The edit, for the record of a result."""

    @property
    def is_applied(self) -> bool:
        """Whether the edit is in the weights."""
        return self._applied is not None

    @property
    def is_cut_off(self) -> bool:
        """Whether nothing will take the edit out: that has failed, or the thread or process of its `with` has ended."""
        return self._failed or (bool(self._holds) and self.model.clock.holder is None)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_holds": ()}  # a copy of a model is held by nobody

    def weight_of(self, layer: int) -> Float[Tensor, "d_model d_mlp"]:
        """The down-projection of block `layer` as it is now."""
        weight: Tensor = self.model.blocks[layer].mlp.down.weight
        return weight

    @torch.no_grad()
    def update(self, layer: int | None = None) -> Float[Tensor, "d_model d_mlp"]:
        """ΔW of block `layer`, by default the first, for the weight as it is now; float64 on the CPU."""
        left, right = self.factors(self.layers[0] if layer is None else layer)
        return left @ right.T

    @uninterrupted
    @torch.no_grad()
    def apply(self: W) -> W:
        """Write the edit into the model; a `ValueError` if it is applied already, or an edited weight is not finite."""
        with self.model.clock.held():
            for edit in [edit for edit in reversed(self.model._edits) if edit.is_cut_off]:
                edit.put_back()
            if self._applied is not None:
                raise ValueError(f"this edit of {say_layers(self.layers)} is applied already; revert it first")
            written = self._computed()
            # The model knows the edit before its first weight is written.
            self._applied = written
            self.model._edits.append(self)
            try:
                for layer, (_, after) in written.items():
                    self.weight_of(layer).copy_(after)
            except BaseException:
                self._restore()
                raise
        return self

    @interruptible
    def _computed(self) -> _Weights:
        applied: _Weights = {}
        for layer in self.layers:
            before = self.weight_of(layer).detach().clone()
            after = (before.cpu().double() + self.update(layer)).to(before.dtype)
            if not bool(after.isfinite().all()):
                raise ValueError(f"the edited weight of layer {layer} is not finite in {after.dtype}")
            applied[layer] = before, after
        return applied

    @uninterrupted
    def revert(self) -> None:
        """Restore the weights bit for bit; a `ValueError` if the edit is not applied, or a weight has changed since, so
        that reverting would undo more."""
        if self._applied is None:
            raise ValueError(f"this edit of {say_layers(self.layers)} is not applied, so there is nothing to revert")
        if changed := self._changed(self._applied):
            raise ValueError(
                f"the weight of layer {changed[0]} has changed since this edit was applied: revert later edits of this "
                "layer first (the last applied is the first reverted)"
            )
        self.put_back()

    def _begin(self: W) -> W:
        with ExitStack() as begun:
            hold = self.model.clock.held()
            begun.enter_context(hold)
            self.apply()
            self._holds = (*self._holds, hold)
            begun.pop_all()
        return self

    def _end(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Restore the weights that the `with` began with, whatever changed them inside; exceptions are passed on. The
        model is held by this `with`, which another thread may end."""
        changed: list[int] = []
        try:
            changed = self._changed(self._applied or {})
        finally:
            try:
                self._restore()
            finally:
                *outer, hold = self._holds
                self._holds = tuple(outer)
                hold.__exit__(None, None, None)
        if changed and error is None:
            raise ValueError(
                f"the weight of layer {changed[0]} was changed inside the `with` of this edit. It is restored to its "
                f"value before the `with`, in {self.weight_of(changed[0]).dtype}, so that change is lost with the "
                "edit: revert inner edits inside, or call edit.apply() instead of `with` to keep both"
            )

    def export(self, path: str | Path) -> Path:
        """Write the edited model in its checkpoint's own format; the edit need not be applied."""
        if self.is_applied:
            return export(self.model.state_dict(), self.model.cfg.architecture, path)
        with self:
            return self.export(path)

    def _changed(self, applied: _Weights) -> list[int]:
        """The blocks whose weight is not as the edit left it."""
        changed = []
        for layer, (_, after) in applied.items():
            weight = self.weight_of(layer)
            if weight.dtype != after.dtype or not torch.equal(weight.cpu(), after):
                changed.append(layer)
        return changed

    @uninterrupted
    def put_back(self) -> None:
        """Restore the weights that the edit began with, whatever changed them since; edits of these layers that began
        later are taken out first."""
        with self.model.clock.held():
            self._restore()

    @uninterrupted
    @torch.no_grad()
    def _restore(self) -> None:
        edits = self.model._edits
        later = edits[edits.index(self) + 1 :] if self in edits else []
        for edit in reversed([edit for edit in later if {*edit.layers} & {*self.layers}]):
            edit._restore()
        self._failed = True
        for layer, (before, _) in (self._applied or {}).items():
            weight = self.weight_of(layer)
            if weight.shape != before.shape:
                weight.data = torch.empty_like(before, dtype=weight.dtype)
            weight.copy_(before)
        self._applied = None
        self.model._edits[:] = [edit for edit in self.model._edits if edit is not self]
        self._failed = False


def say_layers(layers: list[int]) -> str:
    """The layers in words: "layer 1", "layers 1, 2 and 3"."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    return f"layers {', '.join(map(str, layers[:-1]))} and {layers[-1]}"


def require_same_model(name: str, record: Mapping[str, Any] | None, model: DiffusionTransformer) -> None:
    """Raise a `ValueError` if a part was taken from another model. The model's weights may have been edited since."""
    edited = {"model": model.cfg.model_name, "architecture": model.cfg.architecture.to_dict()}
    if record is not None and any(record.get(name, value) != value for name, value in edited.items()):
        raise ValueError(
            f"the {name} was taken from another model or architecture ({record.get('model')!r}) than the edited model "
            f"({model.cfg.model_name!r}); take it from the model that you edit"
        )
