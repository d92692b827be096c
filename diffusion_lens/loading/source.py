"""Where a model came from, and how it is written: in our own layout, and in that of other libraries.

The config.json that `save_pretrained` writes may contain two settings that do not belong to the architecture:

    trained_length        the length of the texts that the model was trained on
    layer_norm_folding    true if the norms are folded, which the weights alone cannot show: untrained norms are 1 too

The configs of other families do not have these keys. Beside such a config the length is stored in a separate file,
`trained_length.json`, which other programs ignore.

`export_hf` writes a model in the format in which transformers has it, or the authors of a diffusion model, with its
tokenizer. transformers has classes of its own for causal models of the kinds in `CAUSAL`. So an AR baseline of another
format, such as SMDM's, is written as one of these if only its rotary tables differ: lit-gpt rounds them to bfloat16,
and these formats do not. How far that moves the logits is measured.

With `"is_causal": false` in their config, these classes attend in both directions (transformers 5). So a twin that
`adapt` made, whose readout is still shifted, is written for them too: row i - 1 of the logits predicts token i. If its
first token sees only itself (`causal_first`), they need a mask that says so.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from diffusion_lens.loading.tokenizers import save_tokenizer
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.weights import norms_are_one
from diffusion_lens.settings import at_least, warn_user
from weight_conversion import Architecture, check_export, export, read_json, read_json_object, write_json
from weight_conversion.families.family import IGNORED_KEYS


@dataclass(frozen=True)
class Source:
    """The arguments of the `from_pretrained` call that gave a model, except its device and its access token.

    `options` are those of `given_options`. Relative paths start from
    `working_directory`. `delta` is the hash of the delta that the weights contain, if the path is that of one.
    """

    name_or_path: str | Path
    config: str | Path | Mapping[str, Any] | None = None
    tokenizer: Any = None
    dtype: Any = "float32"
    revision: str | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False
    fold_ln: bool = False
    device_map: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    working_directory: Path = field(default_factory=Path.cwd)
    delta: str | None = None

    def to_open(self) -> dict[str, Any]:
        """Keywords for `open_pretrained`."""
        left_out = ("fold_ln", "device_map", "working_directory", "delta")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def in_mode(self, mode: str) -> "Source":
        """The same checkpoint in another mode, with the same unknown keys of its config and no other option."""
        kept = {name: value for name, value in self.options.items() if name == IGNORED_KEYS}
        return replace(self, options={**kept, "mode": mode})

    def anywhere(self) -> "Source":
        """The same with absolute paths, for a process with another working directory."""
        names = ("name_or_path", "config", "tokenizer", "cache_dir")
        return replace(self, **{name: self._absolute(getattr(self, name)) for name in names})

    def _absolute(self, value: Any) -> Any:
        if not isinstance(value, str | Path):
            return value
        path = self.working_directory / Path(value).expanduser()
        return path if path.exists() else value


LENGTH_FILE = "trained_length.json"
LENGTH, FOLDED, FORMAT = "trained_length", "layer_norm_folding", "diffusion_lens"

Config = str | Path | Mapping[str, Any] | None


def trained_length_in(config: Config, folder: Path) -> int | None:
    """The trained length in our own config or, without one, in `LENGTH_FILE` beside the checkpoint.

    `config` is the config that the caller passed, or `None` for the config.json of the checkpoint's folder.
    """
    settings, path = _own(config, folder)
    if not settings and (folder / LENGTH_FILE).is_file():
        path = folder / LENGTH_FILE
        settings = read_json_object(folder / LENGTH_FILE)
    length = settings.get(LENGTH)
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ValueError(f"{LENGTH} is {length!r} in {path}; it must be a number of positions, at least 1, or null")
    return length


def folded_in(config: Config, folder: Path) -> bool:
    """Whether our own config says that the norms are folded; the arguments are those of `trained_length_in`."""
    settings, path = _own(config, folder)
    folded = settings.get(FOLDED, False)
    if not isinstance(folded, bool):
        raise ValueError(f"{FOLDED} is {folded!r} in {path}; it must be true or false")
    return folded


def write_own(cfg: DiffusionConfig, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Add the settings of a model to the config.json in our own format."""
    settings: dict[str, Any] = {} if cfg.trained_length is None else {LENGTH: cfg.trained_length}
    if cfg.layer_norm_folding and norms_are_one(tensors):  # training may have changed the norms since
        settings[FOLDED] = True
    if settings:
        write_json({**read_json(folder / "config.json"), **settings}, folder / "config.json")


def write_trained_length(length: int | None, folder: Path) -> None:
    """Write the trained length into the folder's config.json if it is our own, otherwise into `LENGTH_FILE`."""
    settings, _ = _own(None, folder)
    if settings and length is not None:
        write_json({**settings, LENGTH: length}, folder / "config.json")
    elif length is not None:
        write_json({LENGTH: length}, folder / LENGTH_FILE)
    else:
        (folder / LENGTH_FILE).unlink(missing_ok=True)


def _own(config: Config, folder: Path) -> tuple[Mapping[str, Any], object]:
    """The settings of a config in our own format, empty for any other config, and its name in error messages."""
    path = folder / "config.json" if config is None else config
    if not isinstance(path, Mapping) and not Path(path).expanduser().is_file():
        return {}, path
    settings = path if isinstance(path, Mapping) else read_json(Path(path).expanduser())
    return (settings if isinstance(settings, Mapping) and settings.get("format") == FORMAT else {}), path


MODES = ("bidirectional", "block", "ar")


