"""The bundled models, which are part of the package: two masked diffusion models, each with its AR baseline, and two
models of other kinds of diffusion."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path


@dataclass(frozen=True)
class BundledModel:
    """A model in the package.

    Attributes:
        name: Name for `from_pretrained`.
        folder: Folder with config, tokenizer and `results.json`, of a pair or of one model.
        attention_dir: Its attention pattern, as in the config.
        family: Family whose format it has.
        trained_length: Tokens of the longest rows in training.
        data: Name of the data set that it was trained on (`diffusion_lens.data.sources`).
    """

    name: str
    folder: Path
    attention_dir: str
    family: str
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
    model.name: model
    for model in (
        BundledModel("site-mdm", _ASSETS / "site", "bidirectional", "lit_gpt", 32, "site"),
        BundledModel("site-ar", _ASSETS / "site", "causal", "lit_gpt", 32, "site"),
        BundledModel("tiny-mdm", _ASSETS / "tiny", "bidirectional", "lit_gpt", 14, "toy"),
        BundledModel("tiny-ar", _ASSETS / "tiny", "causal", "lit_gpt", 14, "toy"),
        BundledModel("tiny-block", _ASSETS / "tiny-block", "block_causal", "diffusion_lens", 14, "toy"),
        BundledModel("tiny-uniform", _ASSETS / "tiny-uniform", "bidirectional", "diffusion_lens", 14, "toy"),
    )
}
