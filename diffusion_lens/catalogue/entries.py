"""What a published name stands for: one file among many in a repository, or a repository of its own."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weight_conversion import Architecture, export_size, published_architecture
from weight_conversion.registry import recognise

Evidence = Literal["safetensors seen", "pth seen", "config seen", "name seen", "from memory"]


class Published(ABC):
    """A checkpoint on the Hugging Face hub.

    Attributes:
        name: what `from_pretrained` takes, in lower case.
        evidence: what was seen of it. "safetensors seen", "pth seen": the file, listed. "config seen": its config.json
            or a copy of it. "name seen": its id, where its authors or code that loads it give it; the numbers, if any,
            are those of its family. "from memory": nothing.
        trained_length: places of the texts that it was last trained on, and at which its authors ask it, where these
            are fewer than its context; `None` for the context, or where nobody says.
    """

    name: str
    evidence: Evidence
    trained_length: int | None

    @property
    @abstractmethod
    def architecture(self) -> Architecture | None:
        """Known before anything is downloaded, or `None`."""

    @property
    @abstractmethod
    def n_bytes(self) -> int | None:
        """Size of the weights as they are published, or `None`."""

    @property
    @abstractmethod
    def source(self) -> str:
        """Where it lies on huggingface.co."""


@dataclass(frozen=True)
class File(Published):
    """One checkpoint of a repository that holds many: SMDM's and its autoregressive twins'.

    Attributes:
        stem: file name without its ending; it tells kind, size and training FLOPs.
        repo: the repository.
        folder: folder in it; its safetensors twin ends in "_safetensors".
        sha256: of the safetensors file, where one was published.
    """

    name: str
    stem: str
    evidence: Evidence
    repo: str
    folder: str
    sha256: str | None = None
    trained_length: int | None = None

    @property
    def files(self) -> tuple[str, str]:
        """Paths in the repository, in the order in which they are tried."""
        return f"{self.folder}_safetensors/{self.stem}.safetensors", f"{self.folder}/{self.stem}.pth"

    @property
    def kind(self) -> Literal["mdm", "ar"]:
        """Masked diffusion, or its twin."""
        return "mdm" if self.stem.startswith("mdm-") else "ar"

    @property
    def size(self) -> str:
        """Weights outside the embeddings, "1028M"."""
        return self.stem.split("-")[1]

    @property
    def tuned_on(self) -> str | None:
        """The data it was fine-tuned on, as its folder is named ("reverse", "sharegpt"); `None` if it was not."""
        return None if self.folder == self.kind else self.folder

    @property
    def flops(self) -> str | None:
        """Training compute as the name gives it, "1600e18"."""
        found = re.search(r"-(\d+e18)", self.stem)
        return found[1] if found else None

    @property
    def architecture(self) -> Architecture:
        return published_architecture(self.size, self.kind)

    @property
    def n_bytes(self) -> int:
        """Size of the float32 safetensors file, to the byte."""
        return export_size(self.architecture)

    @property
    def source(self) -> str:
        return f"{self.repo}/{self.files[0]}"


@dataclass(frozen=True)
class Repository(Published):
    """A repository that is one checkpoint: config.json, safetensors, tokenizer.

    Attributes:
        repo: its id, "owner/name".
        config: the numbers of its config.json, empty where they are not known. Loading takes them only for keys that
            the file itself leaves out.
        weight_bytes: of a published weight; 2 is bfloat16 or float16.
    """

    name: str
    repo: str
    evidence: Evidence
    config: Mapping[str, Any] = field(default_factory=dict)
    weight_bytes: int = 2
    trained_length: int | None = None

    @property
    def architecture(self) -> Architecture | None:
        if not self.config:
            return None
        config = {**self.config, "_name_or_path": self.repo}
        return recognise(config, {}, self.name).read_architecture(config, {})

    @property
    def n_bytes(self) -> int | None:
        """Size of the weights, without the headers of their files."""
        known = self.architecture
        return None if known is None else self.weight_bytes * known.n_params

    @property
    def source(self) -> str:
        return self.repo
