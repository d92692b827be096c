"""The states that a restored run puts back, and those that it keeps corrupted."""

import math
from dataclasses import dataclass
from typing import Any

from diffusion_lens.hook_names import attn_out, mlp_out, resid_post
from diffusion_lens.settings import Whole, at_least

SITES = {"resid": resid_post, "mlp": mlp_out, "attn": attn_out}


@dataclass(frozen=True)
class Restoration:
    """The states that are restored around a layer, and those that keep their corrupted values above it.

    Attributes:
        kind: "resid", the residual stream after one block; "mlp" or "attn", the outputs of a window of blocks.
        window: Number of blocks around a layer l, from l - window // 2 to l + ceil(window / 2) exclusive; not used for
            "resid".
        severed: "mlp" or "attn", outputs of the restored position that keep their corrupted values in the blocks above,
            which shows the path that the effect takes; `None` severs nothing. With "resid" only.
    """

    kind: str = "resid"
    window: int = 10
    severed: str | None = None

    @classmethod
    def of(cls, kind: "str | Restoration", window: Whole = 10, severed: str | None = None) -> "Restoration":
        """A restoration from the keywords of `causal_trace`; a `Restoration` is returned as it is.

        Raises:
            ValueError: A setting out of range, or a `Restoration` together with the keywords that it replaces.
        """
        if not isinstance(kind, Restoration):
            return cls(kind, at_least(1, "window", window), severed)
        if (window, severed) != (10, None):
            raise ValueError(
                "kind= is a Restoration, which has its own window and severed; leave window= and severed= out"
            )
        return kind

    def __post_init__(self) -> None:
        if self.kind not in SITES:
            raise ValueError(f"unknown kind {self.kind!r}; it is one of {', '.join(SITES)}")
        if self.window < 1:
            raise ValueError(f"window={self.window}; it must be at least 1")
        if self.severed not in (None, "mlp", "attn"):
            raise ValueError(f"severed={self.severed!r}; it is 'mlp', 'attn' or None")
        if self.severed and self.kind != "resid":
            raise ValueError(f"severed={self.severed!r} goes with kind='resid', not with a window of {self.kind!r}")

    def span(self, layer: int, n_layers: int) -> range:
        """The blocks that are restored around `layer`."""
        if self.kind == "resid":
            return range(layer, layer + 1)
        return range(max(0, layer - self.window // 2), min(n_layers, layer + math.ceil(self.window / 2)))

    def describe(self) -> dict[str, Any]:
        """The settings, for a record."""
        return {"kind": self.kind, "window": None if self.kind == "resid" else self.window, "severed": self.severed}
