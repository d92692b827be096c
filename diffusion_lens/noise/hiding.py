"""What stands at positions of a canvas whose tokens the model should predict."""

import torch

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.seeds import own_seed


def hidden_tokens(cfg: DiffusionConfig, n: int, key: str = "", seed: int = 0) -> list[int]:
    """`n` ids that hide tokens: [MASK]; under uniform noise, tokens drawn from all.

    Args:
        key: Name of the text, so that texts get different noise.
        seed: Seed of the noise.

    Raises:
        ValueError: The text of the model grows at its end, so that nothing stands there.
    """
    if not cfg.rewrites:
        if cfg.grows:
            raise ValueError(f"{cfg.model_name!r} has no id for positions that its text has not reached")
        return [cfg.blank] * n
    generator = torch.Generator().manual_seed(own_seed(seed, key))
    ids: list[int] = torch.randint(cfg.d_vocab_out, (n,), generator=generator).tolist()
    return ids
