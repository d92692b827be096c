"""Models as specified on the command line, their output folders, and their denoising runs (`--steps`)."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_lens.cli.options import Model, each_from_0
from diffusion_lens.cli.report import progress
from diffusion_lens.settings import Settings, at_least, fields_of, setting
from diffusion_lens.settings.shared import DenoiseFields

if TYPE_CHECKING:
    from diffusion_lens.denoising.canvas import Canvas
    from diffusion_lens.denoising.settings import DenoiseSettings
    from diffusion_lens.denoising.trajectory import Trajectory
    from diffusion_lens.facts.fact import Fact, Query
    from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
    from weight_conversion import Architecture

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(Settings):
    """How a model is loaded."""

    config: Path | None = setting(None, "Config of the checkpoint, if it is not next to it.")
    tokenizer: Path | None = setting(None, "Folder of the tokenizer, if it is not next to the checkpoint.")
    mode: str | None = setting(
        None, "Where one checkpoint is several models: bidirectional, block (block diffusion) or ar (causal)."
    )
    block_size: int | None = setting(
        None, "Positions in a block of a block diffusion model whose config does not say it.", partial(at_least, 1)
    )
    mask_token_id: int | None = setting(
        None, "Id of [MASK], where neither config nor tokenizer gives it.", partial(at_least, 0)
    )
    ignore_config_keys: list[str] | None = setting(
        None,
        "Unknown key of the config that changes nothing in the network. Repeat the option for several. Any other "
        "unknown key is an error.",
    )
    device: str | None = setting(None, "cpu, cuda, cuda:1 or mps. Default: the best available device.")
    dtype: str = setting("float32", "Dtype of the weights: float32, bfloat16 or float16.")

    @property
    def options(self) -> dict[str, Any]:
        """What the config leaves open, as far as it is given."""
        from diffusion_lens.loading.source import given_options

        return given_options(self.mode, self.block_size, self.mask_token_id, self.ignore_config_keys)

    def of(self, model: str, mode: str | None, beside: bool = False) -> "ModelChoice":
        """The model in this mode. `beside` another mode of the checkpoint, the causal one takes neither size."""
        sizes = {"block_size": None, "mask_token_id": None} if beside and mode == "ar" else {}
        return ModelChoice(model, **{**vars(self), **sizes, "mode": mode})


@dataclass(frozen=True)
class ModelChoice(LoadingOptions):
    """A model by name or path, with its loading options. Invalid options are refused without loading the model.

    Attributes:
        model: Published name, repository, file or folder. `NAME@MODE` gives the mode too.
        name: The same without the mode.
    """

    model: Model
    name: str = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        name, mode = name_and_mode(self.model, self.mode)
        vars(self).update(name=name, mode=mode)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; it must be one of {', '.join(DTYPES)}")
        if self.device is not None:
            from diffusion_lens.model.config import kind_of_device

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
    def label(self) -> str:
        """Last part of the name or path, with the mode if one is chosen: no other model of a command has it."""
        from diffusion_lens.model.config import name_with_mode

        return name_with_mode(model_label(self.name), self.mode)

    def shape(self) -> "Architecture":
        """Architecture of the model, without a download; a `FileNotFoundError` if it is unknown before one."""
        from diffusion_lens.loading import shape_of

        return shape_of(self.name, self.config, self.options)

    def known_shape(self) -> "Architecture | None":
        """Architecture of the model, or `None` if the model must be downloaded first."""
        try:
            return self.shape()
        except FileNotFoundError:
            return None

    def length(self, requested: int | None, of_data: int | None = None) -> int | None:
        """Positions of the canvas: as requested, else the smaller of training length and canvas of the data."""
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
        """
        if not self.is_here and not fetch:
            return None
        import torch

        from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
        from diffusion_lens.loading import open_pretrained
        from weight_conversion import tensor_shapes

        given: Any = {"config": self.config, "tokenizer": self.tokenizer, "dtype": self.dtype, "options": self.options}
        cfg, checkpoint, tokenizer = open_pretrained(self.name, device="cpu", **given)
        shapes = tensor_shapes(checkpoint.architecture)
        cfg.device = "meta"
        empty = ((name, torch.empty(shape, device="meta")) for name, shape in shapes.items())
        model = HookedDiffusionTransformer(cfg, tokenizer, tensors=empty)
        model.cfg.device = "cpu"  # Canvases have values, so they need a real device.
        return model

    @property
    def is_here(self) -> bool:
        """Whether the model is bundled, in another installed package, or a path of this machine."""
        from diffusion_lens.loading.catalogue import BUNDLED, DELTAS
        from diffusion_lens.loading.gguf import packaged_file

        name = self.name.lower()
        if name in BUNDLED or Path(self.name).expanduser().exists():
            return True
        return packaged_file(DELTAS[name].base if name in DELTAS else name) is not None

    def narrow(self, texts: Iterable[str] = ()) -> "HookedDiffusionTransformer":
        """The narrow network of the model, on which the work of a job is counted (`analysis.planned_work`).

        Args:
            texts: Texts whose tokens are guessed if the tokenizer is not on this machine.
        """
        from diffusion_lens.analysis.planned_work import narrow_network
        from diffusion_lens.data.toy_facts import guessing_tokenizer
        from diffusion_lens.loading import trained_length_of
        from diffusion_lens.model.config import DiffusionConfig, kind_of_device

        outline = self.without_weights()
        if outline is not None:
            cfg, tokenizer = outline.cfg, outline.tokenizer
        else:
            known: Any = {"dtype": self.dtype, "trained_length": trained_length_of(self.name, self.config)}
            cfg = DiffusionConfig.from_architecture(self.shape(), device="cpu", **known)
            tokenizer = guessing_tokenizer(texts)
        cfg.device = kind_of_device(self.device)
        return narrow_network(cfg, tokenizer)

    def load(
        self, *, weights_of: "HookedDiffusionTransformer | None" = None, on: str | None = None
    ) -> "HookedDiffusionTransformer":
        """The model on its device.

        Args:
            weights_of: The same checkpoint loaded in another mode, whose weights the model shares.
            on: Another device.
        """
        from diffusion_lens.hooked_diffusion_transformer import load_source
        from diffusion_lens.loading.source import Source
        from diffusion_lens.model.config import as_device

        name = on or self.device
        device = None if name is None else as_device(name)
        source = Source(self.name, self.config, self.tokenizer, self.dtype, options=self.options)
        return load_source(source, device, weights_of=weights_of)


