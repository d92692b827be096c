"""Gradients of each fact's loss in every weight matrix, and how those of the two losses of a pair agree.

Facts of a batch share no weight's input, so one backward pass of the summed losses gives the gradient at every
projection's output for each fact. With the projection's input it is the fact's gradient as a sum of outer products that
are never multiplied out: the gradient of W in y = W x is Σ_p δ_p x_p^T over positions p, with δ_p the gradient of y_p,
and the inner product of two gradients is

    Σ_pq (δ_p · δ'_q)(x_p · x'_q),

of inputs and gradients of outputs, which are small beside the matrix (67 MB for a W_V of 4096 x 4096 in float32).
Gradients of biases and norms are left out. They are those of the weights as the model has them: if norms are folded
into the projections (`fold_ln`), the same network has other gradients. The baseline are shuffled pairs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from diffusion_lens.analysis.signatures.evidence import CanvasBatch, PassReader, mean_where, other_facts
from diffusion_lens.hooks.clock import restoring
from diffusion_lens.model.hooking import has_module_hooks
from diffusion_lens.model.layers import Embed, Linear, Norm, Unembed
from diffusion_lens.model.mlp import Router
from diffusion_lens.model.transformer import DiffusionTransformer
from weight_conversion import tensor_shapes

EMBEDDING, HEAD = "embed.weight", "unembed.weight"
STEP = 0.001  # Share of the forward loss by which the small step lowers it, to first order.
_TorchHook = Callable[[nn.Module, Any, Tensor], Any]
_PLAIN = (Linear.forward, nn.Linear.forward, Embed.forward, Unembed.forward, Norm.forward, Router.forward)


@dataclass(frozen=True, eq=False)
class OuterSums:
    """Σ_t left_t right_t^T for each fact. Integers on the left are the indices of one-hot vectors of length `n_rows`,
    as for rows of an embedding."""

    left: Float[Tensor, "fact term d"] | Int[Tensor, "fact term"]
    right: Float[Tensor, "fact term d_other"]
    n_rows: int = 0

    def inner(self, other: "OuterSums") -> Float[Tensor, "fact fact"]:
        """The inner product of every gradient of `self` (rows) with every one of `other` (columns)."""
        ours, theirs = (
            OuterSums(each.left.flatten(0, 1)[None], each.right.flatten(0, 1)[None]) for each in (self, other)
        )
        products = ours._products(theirs)[0]
        by_fact = products.unflatten(1, (-1, other.right.shape[1])).unflatten(0, (-1, self.right.shape[1]))
        summed: Tensor = by_fact.sum(dim=(1, 3))
        return summed

    def own(self, other: "OuterSums") -> Float[Tensor, "fact"]:
        """The inner product of the two gradients of each fact, the diagonal of `inner`."""
        return self._products(other).sum(dim=(1, 2))

    def times(self, x: Float[Tensor, "fact pos d_other"]) -> Float[Tensor, "fact pos d"]:
        """Each fact's matrix times vectors of that fact."""
        coefficients = x.to(self.right.dtype) @ self.right.mT
        if self.left.is_floating_point():
            return coefficients @ self.left
        product = coefficients.new_zeros(*x.shape[:2], self.n_rows)
        return product.scatter_add_(2, self.left[:, None].expand_as(coefficients), coefficients)

    def rows(self, indices: Int[Tensor, "fact pos"]) -> Float[Tensor, "fact pos d_other"]:
        """Some rows of each fact's matrix."""
        if self.left.is_floating_point():
            return self.left.gather(2, indices[:, None].expand(-1, self.left.shape[1], -1)).mT @ self.right
        return (indices[:, :, None] == self.left[:, None, :]).to(self.right.dtype) @ self.right

    def _products(self, other: "OuterSums") -> Float[Tensor, "fact term term"]:
        return _inner(self.left, other.left) * (self.right @ other.right.mT)


def _inner(one: Tensor, other: Tensor) -> Float[Tensor, "fact term term"]:
    """Inner products of vectors, each dense or given as the index of a one-hot vector."""
    if one.is_floating_point() and other.is_floating_point():
        return one @ other.mT
    if one.is_floating_point():
        return one.gather(2, other[:, None].expand(-1, one.shape[1], -1))
    if other.is_floating_point():
        return _inner(other, one).mT
    return (one[:, :, None] == other[:, None, :]).float()


def inner(one: list[OuterSums], other: list[OuterSums]) -> Float[Tensor, "fact fact"]:
    """Inner products of gradients that are sums of several `OuterSums`, such as those of a tied embedding."""
    return torch.stack([a.inner(b) for a in one for b in other]).sum(dim=0)


def own(one: list[OuterSums], other: list[OuterSums]) -> Float[Tensor, "fact"]:
    """The diagonal of `inner`."""
    return torch.stack([a.own(b) for a in one for b in other]).sum(dim=0)


