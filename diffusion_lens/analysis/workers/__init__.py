"""Long calls on the workers of any executor: processes of this machine, Dask, Slurm (submitit), MPI, Ray."""

from diffusion_lens.analysis.workers.executor import Workers
from diffusion_lens.analysis.workers.local import LocalWorkers

__all__ = ["LocalWorkers", "Workers"]
