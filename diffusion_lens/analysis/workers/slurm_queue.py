"""The states of jobs on a Slurm that keeps no accounts.

submitit asks `sacct` how its jobs are. Where accounting is off, `sacct` fails: submitit then prints a warning at every
poll, and waits for ever for a job whose process was killed. `squeue` needs no accounts. It lists a job until some
minutes after its end (`MinJobAge` in slurm.conf, 300 seconds by default), and this is asked at least once a minute.

A job whose node died is another matter: Slurm itself puts it back into the queue, and it is not at its end.
"""

import subprocess
from collections.abc import Sequence
from typing import Any

from submitit.slurm.slurm import SlurmInfoWatcher

_GONE = "GONE"  # no longer listed by `squeue`
_ENDED = {_GONE, "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}


def watch(jobs: Sequence[Any]) -> None:
    """Let the states of submitit's Slurm jobs come from `squeue` if `sacct` does not answer."""
    command = ["sacct", "--noheader", "--jobs", jobs[0].job_id]
    if subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0:
        return
    watcher = QueueWatcher(delay_s=60)
    for job in jobs:
        watcher.register_job(job.job_id)
        job.watcher = watcher


class QueueWatcher(SlurmInfoWatcher):
    """Reads the states of jobs from `squeue`."""

    def _make_command(self) -> list[str] | None:
        if not self._registered - self._finished:
            return None
        return ["squeue", "--me", "--states=all", "--array", "--format=%i|%T|%N"]

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """The state of each job in the output of `squeue`, by the job's id."""
        text = string if isinstance(string, str) else string.decode()
        rows = [line.split("|") for line in text.splitlines()[1:]]
        listed = {job: {"JobID": job, "State": state, "NodeList": nodes} for job, state, nodes in rows}
        gone = {job: {"JobID": job, "State": _GONE, "NodeList": ""} for job in self._registered}
        return {**gone, **listed}

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether the job has ended, in whatever way."""
        return self.get_state(job_id, mode=mode) in _ENDED