def matrix_names(model: DiffusionTransformer) -> list[str]:
    """The weight matrices by the name of their parameter: embedding, projections of every block, and head unless tied.

    `attn.v`, `attn.o`, `mlp` and the two embeddings store what a fact says; `attn.q` and `attn.k` route, and
    `mlp.router` chooses experts. The gradient of an expert is 0 where no position chooses it.
    """
    shapes = tensor_shapes(model.cfg.architecture).items()
    blocks = [name for name, shape in shapes if len(shape) == 2 and (".attn." in name or ".mlp." in name)]
    return [EMBEDDING, *blocks, *([] if model.cfg.tied else [HEAD])]


@dataclass(frozen=True, eq=False)
class Gradients:
    """The gradients of the losses of a batch."""

    by_name: dict[str, list[OuterSums]]  # terms whose sum is each fact's gradient: two for a tied embedding, else one
    losses: Float[Tensor, "fact"]  # in nats

    @classmethod
    def of(cls, batch: CanvasBatch, names: Sequence[str], reader: PassReader | None = None) -> "Gradients":
        """The gradients in these matrices, of one forward and one backward pass, of which `reader` reads the states.

        Raises:
            ValueError: A projection is another module than the weights describe, or carries a hook of torch.
        """
        model = batch.model
        with torch.enable_grad(), _recording(model, names) as (inputs, outputs):
            logits = batch.logits() if reader is None else reader.logits()
            losses = batch.losses(logits)
            outputs[HEAD] = logits
            wanted = list(outputs)
            found = torch.autograd.grad(losses.sum(), [outputs[name] for name in wanted], allow_unused=True)
        deltas = {
            name: torch.zeros_like(outputs[name]) if delta is None else delta
            for name, delta in zip(wanted, found, strict=True)
        }
        wide, device = torch.promote_types(logits.dtype, torch.float32), logits.device
        by_name = {
            name: [OuterSums(deltas[name].to(device, wide), inputs[name].to(device, wide))]
            for name in names
            if name not in (EMBEDDING, HEAD)
        }
        read = OuterSums(deltas[HEAD][:, None].to(wide), batch.at_rows(inputs[HEAD])[:, None].to(wide))
        if EMBEDDING in names:
            embedded = OuterSums(batch.tokens, deltas[EMBEDDING].to(wide), model.cfg.d_vocab)
            by_name[EMBEDDING] = [embedded, read] if model.cfg.tied else [embedded]
        if HEAD in names:
            by_name[HEAD] = [read]
        return cls({name: by_name[name] for name in names}, losses.detach())


