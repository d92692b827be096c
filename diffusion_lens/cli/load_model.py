"""Models, output folders and subjects as specified on the command line."""

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
    """A model by name or path, with its loading options. Invalid options are refused without loading the model.

    Attributes:
        name: Published name, repository, file or folder. `NAME@MODE` gives the mode too.
        config, tokenizer: Paths of the config and the tokenizer, if they are not next to the checkpoint.
        device: Name of the device. `None` means the best available device.
        dtype: Dtype of the weights, "float32", "bfloat16" or "float16".
        mode, block_size, mask_token_id: Arguments of `from_pretrained` that say what the config leaves open.

    Raises:
        ValueError: The dtype or the device is unknown, or the checkpoint has no such mode or block size. Loading checks
            whether this machine has the device.
        FileNotFoundError: The config or the tokenizer does not exist.
    """

    name: str
    config: Path | None = None
    tokenizer: Path | None = None
    device: str | None = None
    dtype: str = "float32"
    mode: str | None = None
    block_size: int | None = None
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        name, mode = name_and_mode(self.name, self.mode)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "mode", mode)
        bytes_per_weight(self.dtype)
        if self.device is not None:
            from diffusion_lens.cost import kind_of_device

            kind_of_device(self.device)
        if self.config is not None:
            from weight_conversion import require_config

            require_config(self.config.expanduser())
        if self.tokenizer is not None:
            from diffusion_lens.loading.tokenizers import require_tokenizer

            require_tokenizer(self.tokenizer.expanduser())
        if self.options:
            self.known_shape()

    @property
    def options(self) -> dict[str, str | int]:
        """What the config leaves open, as far as it is given."""
        return reading(self.mode, self.block_size, self.mask_token_id)

    @property
    def label(self) -> str:
        """Last part of the name or path, with the mode if one is chosen: no other model of a command has it."""
        from diffusion_lens.config import name_with_mode

        return name_with_mode(model_label(self.name), self.mode)

    def shape(self) -> "Architecture":
        """Architecture of the model, without a download.

        Raises:
            ValueError: The name is unknown, or the file is not a checkpoint.
            FileNotFoundError: The path does not exist, or the architecture is unknown before a download.
        """
        from diffusion_lens.loading import shape_of

        return shape_of(self.name, self.config, self.options)

    def known_shape(self) -> "Architecture | None":
        """Architecture of the model, or `None` if the model must be downloaded first."""
        try:
            return self.shape()
        except FileNotFoundError:
            return None

    def length(self, requested: int | None, of_data: int | None = None) -> int | None:
        """Number of positions of the canvas: as requested, else the smaller of training length and canvas of the data.

        Raises:
            ValueError: The canvas does not fit into the model's context.
        """
        from diffusion_lens.loading import trained_length_of

        if requested is None:
            known = (trained_length_of(self.name, self.config), of_data)
            return min((length for length in known if length is not None), default=None)
        self.check_length(requested)
        return requested

    def check_length(self, length: int) -> None:
        """Raise a `ValueError` if a canvas does not fit into the context, if that is known without a download."""
        shape = self.known_shape()
        if shape is not None and length > shape.n_ctx:
            raise ValueError(
                f"{length} positions do not fit into the context of {self.name!r}, which has {shape.n_ctx} positions"
            )

    def without_weights(self, *, fetch: bool = False) -> "HookedDiffusionTransformer | None":
        """The model without weights, to lay out canvases before it is loaded.

        Args:
            fetch: Whether to download a model that is not on this machine; `None` is returned for it otherwise.

        Raises:
            ValueError: Loading would fail before it reads the weights.
        """
        from diffusion_lens.catalogue import BUNDLED

        here = self.name.lower() in BUNDLED or Path(self.name).expanduser().exists()
        if not here and not fetch:
            return None
        import torch

        from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
        from diffusion_lens.loading import open_pretrained
        from weight_conversion import tensor_shapes

        cfg, checkpoint, tokenizer = open_pretrained(
            self.name,
            config=self.config,
            tokenizer=self.tokenizer,
            device="cpu",
            dtype=self.dtype,
            options=self.options,
        )
        shapes = tensor_shapes(checkpoint.architecture)
        cfg.device = "meta"
        empty = ((name, torch.empty(shape, device="meta")) for name, shape in shapes.items())
        model = HookedDiffusionTransformer(cfg, tokenizer, tensors=empty)
        model.cfg.device = "cpu"  # Canvases have values, so they need a real device.
        return model

    def load(
        self, *, weights_of: "HookedDiffusionTransformer | None" = None, on: str | None = None
    ) -> "HookedDiffusionTransformer":
        """The model on its device.

        Args:
            weights_of: The same checkpoint loaded in another mode, whose weights the model shares.
            on: Another device.

        Raises:
            ValueError: The name is unknown, or this machine does not have the device.
        """
        from diffusion_lens.config import as_device
        from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
        from diffusion_lens.loading.source import Source

        name = on or self.device
        device = None if name is None else as_device(name)
        source = Source(self.name, self.config, self.tokenizer, self.dtype, options=self.options)
        return HookedDiffusionTransformer.from_source(source, device, weights_of=weights_of)


