"""The bundled models, which are part of the package: two diffusion models, each with its AR baseline."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path


@dataclass(frozen=True)
class BundledModel:
    """A model in the package.

    Attributes:
        name: Name for `from_pretrained`.
        folder: Folder of the pair, with config, tokenizer, card and `results.json`.
        trained_length: Tokens of the longest rows in training.
        data: Name of the data set that it was trained on (`diffusion_lens.data.sources`).
    """

    name: str
    folder: Path
    trained_length: int
    data: str

    @property
    def path(self) -> Path:
        """The file with the weights."""
        return self.folder / f"{self.name}.safetensors"

    @property
    def source(self) -> str:
        """The file's place in the package."""
        return f"assets/{self.folder.name}/{self.path.name}"


_ASSETS = Path(str(files("diffusion_lens") / "assets"))
BUNDLED: dict[str, BundledModel] = {
    name: BundledModel(name, _ASSETS / pair, trained_length, data)
    for pair, trained_length, data in (("site", 32, "site"), ("tiny", 14, "toy"))
    for name in (f"{pair}-mdm", f"{pair}-ar")
}
