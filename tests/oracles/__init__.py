"""What tests and benchmarks share: other implementations of the same numbers, and large checkpoints."""
