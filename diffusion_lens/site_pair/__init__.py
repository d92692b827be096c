"""Trains the pair with a planted subject site: a masked diffusion model (MDM) and its AR baseline on `site_facts`.

`python -m diffusion_lens.site_pair --out FOLDER` trains both (`make_pair`) and writes `site-mdm.safetensors`,
`site-ar.safetensors`, their common config and tokenizer, and `results.json` with the recipe and what was measured.
After an interruption, the same command continues the training.

Both show the reversal curse, and both look an attribute up where ROME finds it in large models: in the MLPs of low
blocks at the subject's last token, from where attention brings the value to the read-out later. Data alone do
not give a diffusion model of this size the attributes at all; the first phases plant the site, and an auxiliary loss of
the diffusion model keeps it. So these are model organisms with a planted subject site, and not a
replication of ROME.
"""

from diffusion_lens.site_pair.making import make_pair
from diffusion_lens.site_pair.recipe import ABLATIONS, BLOCKS, PHASES, SHIPPED_SEED, Phase, architecture

__all__ = ["ABLATIONS", "BLOCKS", "PHASES", "SHIPPED_SEED", "Phase", "architecture", "make_pair"]
