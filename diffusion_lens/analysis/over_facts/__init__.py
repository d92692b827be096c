"""Studies over many facts: their procedure and results, their folders, and the executors that compute them."""