@torch.no_grad()
def losses_after_step(batch: CanvasBatch, gradients: Gradients, sizes: Float[Tensor, "fact"]) -> Float[Tensor, "fact"]:
    """The loss of each fact after a step of that size along minus the gradient of its own.

    No weight is changed: each output y = W x becomes y - size · G x, with G the fact's gradient.
    """
    model = batch.model
    named = {id(_module(model, name)): name for name in gradients.by_name}

    def move(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        (own,) = gradients.by_name[named[id(module)]]
        moved = _by_fact(sizes, own.times(given[0].to(sizes.device)))
        return (output - moved.to(output.device)).to(output.dtype)

    def move_embedding(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        moved = torch.stack([own.rows(given[0]) for own in gradients.by_name[EMBEDDING]]).sum(dim=0)
        return (output - _by_fact(sizes, moved)).to(output.dtype)

    def keep(module: nn.Module, given: Any, output: Tensor) -> None:
        normalized.append(output)

    normalized: list[Tensor] = []
    hooks: list[tuple[str, _TorchHook]] = [(name, move) for name in gradients.by_name if name not in (EMBEDDING, HEAD)]
    hooks += [(EMBEDDING, move_embedding)] * (EMBEDDING in gradients.by_name)
    with _torch_hooks(model, [*hooks, ("ln_final", keep)]):
        logits = batch.logits()
    read = batch.at_rows(normalized[0])[:, None]
    for own in gradients.by_name.get(EMBEDDING if model.cfg.tied else HEAD, []):
        logits = logits - _by_fact(sizes, own.times(read)[:, 0])
    return batch.losses(logits)


def _by_fact(sizes: Float[Tensor, "fact"], x: Tensor) -> Tensor:
    return sizes.to(x.dtype).view(-1, *[1] * (x.dim() - 1)) * x


@restoring
def _recording(
    model: DiffusionTransformer, names: Sequence[str]
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Inputs and outputs of the matrices of the passes inside; the head's input is the output of the final norm.

    The stream is differentiated from the embedding on, so that no gradient of a weight is computed and frozen weights
    do not matter.
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def embedded(module: nn.Module, given: Any, output: Tensor) -> Tensor:
        outputs[EMBEDDING] = output.detach().requires_grad_()
        return outputs[EMBEDDING]

    def projection(name: str) -> Any:
        def store(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[name], outputs[name] = given[0].detach(), output

        return store

    def normalized(module: nn.Module, given: Any, output: Tensor) -> None:
        inputs[HEAD] = output.detach()

    check_projections(model, names)
    hooks = [(name, projection(name)) for name in names if name not in (EMBEDDING, HEAD)]
    with _torch_hooks(model, [(EMBEDDING, embedded), ("ln_final", normalized), *hooks]):
        yield inputs, outputs


@restoring
def _torch_hooks(model: DiffusionTransformer, hooks: Sequence[tuple[str, _TorchHook]]) -> Iterator[None]:
    """Attach hooks of torch to modules, named after them or their weight, while the block is run."""
    with ExitStack() as attached:
        for name, hook in hooks:
            attached.enter_context(_module(model, name).register_forward_hook(hook))
        yield


def _module(model: DiffusionTransformer, name: str) -> nn.Module:
    return model.get_submodule(name.removesuffix(".weight"))


def check_projections(model: DiffusionTransformer, names: Sequence[str]) -> None:
    """Raise a `ValueError` unless each matrix exists and is all that its module applies."""
    known = matrix_names(model)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{unknown[0]!r} is no weight matrix of {model.cfg.model_name!r}; they are {', '.join(known)}")
    if has_module_hooks(model):
        raise ValueError(
            "a hook of torch is attached to a module that is no hook point, and gradients of weights are computed from "
            "what modules read and write: attach it to a hook point, or remove it"
        )
    for name in [*names, EMBEDDING, HEAD, "ln_final.weight"]:
        module = _module(model, name)
        if type(module).forward not in _PLAIN:
            raise ValueError(
                f"{name.removesuffix('.weight')!r} is a module {type(module).__name__}, whose weights are not one "
                "matrix: put the original projection back"
            )


@dataclass(frozen=True, eq=False)
class GradientAlignment:
    """How the gradients of the forward and of the reverse loss agree, for each pair.

    Attributes:
        cosines: Float[fact parameter estimate], cosine of the two gradients of a pair, and the mean of the cosines of
            its forward gradient with the reverse gradients of other facts of its batch (`other_facts`). The
            second is the baseline: a generic fall of the reverse loss, which all pairs share, shows in both. NaN where
            the batch has no other fact.
        transfers: Float[fact parameter], <g_forward, g_reverse> / |g_forward|². Cosines and transfers are 0 where a
            gradient is, as in an expert that no position of a canvas chooses.
        steps: Float[fact estimate], change of the reverse loss, in nats, by a step along minus the forward gradient in
            all these matrices that lowers the pair's forward loss by 0.1% to first order: predicted, and measured. The
            measured one is NaN in less than float32, where so small a step is lost in rounding.
        losses: Float[fact canvas], in nats.
        parameters: Names of the weight matrices.
    """

    cosines: Float[Tensor, "fact parameter estimate"]
    transfers: Float[Tensor, "fact parameter"]
    steps: Float[Tensor, "fact estimate"]
    losses: Float[Tensor, "fact canvas"]
    parameters: list[str]

    @classmethod
    def of(cls, forward: CanvasBatch, reverse: CanvasBatch, one: Gradients, other: Gradients) -> "GradientAlignment":
        """The alignment of the gradients of both canvases of a batch, which takes one forward pass for the step."""
        different = other_facts(forward, reverse)
        compared, transfers, squares, products = [], [], [], []
        for name in one.by_name:
            ours, theirs = one.by_name[name], other.by_name[name]
            square, table = own(ours, ours).clamp(min=0), inner(ours, theirs)
            others = own(theirs, theirs).clamp(min=0)
            cosines = table / _or_one(square).sqrt()[:, None] / _or_one(others).sqrt()[None, :]
            compared.append(torch.stack([cosines.diagonal(), mean_where(cosines, different)], dim=1))
            transfers.append(table.diagonal() / _or_one(square))
            squares.append(square)
            products.append(table.diagonal())
        # The step lowers the forward loss by this share to first order.
        sizes = STEP * one.losses / torch.stack(squares).sum(0)
        predicted = -sizes * torch.stack(products).sum(0)
        measured = torch.full_like(predicted, torch.nan)
        if reverse.model.cfg.dtype in (torch.float32, torch.float64):
            measured = losses_after_step(reverse, one, sizes) - other.losses
        return cls(
            cosines=torch.stack(compared, dim=1).float().cpu(),
            transfers=torch.stack(transfers, dim=1).float().cpu(),
            steps=torch.stack([predicted, measured], dim=1).float().cpu(),
            losses=torch.stack([one.losses, other.losses], dim=1).float().cpu(),
            parameters=list(one.by_name),
        )

    @classmethod
    def joined(cls, batches: Sequence["GradientAlignment"]) -> "GradientAlignment":
        """The facts of several batches."""
        names = ("cosines", "transfers", "steps", "losses")
        tensors = {name: torch.cat([getattr(each, name) for each in batches]) for name in names}
        return cls(**tensors, parameters=batches[0].parameters)


def _or_one(square: Tensor) -> Tensor:
    """Divisors of what is 0 where they are."""
    return square.where(square > 0, 1)
