"""What a model's logits mean: the head that reads them, and the time and tokens that it needs."""

from abc import ABC

from torch import Tensor

from diffusion_lens.model.told_time import ToldTime
from diffusion_lens.noise import Head, HeadAt, head_of


class ReadingHead(ToldTime, ABC):
    """Turns logits, which a model returns as its head's linear map gives them, into probabilities of clean tokens."""

    @property
    def head(self) -> Head:
        """The meaning of the logits."""
        return head_of(self.cfg, self.cfg.head, self.cfg.d_vocab_out)

    def head_at(self, present: Tensor | None = None) -> HeadAt:
        """The head at positions of canvases, in the time of the current step or of `at_time`.

        Args:
            present: Int[#sample selected], the token at each position, for a head that needs the canvas.
        """
        head = self.head
        if not head.needs_canvas:
            return HeadAt(head)
        sigma = self.known_sigma()
        return HeadAt(head, present, None if sigma is None else float(sigma))
