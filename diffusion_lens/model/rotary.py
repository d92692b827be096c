"""Rotary positions (Su et al. 2021, arXiv 2104.09864), half-split: dimension i is rotated with dimension i + d_head/2.

The tables are computed in float32 and rounded to the precision with which the checkpoint was trained. The rotation is
computed in the wider precision of tables and activations. Families that rotate in the precision of the activations have
tables of that precision.
"""

import math
from dataclasses import astuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.model.positions import Positions, Tables, check_positions
from weight_conversion import RotaryScaling, YarnScaling


class Rotary(Positions):
    """Cosines and sines for all positions up to the longest sequence so far, stored per device.

    Args:
        d_head: Dimensions of a head that are rotated, from the first one on.
        base: Base of the frequencies.
        dtype: Precision to which the tables are rounded.
        rotation: "float32", or "activation" for tables in the precision of the activations.
        scaling: Scaling of the frequencies, if they are scaled.
    """

    # Only frequencies that are scaled have the attribute: records describe objects by their attributes.
    scaling: RotaryScaling | YarnScaling | None = None

    def __init__(
        self,
        d_head: int,
        base: float,
        dtype: torch.dtype,
        rotation: str = "float32",
        scaling: RotaryScaling | YarnScaling | None = None,
    ) -> None:
        self.d_head = d_head
        self.base = base
        self.dtype = dtype
        self.rotation = rotation
        if scaling is not None:
            self.scaling = scaling
        self._tables: dict[torch.device, Tables] = {}

    @property
    def frequencies(self) -> Float[Tensor, "frequency"]:
        """Radians per position by which each pair of dimensions is rotated, in float32 on the CPU."""
        divisors = self.base ** (torch.arange(0, self.d_head, 2, device="cpu").float() / self.d_head)
        return 1.0 / divisors if self.scaling is None else scaled(divisors, self.scaling, self.base)

    def turn(
        self, x: Float[Tensor, "batch pos head d_head"], positions: Int[Tensor, "#batch pos"]
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Queries or keys, rotated by their positions; see `Positions.turn`."""
        check_positions(positions)
        n_pos = int(positions.max()) + 1 if positions.numel() else 0
        return rotate(x, self.tables(n_pos, x.device, positions.to(x.device), activation=x.dtype))

    def of_pass(
        self,
        n_pos: int,
        device: torch.device,
        positions: Int[Tensor, "batch pos"] | None,
        n_past: int,
        activation: torch.dtype,
    ) -> tuple[Tables, None]:
        """The tables of the pass; nothing is added to the scores."""
        return self.tables(n_pos, device, positions, n_past, activation), None

    def tables(
        self,
        n_pos: int,
        device: torch.device,
        positions: Int[Tensor, "#batch pos"] | None = None,
        n_past: int = 0,
        activation: torch.dtype = torch.float32,
    ) -> Tables:
        """Cosine and signed sine, Float[(batch) pos 1 d_head].

        They are those of `positions`, or by default of the `n_pos` positions from `n_past` on.
        """
        cos, sin = self._up_to(n_past + n_pos, device)
        if self.rotation == "activation":
            cos, sin = cos.to(activation), sin.to(activation)
        if positions is None:
            return cos[n_past : n_past + n_pos, None], sin[n_past : n_past + n_pos, None]
        return cos[positions][:, :, None], sin[positions][:, :, None]

    def _up_to(self, n_pos: int, device: torch.device) -> Tables:
        tables = self._tables.get(device)
        if tables is None or tables[0].shape[0] < n_pos:
            tables = self._tables[device] = self._compute(max(n_pos, 2 * tables[0].shape[0] if tables else 0), device)
        return tables

    # Tables are reused by later calls, so they must not be inference tensors, even if this call is in inference mode.
    @torch.inference_mode(False)
    def _compute(self, length: int, device: torch.device) -> Tables:
        # The angles are computed on the CPU, so that the tables do not depend on the device.
        # Frequencies are rounded once before they are multiplied with the positions, as in the code of every family.
        angles = torch.outer(torch.arange(length, device="cpu").float(), self.frequencies)
        factor = 1.0 if self.scaling is None else self.scaling.table_factor
        cos, sin = ((table * factor).to(self.dtype).float() for table in (angles.cos(), angles.sin()))
        return torch.cat([cos, cos], dim=-1).to(device), torch.cat([-sin, sin], dim=-1).to(device)


def scaled(
    divisors: Float[Tensor, "frequency"], scaling: RotaryScaling | YarnScaling, base: float
) -> Float[Tensor, "frequency"]:
    """Frequencies after scaling, to the bit those of transformers.

    Args:
        divisors: Reciprocals of the frequencies before scaling.
        scaling: The scaling, whose type says which frequencies are lowered.
        base: Base of the frequencies.
    """
    if isinstance(scaling, YarnScaling):
        return _by_dimension(divisors, scaling, base)
    return _by_wavelength(1.0 / divisors, scaling)


def _by_wavelength(frequencies: Float[Tensor, "frequency"], scaling: RotaryScaling) -> Float[Tensor, "frequency"]:
    """`_compute_llama3_parameters`; see `RotaryScaling`.

    A frequency that turns r times within the original length becomes f/factor for r < low, f for r > high, and
    (1 - s)·f/factor + s·f with s = (r - low)/(high - low) between.
    """
    factor, low, high, length = map(float, astuple(scaling))
    wavelengths = 2 * math.pi / frequencies
    share = (length / wavelengths - low) / (high - low)
    between = (1 - share) * frequencies / factor + share * frequencies
    lowered = torch.where(wavelengths > length / low, frequencies / factor, between)
    return torch.where(wavelengths < length / high, frequencies, lowered)


def _by_dimension(
    divisors: Float[Tensor, "frequency"], scaling: YarnScaling, base: float
) -> Float[Tensor, "frequency"]:
    """`_compute_yarn_parameters`; see `YarnScaling`.

    Frequency i of n is base^(-i/n). It turns r times within the original length at i = n log(length / 2πr) / log(base),
    which gives both ends of the ramp.
    """
    n_dims = 2 * len(divisors)

    def dimension(turns: float) -> float:
        length = scaling.original_max_position_embeddings
        return (n_dims * math.log(length / (turns * 2 * math.pi))) / (2 * math.log(base))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, n_dims - 1)
    width = 0.001 if first == last else last - first
    kept = 1 - ((torch.arange(len(divisors), device="cpu").float() - first) / width).clamp(0, 1)
    return 1.0 / (scaling.factor * divisors) * (1 - kept) + 1.0 / divisors * kept


def tables_at(tables: Tables, rows: Int[Tensor, "batch selected"]) -> Tables:
    """Cosine and signed sine of some rows, Float[batch selected 1 d_head]."""
    cos, sin = tables
    if cos.dim() == 3:
        return cos[rows], sin[rows]
    batch = torch.arange(rows.shape[0], device=rows.device)[:, None]
    return cos[batch, rows], sin[batch, rows]


def rotate(x: Float[Tensor, "batch pos head d_head"], tables: Tables) -> Float[Tensor, "batch pos head d_head"]:
    """Rotate queries or keys by their position; dimensions beyond those of the tables stay as they are."""
    cos, sin = tables
    if (width := cos.shape[-1]) < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], tables), x[..., width:]], dim=-1)
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    rotated = wide * cos + wide.roll(x.shape[-1] // 2, dims=-1) * sin
    return rotated.to(x.dtype)