def name_and_mode(given: str, mode: str | None = None) -> tuple[str, str | None]:
    """The name of a model and its mode, from `NAME@MODE` or the option --mode.

    Raises:
        ValueError: The two are different modes, or there is a checkpoint NAME, and no such mode.
    """
    from diffusion_lens.loading.given_options import MODES

    name, _, said = given.rpartition("@")
    if not name or Path(given).expanduser().exists():
        return given, mode
    if said not in MODES:
        if Path(name).expanduser().exists():
            raise ValueError(f"{given}: {said!r} is not a mode; the modes are {', '.join(MODES)}")
        return given, mode
    if mode not in (None, said):
        raise ValueError(f"{given} names the mode {said!r}, and --mode is {mode!r}: give one of them")
    return name, said


def different_labels(models: Sequence[ModelChoice]) -> list[str]:
    """The labels of the models of a command.

    Raises:
        ValueError: Two models have the same.
    """
    labels = [model.label for model in models]
    if len(set(labels)) < len(labels):
        raise ValueError(
            f"{' '.join(labels)}: each model has a folder of its name in OUT, so the names must differ. Two modes of "
            "one checkpoint are NAME@block and NAME@ar"
        )
    return labels


def reading(mode: str | None, block_size: int | None, mask_token_id: int | None) -> dict[str, str | int]:
    """The options of a checkpoint that are given, by their Python argument."""
    from diffusion_lens.loading.given_options import given_options

    return given_options(mode, block_size, mask_token_id)


def bytes_per_weight(dtype: str) -> int:
    """Number of bytes per weight of a dtype.

    Raises:
        ValueError: The name of the dtype is unknown.
    """
    if dtype not in BYTES:
        raise ValueError(f"dtype {dtype!r} is unknown; it must be one of {', '.join(BYTES)}")
    return BYTES[dtype]


def default_folder(command: str, models: Sequence[str]) -> Path:
    """Default folder for the results of a command. Its name contains the models, so that two models never share it."""
    return Path("-".join([command, *map(model_label, models)]))


def model_label(name: str) -> str:
    """Last part of a model's name or path. The path may be `.`."""
    return Path(os.path.abspath(name)).name


def subject_start(prompt: str, subject: str, occurrence: int | None) -> int | None:
    """Index of the character at which the selected mention of the subject begins. `None` if none is selected.

    Raises:
        ValueError: The prompt does not contain that mention.
    """
    if occurrence is None:
        return None
    starts = [i for i in range(len(prompt)) if subject and prompt.startswith(subject, i)]
    if not 0 <= occurrence < len(starts):
        raise ValueError(
            f"occurrence={occurrence}, but {subject!r} occurs {len(starts)} times in the prompt {prompt!r}"
        )
    return starts[occurrence]