def name_and_mode(given: str, mode: str | None = None) -> tuple[str, str | None]:
    """The name of a model and its mode, from `NAME@MODE` or the option --mode."""
    from diffusion_lens.loading.source import MODES

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
    """The labels of the models of a command; a `ValueError` if two have the same."""
    labels = [model.label for model in models]
    if len(set(labels)) < len(labels):
        raise ValueError(
            f"{' '.join(labels)}: each model has a folder of its name in OUT, so the names must differ. Two modes of "
            "one checkpoint are NAME@block and NAME@ar"
        )
    return labels


def default_folder(command: str, models: Sequence[str]) -> Path:
    """Default folder for the results of a command. Its name contains the models, so that two models never share it."""
    return Path("-".join([command, *map(model_label, models)]))


def model_label(name: str) -> str:
    """Last part of a model's name or path. The path may be `.`."""
    return Path(os.path.abspath(name)).name


@dataclass(frozen=True, kw_only=True)
class LoopOptions(DenoiseFields):
    """The denoising run of a command that reads one canvas or, with --steps, the canvases of a run."""

    steps: int | None = setting(
        None,
        "Number of denoising steps. With it, the command runs the denoising loop and reads the canvases of its steps; "
        "without it, one canvas on which the whole answer is masked. A causal model writes one position per step, "
        "whatever the number.",
        partial(at_least, 1, reason="only a step reveals positions"),
    )
    at_step: list[int] | None = setting(
        None, "Step to read, counted from 0. Repeat the option for several. Default: all.", each_from_0
    )

    def settings(self, model: ModelChoice, **needing_steps: Any) -> "DenoiseSettings | None":
        """Settings of the run, checked before the model is loaded; `None` without `--steps`.

        Args:
            needing_steps: Other options that have a meaning only with `--steps`.
        """
        from diffusion_lens.denoising.samplers import LeftToRight
        from diffusion_lens.denoising.settings import DenoiseSettings
        from diffusion_lens.settings import unique_indices

        settings = DenoiseSettings(**{name: getattr(self, name) for name in fields_of(DenoiseFields)})
        if (shape := model.known_shape()) is not None:
            settings = settings.on(shape, model.name)
        if self.steps is None:
            of_run = ("at_step", "sampler", "cfg_scale", "temperature")
            for name, value in {**{name: getattr(self, name) for name in of_run}, **needing_steps}.items():
                if value:
                    option = name.replace("_", "-")
                    raise ValueError(
                        f"--{option} is a setting of a denoising run: give the number of its steps with --steps"
                    )
            return None
        at_steps = unique_indices("at_step", self.at_step) or ()
        has_these_steps = settings.sampler is not None and not isinstance(settings.sampler, LeftToRight)
        if beyond := [step for step in at_steps if has_these_steps and step >= self.steps]:
            raise ValueError(f"--at-step {beyond[0]}, but the steps of this run are 0 to {self.steps - 1}")
        return settings

    def reads(self, last: int, default: list[int] | None, is_planned: bool) -> list[list[int] | None]:
        """The steps to read together. A plan reads each alone, because it does not know when a run reveals the answer.

        Args:
            last: Step that reveals the last token of the answer, up to which a part of it is masked.
            default: Steps that are read without `--at-step`; `None` leaves them to the analysis.
        """
        steps = self.at_step or default
        if is_planned:
            return [None] if steps is None else [[min(step, last)] for step in steps]
        if late := [step for step in self.at_step or () if step > last]:
            raise ValueError(
                f"--at-step {late[0]}: the run reveals the answer's last token at step {last}, after which there is "
                "nothing to read"
            )
        return [steps]


