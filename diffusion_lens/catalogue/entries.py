"""Entries of the catalogue: one file of a repository with many checkpoints, or a whole repository."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weight_conversion import Architecture, export_size, n_params, published_architecture
from weight_conversion.registry import FAMILIES, recognise

Evidence = Literal["safetensors seen", "pth seen", "config seen", "name seen"]


class Published(ABC):
    """A checkpoint on the Hugging Face hub.

    Attributes:
        name: Argument of `from_pretrained`, in lower case.
        evidence: How the entry was verified. "safetensors seen" and "pth seen": the file was listed. "config seen": its
            config.json or a copy of it was read. "name seen": its authors, or code that loads it, give its id; numbers,
            if any, are those of its family.
        trained_length: Length in positions of the texts that it was last trained on, and at which its authors query it,
            if it is shorter than the context; otherwise, or if unknown, `None`.
    """

    name: str
    evidence: Evidence
    trained_length: int | None

    @property
    def architecture(self) -> Architecture | None:
        """The architecture, or `None` if it is not known before a download."""
        return self.read({})

    @abstractmethod
    def read(self, options: Mapping[str, Any]) -> Architecture | None:
        """The architecture with these options of `from_pretrained`: "mode", "block_size" or "mask_token_id".

        Raises:
            ValueError: An option that models of its family do not have.
        """

    @property
    @abstractmethod
    def n_bytes(self) -> int | None:
        """Size of the published weights in bytes, or `None` if it is unknown."""

    @property
    @abstractmethod
    def source(self) -> str:
        """Its path on huggingface.co."""


@dataclass(frozen=True)
class PublishedFile(Published):
    """One file of a repository with many checkpoints: those of SMDM and its AR baselines.

    Attributes:
        stem: File name without its suffix; it gives kind, size and training FLOPs.
        repo: Repository, "owner/name".
        folder: Folder of the .pth file in the repository; the folder of the safetensors file ends in "_safetensors".
        sha256: SHA-256 of the safetensors file, if it was published.
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
        """Masked diffusion model ("mdm") or AR baseline ("ar")."""
        return "mdm" if self.stem.startswith("mdm-") else "ar"

    @property
    def size(self) -> str:
        """Number of weights outside the embeddings, such as "1028M"."""
        return self.stem.split("-")[1]

    @property
    def tuned_on(self) -> str | None:
        """The fine-tuning data, by the name of the folder ("reverse", "sharegpt"); `None` without fine-tuning."""
        return None if self.folder == self.kind else self.folder

    @property
    def flops(self) -> str | None:
        """Training compute in FLOPs, as in the file name: "1600e18"."""
        match = re.search(r"-(\d+e18)", self.stem)
        return match[1] if match else None

    @property
    def architecture(self) -> Architecture:
        return published_architecture(self.size, self.kind)

    def read(self, options: Mapping[str, Any]) -> Architecture:
        FAMILIES[self.architecture.family].check_options(options)
        return self.architecture

    @property
    def n_bytes(self) -> int:
        """Exact size of the float32 safetensors file in bytes."""
        return export_size(self.architecture)

    @property
    def source(self) -> str:
        return f"{self.repo}/{self.files[0]}"


@dataclass(frozen=True)
class Repository(Published):
    """A repository with one checkpoint: config.json, safetensors, tokenizer.

    Attributes:
        repo: Repository, "owner/name".
        config: Numbers of its config.json, empty if they are not known. Loading uses them only for keys that are
            missing in the file.
        weight_bytes: Bytes per published weight: 2 for bfloat16 or float16.
        options: What its config leaves out and must be told: "mode", "block_size" or "mask_token_id".
        family: Its family, where `config` is empty; `None` if that is not known either.
    """

    name: str
    repo: str
    evidence: Evidence
    config: Mapping[str, Any] = field(default_factory=dict)
    weight_bytes: int = 2
    trained_length: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    family: str | None = None

    @property
    def known(self) -> dict[str, Any]:
        """The numbers of its config, and what that leaves out."""
        return {**self.config, **self.options}

    def read(self, options: Mapping[str, Any]) -> Architecture | None:
        if not self.config:
            return None
        config = {**self.known, **options, "_name_or_path": self.repo}
        family = recognise(config, {}, self.name)
        family.check_options(options)
        architecture = family.read_architecture(config, {})
        family.check_used(options, architecture)
        return architecture

    @property
    def n_bytes(self) -> int | None:
        """Size of the weights in bytes, without the headers of their files."""
        architecture = self.architecture
        return None if architecture is None else self.weight_bytes * n_params(architecture)

    @property
    def source(self) -> str:
        return self.repo
