"""`python -m diffusion_lens` is `diffusion-lens`; `accelerate launch -m diffusion_lens finetune ...` needs it."""

import sys

try:
    from diffusion_lens.cli import app

    app()
except KeyboardInterrupt:  # before the application is there to catch it
    sys.exit(130)
