"""Loads a checkpoint and checks it. A checkpoint that does not load is a finding; an unknown name is an error."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diffusion_lens.catalogue import BUNDLED, PUBLISHED, REPOSITORIES, PublishedFile, Repository
from diffusion_lens.checks.expected import Expected, check_hash
from diffusion_lens.checks.finding import CheckReport, Finding
from diffusion_lens.checks.recall import open_questions
from diffusion_lens.checks.reference import Reference
from diffusion_lens.checks.run import check_model
from diffusion_lens.config import as_device
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.loading import TOKENIZER_FILES
from diffusion_lens.loading.given_options import given_options
from diffusion_lens.loading.hub import fetch_file, fetch_tokenizer
from weight_conversion.files import WHOLE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_checkpoint(
    name_or_path: str,
    *,
    claimed: str | None = None,
    reference: Path | None = None,
    data: str | None = None,
    config: Path | None = None,
    tokenizer: Path | None = None,
    device: str | None = None,
    dtype: str = "float32",
    mode: str | None = None,
    block_size: int | None = None,
    mask_token_id: int | None = None,
) -> CheckReport:
    """Load a checkpoint and check whether it is what it claims to be.

    Args:
        name_or_path: Argument of `from_pretrained`.
        claimed: Name in the catalogue of the model that it should be; by default `name_or_path` if it is such a name.
        reference: File with the original code's logits.
        data: Data set or file with facts of the reversal curse.
        config, tokenizer, device, dtype: Arguments of `from_pretrained`. The tokenizer of the claimed model is used if
            there is none beside the checkpoint.
        mode, block_size, mask_token_id: Arguments of `from_pretrained`. The catalogue's config is that of the mode.

    Raises:
        ValueError: The name, the dtype or the device is unknown; the reference is not one; or the data contain no fact
            that the model can be queried for.
        FileNotFoundError: There is no such file.
    """
    # 1. Check the arguments, and find out what the checkpoint should be.
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown; it must be one of {', '.join(DTYPES)}")
    path = Path(name_or_path).expanduser()
    known = {entry.repo: entry.name for entry in REPOSITORIES}.get(name_or_path, name_or_path.lower())
    if claimed is None and not path.exists() and (known in PUBLISHED or known in BUNDLED):
        claimed = known
    expected = None if claimed is None else Expected.of(claimed, mode)
    loaded_reference = None if reference is None else Reference.load(reference)
    if data is not None:
        open_questions(data)  # so that unusable data are refused before a download
    resolved_device = None if device is None else as_device(device)

    # 2. Load it; if it is refused, report the reason and the hash of its file.
    start = time.perf_counter()
    try:
        model = HookedDiffusionTransformer.from_pretrained(
            name_or_path,
            config=config or _config(path, expected),
            tokenizer=tokenizer or _tokenizer(path, expected),
            device=resolved_device,
            dtype=DTYPES[dtype],
            **given_options(mode, block_size, mask_token_id),
        )
    except ValueError as error:
        if not path.exists() and expected is None:
            raise
        said = f"refused: {' '.join(str(error).split())}"
        cause = f"the checkpoint does not load: {error}"
        findings = (check_hash(expected, _file(name_or_path, path)), Finding("load", "off", said, cause))
        return CheckReport(name_or_path, None if expected is None else expected.name, findings)

    # 3. Check the loaded model.
    seconds = round(time.perf_counter() - start, 3)
    report = check_model(
        model,
        expected=expected,
        file=_file(name_or_path, path),
        reference=loaded_reference,
        data=data,
        recall=True if data is not None else None,
        name=name_or_path,
    )
    n_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    said = f"{n_bytes / 1e9:.2f} GB of weights ({dtype}) in {seconds:.1f} seconds"
    loaded = Finding("load", "ok", said, numbers={"seconds": seconds, "weights_bytes": n_bytes})
    return replace(report, findings=(loaded, *report.findings))


def _config(path: Path, expected: Expected | None) -> Any:
    """The catalogue's config for a local checkpoint without a config, if it is claimed to be that of a `Repository`."""
    entry = PUBLISHED.get(expected.name) if expected is not None else None
    folder = path if path.is_dir() else path.parent
    if not path.exists() or not isinstance(entry, Repository) or (folder / "config.json").exists():
        return None
    return dict(entry.config) or None


def _tokenizer(path: Path, expected: Expected | None) -> Path | None:
    """The tokenizer of the claimed model for a local checkpoint without one, if it is on this machine."""
    folder = path if path.is_dir() else path.parent
    if not path.exists() or expected is None or any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    if bundled := BUNDLED.get(expected.name):
        return bundled.folder
    if not isinstance(PUBLISHED[expected.name], PublishedFile):
        return None
    try:
        return fetch_tokenizer({"local_files_only": True}, folder)
    except FileNotFoundError:
        return None


def _file(name: str, path: Path) -> Path | None:
    """The file with the weights, if they are a single file."""
    if path.is_dir():
        return path / WHOLE if (path / WHOLE).exists() else None
    if path.exists():
        return path
    if bundled := BUNDLED.get(name.lower()):
        return bundled.path
    entry = PUBLISHED.get(name.lower())
    try:
        return fetch_file(entry, {"local_files_only": True}) if isinstance(entry, PublishedFile) else None
    except (FileNotFoundError, ValueError):
        return None
