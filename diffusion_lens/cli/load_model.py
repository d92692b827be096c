"""Models, folders and subjects as a command names them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
    from weight_conversion import Architecture

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelChoice:
    """A model by its name or path, and how it is to be loaded. What can be refused without loading it is refused here.

    Attributes:
        name: a published name, a repository, a file or a folder.
        config, tokenizer: where they are, if not beside the checkpoint.
        device: by default the best there is.
        dtype: of the weights, "float32", "bfloat16" or "float16".

    Raises:
        ValueError: an unknown dtype, or no name of a device. Whether this machine has it counts only when loading.
        FileNotFoundError: a config or tokenizer that is not there.
    """

    name: str
    config: Path | None = None
    tokenizer: Path | None = None
    device: str | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        bytes_per_weight(self.dtype)
        if self.device is not None:
            from diffusion_lens.config import device_named

            device_named(self.device)
        if self.config is not None:
            from weight_conversion import require_config

            require_config(self.config.expanduser())
        if self.tokenizer is not None:
            from diffusion_lens.loading.tokenizers import require_tokenizer

            require_tokenizer(self.tokenizer.expanduser())

    @property
    def label(self) -> str:
        """The last part of its name, which may be that of a folder."""
        return model_label(self.name)

    def shape(self) -> "Architecture":
        """Its architecture, without a download.

        Raises:
            ValueError: an unknown name, or a file that is no checkpoint.
            FileNotFoundError: nothing there, or a shape that is known only after a download.
        """
        from diffusion_lens.loading import shape_of

        return shape_of(self.name, self.config)

    def known_shape(self) -> "Architecture | None":
        """Its architecture, or `None` of a model that has to be fetched first."""
        try:
            return self.shape()
        except FileNotFoundError:
            return None

    def length(self, asked: int | None, otherwise: int | None = None) -> int | None:
        """Places of the canvas: those asked for, those the model was trained on, or others.

        Raises:
            ValueError: more than the model's context holds.
        """
        from diffusion_lens.loading import trained_length_of

        if asked is None:
            return trained_length_of(self.name, self.config) or otherwise
        self.check_places(asked)
        return asked

    def check_places(self, places: int) -> None:
        """Raise a `ValueError` if so many do not fit into the context, as far as that is known without a download."""
        shape = self.known_shape()
        if shape is not None and places > shape.n_ctx:
            raise ValueError(f"{places} places do not fit into the context of {self.name!r}, which holds {shape.n_ctx}")

    def without_weights(self) -> "HookedDiffusionTransformer | None":
        """The model without its weights, to lay out canvases in a dry run; `None` of one that is not on this machine.

        Raises:
            ValueError: what loading refuses before it reads the weights.
        """
        from diffusion_lens.catalogue import BUNDLED

        if self.name.lower() not in BUNDLED and not Path(self.name).expanduser().exists():
            return None
        import torch

        from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
        from diffusion_lens.loading import open_pretrained
        from weight_conversion import tensor_shapes

        cfg, checkpoint, tokenizer = open_pretrained(
            self.name, config=self.config, tokenizer=self.tokenizer, device="cpu", dtype=self.dtype
        )
        shapes = tensor_shapes(checkpoint.architecture)
        cfg.device = "meta"
        empty = ((name, torch.empty(shape, device="meta")) for name, shape in shapes.items())
        model = HookedDiffusionTransformer(cfg, tokenizer, tensors=empty)
        cfg.device = "cpu"  # of the canvases, which do have numbers
        return model

    def load(self) -> "HookedDiffusionTransformer":
        """The model on its device.

        Raises:
            ValueError: an unknown name, or a device that is not there.
        """
        from diffusion_lens.config import as_device
        from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer

        where = None if self.device is None else as_device(self.device)
        return HookedDiffusionTransformer.from_pretrained(
            self.name, config=self.config, tokenizer=self.tokenizer, device=where, dtype=self.dtype
        )


def bytes_per_weight(dtype: str) -> int:
    """Of a dtype by its name.

    Raises:
        ValueError: another name.
    """
    if dtype not in BYTES:
        raise ValueError(f"dtype {dtype!r} is unknown; it is one of {', '.join(BYTES)}")
    return BYTES[dtype]


def default_folder(command: str, models: Sequence[str]) -> Path:
    """Where a command leaves its results unless it is told: a folder for each model, so that two never share one."""
    return Path("-".join([command, *map(model_label, models)]))


def model_label(name: str) -> str:
    """The last part of a model's name, which may be the path of a folder, such as `.`."""
    return Path(os.path.abspath(name)).name


def subject_start(prompt: str, subject: str, occurrence: int | None) -> int | None:
    """The character at which a mention of the subject begins; `None` where no mention was picked.

    Raises:
        ValueError: the prompt has no such mention.
    """
    if occurrence is None:
        return None
    starts = [i for i in range(len(prompt)) if subject and prompt.startswith(subject, i)]
    if not 0 <= occurrence < len(starts):
        raise ValueError(f"occurrence={occurrence}, but {subject!r} is {len(starts)} times in the prompt {prompt!r}")
    return starts[occurrence]
