"""Studies on the workers of any executor: processes of this machine, Dask, Slurm (submitit), MPI, Ray."""

from diffusion_lens.analysis.workers.local import LocalWorkers
from diffusion_lens.analysis.workers.spread import Workers

__all__ = ["LocalWorkers", "Workers"]
