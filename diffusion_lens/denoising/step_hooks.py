"""The hooks that act at chosen steps, under the import path that code of users has."""

from diffusion_lens.interventions import at_steps, by_step, on_branch, while_masked, while_predicting

__all__ = ["at_steps", "by_step", "on_branch", "while_masked", "while_predicting"]