def given_options(
    mode: Any = None, block_size: Any = None, mask_token_id: Any = None, ignore_config_keys: Any = None
) -> dict[str, Any]:
    """The options that are not `None`, by their name. Whether the checkpoint has them is checked when it is read."""
    if mode is not None and not isinstance(mode, str):
        raise TypeError(f"mode={mode!r} is not the name of a mode; the modes are {', '.join(map(repr, MODES))}")
    given: dict[str, Any] = {} if mode is None else {"mode": mode}
    if block_size is not None:
        given["block_size"] = at_least(1, "block_size", block_size, "a block has at least one position")
    if mask_token_id is not None:
        given["mask_token_id"] = at_least(0, "mask_token_id", mask_token_id, "it is the id of a token")
    if ignore_config_keys is not None:
        keys = [ignore_config_keys] if isinstance(ignore_config_keys, str) else ignore_config_keys
        if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
            raise TypeError(f"{IGNORED_KEYS}={keys!r}; it must be a list of names of the config's keys")
        given |= {IGNORED_KEYS: list(keys)} if keys else {}
    return given


WEIGHTS = "model.safetensors"
CAUSAL = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def export_hf(model: Any, folder: str | Path) -> Path:
    """See `model.export_hf`."""
    target, cfg, tokenizer = Path(folder).expanduser().absolute(), model.cfg, model.tokenizer
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; export_hf needs a folder")
    architecture, family = cfg.architecture, cfg.family
    if cfg.is_autoregressive and family not in CAUSAL:
        architecture, family = _as_causal(architecture, target)
    # null where there is none: without a key, transformers takes the default of its kind.
    beside: dict[str, Any] = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")
    }
    in_transformers = family in CAUSAL and cfg.readout == "shifted"
    if in_transformers and cfg.attention_dir == "block_causal":
        raise ValueError(
            f"{cfg.model_name!r} attends by blocks, and transformers' classes of the {family} family see the whole "
            "canvas or earlier positions only: model.save_pretrained(folder) writes it for this library. Nothing was "
            "written"
        )
    if in_transformers:
        beside |= {"architectures": [CAUSAL[family]], "torch_dtype": str(cfg.dtype).removeprefix("torch.")}

    # Everything is written elsewhere first, so that an error leaves the folder as it was.
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as name:
        part = Path(name)
        export(model.state_dict(), architecture, part / WEIGHTS, family, beside)
        config = part / "config.json"
        model_type = read_json_object(config).get("model_type") if config.exists() else None
        if model_type is None:
            raise ValueError(
                f"{cfg.model_name!r} is a diffusion model of the family {family!r}, for which neither transformers nor "
                "code of its authors reads a folder: model.save_pretrained(folder) writes one for this library, and "
                "weight_conversion.export(model.state_dict(), model.cfg.architecture, path) the file of its family. "
                "Nothing was written"
            )
        if tokenizer is not None:
            save_tokenizer(tokenizer, part, prepends_bos=cfg.default_prepend_bos)
        written = {path.relative_to(part) for path in part.rglob("*") if path.is_file()}
        there = {path.relative_to(target) for path in target.rglob("*") if path.is_file()}
        if stray := sorted(map(str, there - written)):
            raise ValueError(
                f"{target} contains other files ({', '.join(stray[:3])}): name another folder. Nothing was written"
            )
        for path in sorted(written):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(part / path, target / path)

    if cfg.causal_first:
        warn_user(
            f"the first token of {cfg.model_name!r} sees only itself, and other code lets it see the whole canvas. "
            "There, pass texts of one length with an attention_mask [batch 1 pos pos], -inf at [:, :, 0, 1:] and "
            "0 elsewhere. HookedDiffusionTransformer.from_pretrained needs none"
        )
    if cfg.unread_tokens:
        warn_user(
            f"{target} has the text network of {cfg.model_name!r} alone: HookedDiffusionTransformer.from_pretrained "
            "reads it, and the class of transformers would begin with a vision tower of random weights"
        )
    elif not (cfg.is_autoregressive or in_transformers):
        warn_user(
            f"transformers has no class for {model_type!r}: {target} has config, weights and tokenizer in the format "
            f"of the {family} family. HookedDiffusionTransformer.from_pretrained reads it, and so does the code of its "
            "authors (AutoModel with trust_remote_code=True, with their modeling files beside it)"
        )
    elif architecture != cfg.architecture:
        moved, largest = _change(model, architecture)
        warn_user(
            f"{cfg.model_name!r} rounds its rotary tables to bfloat16, and the {family} format does not: the logits of "
            f"the written model differ by at most {moved:.2g} from those of this one, which are at most {largest:.2g} "
            "(measured on 4 rows of random tokens)"
        )
    return target


def _as_causal(architecture: Architecture, target: Path) -> tuple[Architecture, str]:
    """The architecture with the rotary tables of `CAUSAL`, and the first of these formats that expresses it."""
    plain, reasons = replace(architecture, rotary_dtype="float32", rotation="activation"), []
    for family in CAUSAL:
        try:
            check_export(plain, target / WEIGHTS, family)
            return plain, family
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(f"transformers has no class for {architecture.name!r}: {'; '.join(reasons)}")


@torch.no_grad()
def _change(model: Any, architecture: Architecture) -> tuple[float, float]:
    """How far the logits of another architecture with the same weights are from the model's, and the largest of these
    in absolute value."""
    n_pos = min(model.cfg.trained_length or model.cfg.n_ctx, 256)
    tokens = torch.randint(model.cfg.d_vocab, (4, n_pos), generator=torch.Generator().manual_seed(0))
    written = DiffusionConfig.from_architecture(architecture, device=model.cfg.device, dtype=model.cfg.dtype)
    # Without the hooks of the model, and without its tokenizer, since random tokens are no text.
    before, after = (type(model)(cfg, weights_of=model)(tokens).float() for cfg in (model.cfg, written))
    return float((after - before).abs().max()), float(before.abs().max())
