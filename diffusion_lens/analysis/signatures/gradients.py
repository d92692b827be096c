"""Gradients of each fact's loss in every weight matrix, from one backward pass for all facts of a batch.

Facts of a batch share no weight's input, so one backward pass of the summed losses gives the gradient at every
projection's output for each fact. With the projection's input it is the fact's gradient, as a sum of outer products
(`outer_sums`). Gradients of biases and norms are left out. They are those of the weights as the model has them: if
norms are folded into the projections (`fold_ln`), the same network has other gradients.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_lens.analysis.signatures.canvases import CanvasBatch
from diffusion_lens.analysis.signatures.outer_sums import OuterSums
from diffusion_lens.analysis.signatures.reading import PassReader
from diffusion_lens.model.embed import Embed, Unembed
from diffusion_lens.model.experts import Router
from diffusion_lens.model.linear import Linear
from diffusion_lens.model.norm import Norm
from diffusion_lens.model.transformer import DiffusionTransformer
from weight_conversion import tensor_shapes

EMBEDDING, HEAD = "embed.weight", "unembed.weight"
_PLAIN = (Linear.forward, nn.Linear.forward, Embed.forward, Unembed.forward, Norm.forward, Router.forward)


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
    """The gradients of the losses of a batch.

    Attributes:
        by_name: By matrix, the terms whose sum is each fact's gradient: one, or two for a tied embedding.
        losses: Float[fact], in nats.
    """

    by_name: dict[str, list[OuterSums]]
    losses: Float[Tensor, "fact"]

    @classmethod
    def of(cls, batch: CanvasBatch, names: Sequence[str], reader: PassReader | None = None) -> "Gradients":
        """The gradients in these matrices, of one forward and one backward pass.

        Args:
            reader: What reads the states of the forward pass.

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

    Args:
        batch: Canvases whose losses are computed, one for each fact.
        gradients: Gradients along which the step goes.
        sizes: Learning rate of each fact.
    """
    model = batch.model
    named = {id(model.get_submodule(name.removesuffix(".weight"))): name for name in gradients.by_name}

    def move(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        (own,) = gradients.by_name[named[id(module)]]
        moved = _by_fact(sizes, own.times(given[0].to(sizes.device)))
        return (output - moved.to(output.device)).to(output.dtype)

    def move_embedding(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        moved = torch.stack([own.rows(given[0]) for own in gradients.by_name[EMBEDDING]]).sum(dim=0)
        return (output - _by_fact(sizes, moved)).to(output.dtype)

    normalized: list[Tensor] = []
    of_head = gradients.by_name.get(EMBEDDING if model.cfg.tied else HEAD, [])
    with _torch_hooks() as hooks:
        for name in gradients.by_name:
            if name not in (EMBEDDING, HEAD):
                hooks.append(model.get_submodule(name.removesuffix(".weight")).register_forward_hook(move))
        if EMBEDDING in gradients.by_name:
            hooks.append(model.embed.register_forward_hook(move_embedding))
        hooks.append(model.ln_final.register_forward_hook(lambda module, given, output: normalized.append(output)))
        logits = batch.logits()
    read = batch.at_rows(normalized[0])[:, None]
    for own in of_head:
        logits = logits - _by_fact(sizes, own.times(read)[:, 0])
    return batch.losses(logits)


def _by_fact(sizes: Float[Tensor, "fact"], x: Tensor) -> Tensor:
    return sizes.to(x.dtype).view(-1, *[1] * (x.dim() - 1)) * x


@contextmanager
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
    with _torch_hooks() as hooks:
        hooks.append(model.embed.register_forward_hook(embedded))
        hooks.append(model.ln_final.register_forward_hook(normalized))
        for name in names:
            if name not in (EMBEDDING, HEAD):
                module = model.get_submodule(name.removesuffix(".weight"))
                hooks.append(module.register_forward_hook(projection(name)))
        yield inputs, outputs


@contextmanager
def _torch_hooks() -> Iterator[list[Any]]:
    """A list for handles of hooks, which are removed at the end."""
    handles: list[Any] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


def check_projections(model: DiffusionTransformer, names: Sequence[str]) -> None:
    """Raise a `ValueError` unless each matrix exists and is all that its module applies."""
    known = matrix_names(model)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{unknown[0]!r} is no weight matrix of {model.cfg.model_name!r}; they are {', '.join(known)}")
    if model.has_module_hooks:
        raise ValueError(
            "a hook of torch is attached to a module that is no hook point, and gradients of weights are computed from "
            "what modules read and write: attach it to a hook point, or remove it"
        )
    for name in [*names, EMBEDDING, HEAD, "ln_final.weight"]:
        module = model.get_submodule(name.removesuffix(".weight"))
        if type(module).forward not in _PLAIN:
            raise ValueError(
                f"{name.removesuffix('.weight')!r} is a module {type(module).__name__}, whose weights are not one "
                "matrix: put the original projection back"
            )
