"""What is done with the weights of a model: folding the norms, replacing some for a while, and edits.

A norm computes n · w + b, and every projection that reads it is linear, so W (n · w + b) = (W · diag(w)) n + W b: the
network computes the same function if w is multiplied into the projections, W b is added to their biases, the norm's
weight becomes 1 and its bias 0 (TransformerLens's `fold_ln`). Projections without a bias get one. Tools that multiply
the normalised stream with `W_U`, `W_in` or `W_Q` directly then use the matrices that the network applies.

The norms of single heads (`attn.q_norm`, `attn.k_norm`) are not folded, because a rotation, which is not diagonal,
follows them.

An `Edit` adds an update to each of its weights, and takes it out again, bit for bit. The sum is computed in float64 and
rounded to the dtype of the weight.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from diffusion_lens.hooks.clock import Restoring, interruptible, restoring, uninterrupted
from diffusion_lens.model.build import put_parameter, require_own_weights
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.layers import LayerNorm, Norm, Unembed, beside
from diffusion_lens.model.mlp import Router
from diffusion_lens.model.transformer import DiffusionTransformer

FOLDABLE = re.compile(r"(^|\.)(ln1|ln2|ln_final)\.(weight|bias)$")
EXACT = (torch.float32, torch.float64)
# Other weight processing of TransformerLens, and why it is not done here.
NOT_EXACT = {
    "center_writing_weights": "would change the logits: RMSNorm does not subtract the mean of the residual stream",
    "center_unembed": "would shift all logits of a row alike; subtract logits.mean(-1, keepdim=True) instead",
    "fold_value_biases": "needs a bias of the attention's output, which these models do not all have",
    "refactor_factored_attn_matrices": "would mix the dimensions that the rotation keeps apart",
}


@torch.no_grad()
def fold_norms(model: DiffusionTransformer) -> None:
    """Fold the norms of a model in place. Folding a folded model changes nothing.

    Logits change only by rounding (3e-6 of their size in float32). If embedding and head are tied, the head becomes a
    separate matrix, because only the head is scaled.

    Raises:
        ValueError: The weights have less precision than float32, so that rounding would change the logits; or the time
            shifts and scales what the norms give; or another model has the same tensors as weights.
    """
    require_own_weights(model, "folding the norms")
    if model.cfg.time_conditioning:
        raise ValueError(
            f"the norms of {model.cfg.model_name!r} cannot be folded: the time scales and shifts their outputs before "
            "the projections read them, so that no matrix is right at every time. Leave out fold_ln, and multiply "
            "with what passes the norms (model.ln_final(resid, ...), model.time.final_weight())"
        )
    if model.cfg.dtype not in EXACT:
        raise ValueError(
            f"the norms of {model.cfg.model_name!r} cannot be folded in {model.cfg.dtype}: rounding each product "
            "again changes the logits. Load it with dtype=torch.float32, fold, and convert with "
            "model.to(dtype) afterwards if you accept that rounding"
        )
    for block in model.blocks:
        model.cfg.qkv_bias |= _fold(block.ln1, block.attn.q, block.attn.k, block.attn.v)
        model.cfg.mlp_bias |= _fold(block.ln2, *block.mlp.readers)
    if model.cfg.tied:
        model.unembed.weight = nn.Parameter(
            model.unembed.weight.clone(), requires_grad=model.unembed.weight.requires_grad
        )
        model.cfg.tied = False
    model.cfg.unembed_bias |= _fold(model.ln_final, model.unembed)
    _set_folded(model, folded=True)


def check_folded(model: DiffusionTransformer) -> None:
    """Correct a config that says that the norms are folded although a norm has a weight other than 1."""
    if model.cfg.layer_norm_folding and not norms_are_one(model.state_dict()):
        _set_folded(model, folded=False)


def norms_are_one(weights: Mapping[str, Tensor]) -> bool:
    """Whether all norms that can be folded have the weight 1 and the bias 0; names are those of our layout."""
    return all(
        bool((weight == (0 if name.endswith(".bias") else 1)).all())
        for name, weight in weights.items()
        if FOLDABLE.search(name)
    )


def _set_folded(model: DiffusionTransformer, folded: bool) -> None:
    kind = "RMS" if model.cfg.uses_rms_norm else "LN"
    model.cfg.normalization_type = f"{kind}Pre" if folded else kind
    model.cfg.layer_norm_folding = folded


def _fold(norm: Norm, *readers: nn.Linear | Router | Unembed) -> bool:
    """Fold a norm into the projections that read it; whether there was a bias, which they now have."""
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    for reader in readers:
        if bias is not None:
            assert not isinstance(reader, Router), "no router follows a LayerNorm with a bias"
            read = reader.weight @ beside(bias, reader.weight)
            if reader.bias is None:
                reader.bias = nn.Parameter(read, requires_grad=reader.weight.requires_grad)
            else:
                reader.bias.add_(read)
        reader.weight.mul_(beside(norm.weight, reader.weight))
    norm.weight.fill_(1.0)
    if bias is not None:
        bias.zero_()
    return bias is not None


@restoring
def lent_weights(
    model: DiffusionTransformer, cfg: DiffusionConfig, tensors: Mapping[str, Tensor]
) -> Iterator[DiffusionTransformer]:
    """Use `model` with another config and with some weights replaced; afterwards both are restored."""
    before = model.cfg
    parameters = {name: model.get_parameter(name) for name in tensors}
    # Finding the norms takes long, and the epsilon is seldom another.
    norms = [] if cfg.eps == model.cfg.eps else [norm for norm in model.modules() if isinstance(norm, Norm)]
    epsilons = {norm: norm.eps for norm in norms}
    try:
        model._configure(cfg)
        for norm in epsilons:
            norm.eps = cfg.eps
        for name, tensor in tensors.items():
            put_parameter(model, name, nn.Parameter(tensor, requires_grad=torch.is_floating_point(tensor)))
        model._tie()
        yield model
    finally:
        model._configure(before)
        for norm, eps in epsilons.items():
            norm.eps = eps
        for name, parameter in parameters.items():
            put_parameter(model, name, parameter)
        model._tie()


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
