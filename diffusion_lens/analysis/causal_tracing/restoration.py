"""The states that a restored run puts back, and those that it keeps corrupted."""

import math
from dataclasses import dataclass
from typing import Any

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.hook_names import attn_out, mlp_out, resid_post, shared_out
from diffusion_lens.settings import Whole, at_least

SITES = {"resid": resid_post, "mlp": mlp_out, "attn": attn_out}


def points_of(kind: str, block: int, cfg: DiffusionConfig) -> list[str]:
    """The hook points of a kind of state in a block. The output of its shared expert is a part of the MLP's."""
    shared = kind == "mlp" and cfg.experts is not None and cfg.experts.has_shared(block)
    return [SITES[kind](block), *([shared_out(block)] if shared else [])]


@dataclass(frozen=True, init=False)
class Restoration:
    """The states that are restored around a layer, and those that keep their corrupted values above it.

    Attributes:
        kind: "resid", the residual stream after one block; "mlp" or "attn", the outputs of a window of blocks. That of
            an MLP with a shared expert is both of its parts.
        window: Number of blocks around a layer l, from l - window // 2 to l + ceil(window / 2) exclusive; not used for
            "resid".
        severed: "mlp" or "attn", outputs of the restored position that keep their corrupted values in the blocks above,
            which shows the path that the effect takes; `None` severs nothing. With "resid" only.
    """

    kind: str
    window: int
    severed: str | None

    def __init__(self, kind: str = "resid", window: Whole = 10, severed: str | None = None) -> None:
        """Check the settings, and convert NumPy's and torch's numbers to plain Python numbers.

        Raises:
            ValueError: A setting is unknown or out of range.
            TypeError: The window is not a whole number.
        """
        if kind not in SITES:
            raise ValueError(f"unknown kind {kind!r}; it must be one of {', '.join(SITES)}")
        if severed not in (None, "mlp", "attn"):
            raise ValueError(f"severed={severed!r}; it must be 'mlp', 'attn' or None")
        if severed and kind != "resid":
            raise ValueError(f"severed={severed!r} requires kind='resid'; kind is {kind!r}")
        vars(self).update(kind=kind, window=at_least(1, "window", window), severed=severed)

    @classmethod
    def of(cls, kind: "str | Restoration", window: Whole = 10, severed: str | None = None) -> "Restoration":
        """A restoration from the keywords of `causal_trace`; a `Restoration` is returned as it is.

        Raises:
            ValueError: A `Restoration` together with the keywords that it replaces.
        """
        if not isinstance(kind, Restoration):
            return cls(kind, window, severed)
        if (window, severed) != (10, None):
            raise ValueError(
                "kind= is a Restoration, which has its own window and severed; leave window= and severed= out"
            )
        return kind

    def span(self, layer: int, n_layers: int) -> range:
        """The blocks that are restored around `layer`."""
        if self.kind == "resid":
            return range(layer, layer + 1)
        return range(max(0, layer - self.window // 2), min(n_layers, layer + math.ceil(self.window / 2)))

    def describe(self) -> dict[str, Any]:
        """The settings, for a record."""
        return {"kind": self.kind, "window": None if self.kind == "resid" else self.window, "severed": self.severed}
