"""What is done with the weights of a model: folding the norms, and replacing some for a while.

A norm computes n · w + b, and every projection that reads it is linear, so W (n · w + b) = (W · diag(w)) n + W b: the
network computes the same function if w is multiplied into the projections, W b is added to their biases, the norm's
weight becomes 1 and its bias 0 (TransformerLens's `fold_ln`). Projections without a bias get one. Tools that multiply
the normalised stream with `W_U`, `W_in` or `W_Q` directly then use the matrices that the network applies.

The norms of single heads (`attn.q_norm`, `attn.k_norm`) are not folded, because a rotation, which is not diagonal,
follows them.
"""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from diffusion_lens.hooks.clock import restoring
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
