"""`python -m diffusion_lens` is `diffusion-lens`; `accelerate launch -m diffusion_lens finetune ...` needs it."""

from diffusion_lens.cli import app

app()
