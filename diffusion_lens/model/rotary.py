"""Rotary positions (Su et al. 2021, arXiv 2104.09864), half-split: dimension i turns with dimension i + d_head/2.

The tables are computed in float32 and rounded to the precision the checkpoint was trained with. The rotation is taken
in the wider of the tables' precision and the activations'; a family that turns in the activations' own has such tables.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

Tables = tuple[Tensor, Tensor]


class Rotary:
    """Cosines and sines for every position up to the longest asked so far, kept per device.

    Args:
        dtype: to which the tables are rounded.
        rotation: "float32", or "activation" for tables in the activations' own precision.
    """

    def __init__(self, d_head: int, base: float, dtype: torch.dtype, rotation: str = "float32") -> None:
        self.d_head = d_head
        self.base = base
        self.dtype = dtype
        self.rotation = rotation
        self._tables: dict[torch.device, Tables] = {}

    def tables(
        self,
        n_pos: int,
        device: torch.device,
        positions: Int[Tensor, "batch pos"] | None = None,
        n_past: int = 0,
        activation: torch.dtype = torch.float32,
    ) -> Tables:
        """Cosine, signed sine, Float[(batch) pos 1 d_head], for `n_pos` positions from `n_past` on, or those given."""
        cos, sin = self._up_to(n_past + n_pos, device)
        if self.rotation == "activation":
            cos, sin = cos.to(activation), sin.to(activation)
        if positions is None:
            return cos[n_past : n_past + n_pos, None], sin[n_past : n_past + n_pos, None]
        return cos[positions][:, :, None], sin[positions][:, :, None]

    def _up_to(self, n_pos: int, device: torch.device) -> Tables:
        held = self._tables.get(device)
        if held is None or held[0].shape[0] < n_pos:
            held = self._tables[device] = self._compute(max(n_pos, 2 * held[0].shape[0] if held else 0), device)
        return held

    # Tables outlive the call that needed them first, so they must not be inference tensors, whatever it was under.
    @torch.inference_mode(False)
    def _compute(self, length: int, device: torch.device) -> Tables:
        # The CPU computes the angles wherever the model is: tables must not depend on the device.
        # Frequencies are rounded once before they meet the positions, as in the code of every family.
        frequencies = 1.0 / self.base ** (torch.arange(0, self.d_head, 2, device="cpu").float() / self.d_head)
        angles = torch.outer(torch.arange(length, device="cpu").float(), frequencies)
        cos, sin = (table.to(self.dtype).float() for table in (angles.cos(), angles.sin()))
        return torch.cat([cos, cos], dim=-1).to(device), torch.cat([-sin, sin], dim=-1).to(device)


def tables_at(tables: Tables, rows: Int[Tensor, "batch selected"]) -> Tables:
    """Cosine and signed sine of some rows, Float[batch selected 1 d_head]."""
    cos, sin = tables
    if cos.dim() == 3:
        return cos[rows], sin[rows]
    batch = torch.arange(rows.shape[0], device=rows.device)[:, None]
    return cos[batch, rows], sin[batch, rows]


def rotate(x: Float[Tensor, "batch pos heads d_head"], tables: Tables) -> Float[Tensor, "batch pos heads d_head"]:
    """Turn queries or keys by their position."""
    cos, sin = tables
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    turned = wide * cos + wide.roll(x.shape[-1] // 2, dims=-1) * sin
    return turned.to(x.dtype)
