"""`Variant`, the kind of a model: who sees whom, what noise is, and whether the network is told the time."""

from __future__ import annotations

from typing import Literal

from weight_conversion.conditioning import TimeConditioning

Direction = Literal["bidirectional", "causal", "block_causal"]
Context = Literal["blocks", "causal", "prompt"]


class Variant:
    """The kind of a model: its attention pattern and its noise, and what follows from these for a text."""

    attention_dir: Direction
    causal_block: int | None
    block_context: Context
    mask_token_id: int | None
    time: TimeConditioning | None

    @property
    def block_size(self) -> int | None:
        """Number of neighbouring positions that see each other and all earlier ones; `None` for the whole text."""
        return 1 if self.attention_dir == "causal" else self.causal_block

    @property
    def final_together(self) -> int | None:
        """Number of neighbouring positions whose states become final together as a text is written; `None` if they all
        depend on the whole text, or on how much of it is the prompt."""
        if self.counts_from_prompt:
            return 1 if self.block_context == "causal" else None
        return self.block_size

    @property
    def counts_from_prompt(self) -> bool:
        """Whether blocks are counted from the end of the prompt, so that a canvas has to say where they begin."""
        return self.block_context != "blocks"

    @property
    def is_told_time(self) -> bool:
        """Whether the network is told the time of its canvas (`model(tokens, time=...)`)."""
        return self.time is not None and self.time.told

    @property
    def noise(self) -> Literal["absorbing", "uniform"] | None:
        """Noise that training adds: "absorbing" hides tokens behind [MASK]; "uniform" replaces them by other tokens;
        `None` for next-token prediction."""
        if self.mask_token_id is not None:
            return "absorbing"
        return None if self.is_causal else "uniform"

    @property
    def is_causal(self) -> bool:
        """Whether no position sees a later one, so that cached activations stay valid as a text grows."""
        return self.block_size == 1

    @property
    def has_mask(self) -> bool:
        """Whether [MASK] stands at positions still to be written."""
        return self.noise == "absorbing"

    @property
    def rewrites(self) -> bool:
        """Whether noise is another token, so that every position of a canvas has a token and may change again."""
        return self.noise == "uniform"

    @property
    def opens_blocks(self) -> bool:
        """Whether a canvas is written block after block from left to right: trained so, or as next tokens."""
        return self.grows or self.causal_block is not None

    @property
    def grows(self) -> bool:
        """Whether a text grows at its end, so that a canvas contains no tokens at positions still to be written."""
        return self.noise is None
