"""How the models in `diffusion_lens/loading/assets` were trained; `make tiny`, `make kinds`, `make pair` repeat it."""