def canvas_of(model: "HookedDiffusionTransformer", prompt: "str | Query", length: int | None = None) -> "Canvas":
    """The canvas from which a run begins: that of a query, or a text followed by masked positions up to `length`."""
    from diffusion_lens.analysis.engine.trajectory import loop_prompt
    from diffusion_lens.denoising import lay_out

    if isinstance(prompt, str):
        return lay_out(model, prompt, length)
    given, n_positions = loop_prompt(model, prompt)
    return lay_out(model, given[None], n_positions)


def denoised(model: "HookedDiffusionTransformer", canvas: "Canvas", settings: "DenoiseSettings") -> "Trajectory":
    """The denoising run from a canvas."""
    from diffusion_lens.denoising import denoise

    return denoise(model, canvas, settings, progress=progress())


def changed_canvases(trajectory: "Trajectory") -> Iterator[tuple[int, str]]:
    """The words from the first position to fill on, at the start (-1) and after each step that changed them, with a dot
    for each mask."""
    first, before = int((~trajectory.given[0]).int().argmax()), None
    for step, canvas in enumerate(trajectory.str_canvases(), -1):
        if canvas != before:
            yield step, " ".join("·" if word in ("[MASK]", "") else word for word in canvas[first:])
        before = canvas


def unnamed_subject(prompt: str, answer: str) -> "Fact":
    """A fact for commands that do not ask for its subject, with the whole prompt as the subject."""
    from diffusion_lens.facts.fact import Fact

    if not prompt.strip():
        raise ValueError(f"the prompt {prompt!r} is empty: there is no token to predict from")
    return Fact(prompt, prompt, answer)
