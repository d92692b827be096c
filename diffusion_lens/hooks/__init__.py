"""Hooks: names of hook points, and the denoising step that a hook reads."""
