"""A checkpoint loaded to be checked. One that does not load is a finding; a name that does not exist is an error."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diffusion_lens.catalogue import BUNDLED, PUBLISHED, REPOSITORIES, PublishedFile, Repository, bundled_folder
from diffusion_lens.checks.expected import Expected, check_hash
from diffusion_lens.checks.finding import CheckReport, Finding
from diffusion_lens.checks.recall import open_questions
from diffusion_lens.checks.reference import Reference
from diffusion_lens.checks.run import check_model
from diffusion_lens.config import as_device
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.loading import TOKENIZER_FILES
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
) -> CheckReport:
    """Load a checkpoint and ask whether it is what it says.

    Args:
        name_or_path: what `from_pretrained` takes.
        claimed: name in the catalogue that it should be; by default its own, if it has one.
        reference: file with the original code's logits.
        data: facts of the reversal curse.
        config, tokenizer, device, dtype: as in `from_pretrained`; the tokenizer of the name that is claimed is taken
            where none lies beside the file.

    Raises:
        ValueError: an unknown name, dtype or device, a reference that is none, or data that cannot be asked.
        FileNotFoundError: nothing there.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown; it is one of {', '.join(DTYPES)}")
    here = Path(name_or_path).expanduser()
    known = {entry.repo: entry.name for entry in REPOSITORIES}.get(name_or_path, name_or_path.lower())
    if claimed is None and not here.exists() and (known in PUBLISHED or known in BUNDLED):
        claimed = known
    expected = None if claimed is None else Expected.of(claimed)
    recorded = None if reference is None else Reference.load(reference)
    if data is not None:
        open_questions(data)  # refused before a download
    where = None if device is None else as_device(device)
    begun = time.perf_counter()
    try:
        model = HookedDiffusionTransformer.from_pretrained(
            name_or_path,
            config=config or _config(here, expected),
            tokenizer=tokenizer or _tokenizer(here, expected),
            device=where,
            dtype=DTYPES[dtype],
        )
    except ValueError as error:
        if not here.exists() and expected is None:
            raise
        said = f"refused: {' '.join(str(error).split())}"
        cause = f"the checkpoint does not load: {error}"
        findings = (check_hash(expected, _file(name_or_path, here)), Finding("load", "off", said, cause))
        return CheckReport(name_or_path, None if expected is None else expected.name, findings)
    seconds = round(time.perf_counter() - begun, 3)
    report = check_model(
        model,
        expected=expected,
        file=_file(name_or_path, here),
        reference=recorded,
        data=data,
        recall=True if data is not None else None,
        name=name_or_path,
    )
    n_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    said = f"{n_bytes / 1e9:.2f} GB of weights ({dtype}) in {seconds:.1f} seconds"
    loaded = Finding("load", "ok", said, numbers={"seconds": seconds, "weights_bytes": n_bytes})
    return replace(report, findings=(loaded, *report.findings))


def _config(here: Path, expected: Expected | None) -> Any:
    """The catalogue's numbers for a checkpoint of a repository of its own that lies here without its config."""
    entry = PUBLISHED.get(expected.name) if expected is not None else None
    folder = here if here.is_dir() else here.parent
    if not here.exists() or not isinstance(entry, Repository) or (folder / "config.json").exists():
        return None
    return dict(entry.config) or None


def _tokenizer(here: Path, expected: Expected | None) -> Path | None:
    """The tokenizer of the model that a file is claimed to be, if none lies beside it and it is on this machine."""
    folder = here if here.is_dir() else here.parent
    if not here.exists() or expected is None or any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    if expected.name in BUNDLED:
        return bundled_folder()
    if not isinstance(PUBLISHED[expected.name], PublishedFile):
        return None
    try:
        return fetch_tokenizer({"local_files_only": True}, folder)
    except FileNotFoundError:
        return None


def _file(name: str, here: Path) -> Path | None:
    """The one file with the weights, if there is one."""
    if here.is_dir():
        return here / WHOLE if (here / WHOLE).exists() else None
    if here.exists():
        return here
    if name.lower() in BUNDLED:
        return bundled_folder() / f"{name.lower()}.safetensors"
    entry = PUBLISHED.get(name.lower())
    try:
        return fetch_file(entry, {"local_files_only": True}) if isinstance(entry, PublishedFile) else None
    except (FileNotFoundError, ValueError):
        return None
