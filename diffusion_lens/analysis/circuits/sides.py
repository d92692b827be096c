"""What edges require: a plain residual stream, and two runs with equal positions and one metric; their steps joined."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from diffusion_lens.analysis.patching.metrics import UNREAD
from diffusion_lens.analysis.patching.runs import Side
from diffusion_lens.hook_names import shared_out
from diffusion_lens.model.hook_points import is_hooked, listens
from diffusion_lens.model.transformer import DiffusionTransformer

# What lies in a block between the outputs of writers and the inputs of readers: hook points, and modules around them.
_BETWEEN = (
    "hook_resid_pre",
    "attn.hook_q_input",
    "attn.hook_k_input",
    "attn.hook_v_input",
    "attn.hook_attn_in",
    "hook_attn_out",
    "hook_resid_mid",
    "hook_mlp_in",
    "hook_resid_post",
)
_AROUND = ("", "attn")


def require_plain_stream(model: DiffusionTransformer) -> None:
    """Raise a `ValueError` if a hook or another module is between what writers write and readers read, or if parts that
    are no writers, shared experts, write too.

    An edge stands for the sum of outputs that a reader reads. Where a hook changes the sum, or an output after its
    writer, a change of the output is no longer the same change of the reader's input.
    """
    for layer, block in enumerate(model.blocks):
        if shared_out(layer) in model.hook_dict:
            raise ValueError(
                f"block {layer} of {model.cfg.model_name!r} has a shared expert, which writes to the residual stream "
                f"at {shared_out(layer)!r} and is no part of the graph: use node_attribution, or patch_grid"
            )
        points = [name for name in _BETWEEN if is_hooked(block.get_submodule(name))]
        modules = [name for name in _AROUND if listens(block.get_submodule(name))]
        if found := [".".join(("blocks", str(layer), name)).removesuffix(".") for name in points + modules]:
            raise ValueError(
                f"a hook or another module is at {', '.join(map(repr, found))}, between the outputs that are added to "
                "the residual stream and the parts that read it, and an edge stands for an unchanged output: attach it "
                "to what one part writes ('hook_embed', 'attn.hook_z', 'attn.hook_result', 'hook_mlp_out'), or use "
                "node_attribution, which takes hooks anywhere"
            )


def on_one_metric(clean: Side, corrupted: Side) -> tuple[Side, Side]:
    """Both sides with the metric of the clean canvas, applied to logits of p(x_0), guided if the clean run was."""
    clean = clean.through_head()
    return clean, replace(corrupted, reading=clean.reading)


def require_same_positions(clean: Side, corrupted: Side) -> None:
    """Raise a `ValueError` unless the two inputs have prompt, masks and padding at the same positions."""
    if clean.extent != corrupted.extent:
        raise ValueError(
            f"the clean input has {clean.n_pos} positions and the corrupted one {corrupted.n_pos}: edges connect equal "
            "positions, so give both the same length"
        )
    real = [
        torch.ones_like(side.tokens, dtype=torch.bool) if side.real is None else side.real
        for side in (clean, corrupted)
    ]
    if bool((differs := (real[0] != real[1]).any(dim=1)).any()):
        row = int(differs.nonzero()[0])
        raise ValueError(
            f"row {row} has {int(real[0][row].sum())} tokens without padding in the clean input and "
            f"{int(real[1][row].sum())} in the corrupted one: edges connect equal positions, so pad both alike"
        )
    if clean.reading is UNREAD:
        raise ValueError(
            "the two trajectories were given their prompts at different positions, so the rows of the metric mean "
            "something else in each, and edges connect equal positions: take prompts with equally many tokens"
        )


def joined(by_step: Iterable[tuple[Tensor, Tensor, Tensor]], steps: Sequence[int] | None) -> tuple[Tensor, ...]:
    """The scores and both metrics with an axis of steps, or without steps, those of the single pair of inputs."""
    stacked = [torch.stack(values) for values in zip(*by_step, strict=True)]
    return tuple(stacked if steps is not None else (values[0] for values in stacked))
