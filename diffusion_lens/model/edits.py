"""Edits of weights that are written into a model and taken out again, bit for bit.

An edit adds an update to each of its weights. The sum is computed in float64 and rounded to the dtype of the weight.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor

from diffusion_lens.hooks.clock import Restoring, interruptible, uninterrupted
from diffusion_lens.model.transformer import DiffusionTransformer

E = TypeVar("E", bound="Edit")
_Weights = dict[str, tuple[Tensor, Tensor]]  # each edited weight before the update, and with it (on the CPU)


class Edit(Restoring, ABC):
    """An edit of one model: `with edit: ...`, or `edit.apply()` and `edit.revert()`.

    The weights are written in place, and restored bit for bit. Edits can be nested: each starts from the current W, and
    the last one applied is the first to be reverted. A `with` restores the weights that it began with, also after an
    exception or Ctrl-C. Other changes to those weights inside it are undone too, which raises a `ValueError`. An edit
    that cannot be taken out, as when its device fails, is known to the model, whose analyses are refused until
    `model.restore_edits()` or the next edit takes it out. Inside a `with`, no other thread may use the model.
    """

    model: DiffusionTransformer
    _applied: _Weights | None = None
    _failed = False  # Whether the weights could not be restored, and only some of them may be edited.
    _holds: "tuple[AbstractContextManager[None], ...]" = ()  # of the model, for each `with` of this edit that is open

    @property
    @abstractmethod
    def layers(self) -> list[int]:
        """The blocks whose weights the edit changes."""

    @property
    @abstractmethod
    def weights(self) -> Sequence[str]:
        """The names of the weights that the edit changes, such as "blocks.3.mlp.down.weight"."""

    @abstractmethod
    def update_of(self, name: str) -> Tensor:
        """What is added to a weight as it is now; float64 on the CPU."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The edit, for the record of a result."""

    def require_fit(self) -> None:
        """Raise a `ValueError` if the weights as they are now are not those that the edit may be added to."""

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

    def weight_named(self, name: str) -> Tensor:
        """A weight of the model as it is now."""
        return self.model.get_parameter(name)

    def say_weight(self, name: str) -> str:
        """A weight in words, for messages."""
        return f"the weight {name}"

    @uninterrupted
    @torch.no_grad()
    def apply(self: E) -> E:
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
                for name, (_, after) in written.items():
                    self.weight_named(name).copy_(after)
            except BaseException:
                self._restore()
                raise
        return self

    @interruptible
    def _computed(self) -> _Weights:
        self.require_fit()
        applied: _Weights = {}
        for name in self.weights:
            before = self.weight_named(name).detach().clone()
            after = (before.cpu().double() + self.update_of(name)).to(before.dtype)
            if not bool(after.isfinite().all()):
                raise ValueError(
                    f"{self.say_weight(name).replace('the', 'the edited', 1)} is not finite in {after.dtype}"
                )
            applied[name] = before, after
        return applied

    @uninterrupted
    def revert(self) -> None:
        """Restore the weights bit for bit; a `ValueError` if the edit is not applied, or a weight has changed since, so
        that reverting would undo more."""
        if self._applied is None:
            raise ValueError(f"this edit of {say_layers(self.layers)} is not applied, so there is nothing to revert")
        if changed := self._changed(self._applied):
            raise ValueError(
                f"{self.say_weight(changed[0])} has changed since this edit was applied: revert later edits of this "
                "layer first (the last applied is the first reverted)"
            )
        self.put_back()

    def _begin(self: E) -> E:
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
        changed: list[str] = []
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
                f"{self.say_weight(changed[0])} was changed inside the `with` of this edit. It is restored to its "
                f"value before the `with`, in {self.weight_named(changed[0]).dtype}, so that change is lost with the "
                "edit: revert inner edits inside, or call edit.apply() instead of `with` to keep both"
            )

    def _changed(self, applied: _Weights) -> list[str]:
        """The weights that are not as the edit left them."""
        changed = []
        for name, (_, after) in applied.items():
            weight = self.weight_named(name)
            if weight.dtype != after.dtype or not torch.equal(weight.cpu(), after):
                changed.append(name)
        return changed

    @uninterrupted
    def put_back(self) -> None:
        """Restore the weights that the edit began with, whatever changed them since; edits of these weights that began
        later are taken out first."""
        with self.model.clock.held():
            self._restore()

    @uninterrupted
    @torch.no_grad()
    def _restore(self) -> None:
        edits = self.model._edits
        later = edits[edits.index(self) + 1 :] if self in edits else []
        for edit in reversed([edit for edit in later if {*edit.weights} & {*self.weights}]):
            edit._restore()
        self._failed = True
        for name, (before, _) in (self._applied or {}).items():
            weight = self.weight_named(name)
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
