"""The folder of a call, for workers that can see it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion_lens.analysis.resumable import FactFolder, study_digest
from diffusion_lens.records import read_run


@dataclass(frozen=True)
class SharedFolder:
    """The folder of a call, for workers that can see it.

    Attributes:
        path: Absolute path.
        digest: Digest of the call's record, by which a worker recognises the folder.
    """

    path: Path
    digest: str

    @classmethod
    def of(cls, path: Path, record: Mapping[str, Any]) -> "SharedFolder":
        """The folder at this path, whose `run.json` has this record."""
        return cls(path.absolute(), study_digest(record))

    @property
    def is_here(self) -> bool:
        """Whether this machine has this folder, and not another one or none at its path."""
        try:
            return study_digest(read_run(self.path / "run.json")) == self.digest
        except (OSError, ValueError):
            return False

    def facts(self) -> FactFolder | None:
        """The folder of a study over facts, or `None` where it is not seen."""
        return FactFolder.open(self.path) if self.is_here else None
