"""Keys and values of many facts, asked either way: is a fact encoded alike in both directions?"""

from diffusion_lens.analysis.key_values.result import FactVectors, KeyValueStudy
from diffusion_lens.analysis.key_values.run import key_value_study

__all__ = ["FactVectors", "KeyValueStudy", "key_value_study"]
