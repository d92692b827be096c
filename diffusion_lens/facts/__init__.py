"""Facts (text), queries (tokens on a canvas), and sentences as trained with the reverse question about them."""

from diffusion_lens.facts.fact import Direction, Fact, Probe, Query

__all__ = ["Direction", "Fact", "Probe", "Query"]
