"""Runs all checks of one model: of one that is loaded (`check_model`), or of a checkpoint (`check_checkpoint`).

Each check relies on the earlier ones: file, config, weights, then the model's outputs. A checkpoint that does not load
is a finding; an unknown name is an error.
"""

import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from diffusion_lens.checks.diagnosis import QUIET_SHARE, Measure, PageMeasure, Parts, ReferenceMeasure, Search, diagnose
from diffusion_lens.checks.reference import (
    Reference,
    at_check_time,
    check_half_precision,
    check_padding,
    check_reference,
)
from diffusion_lens.checks.report import COMPUTED, CheckReport, Finding
from diffusion_lens.checks.texts import (
    Page,
    check_facts,
    check_page,
    check_recall,
    open_questions,
    page_losses,
    read_page,
    require_known_words,
    right_loss,
    texts_for,
)
from diffusion_lens.checks.weights import (
    Composition,
    Expected,
    check_config,
    check_hash,
    check_weights,
    compositions,
    foreign_parts,
)
from diffusion_lens.data.fact_files import FactSource
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.loading import TOKENIZER_FILES
from diffusion_lens.loading.catalogue import BUNDLED, PUBLISHED, REPOSITORIES, PublishedFile, Repository
from diffusion_lens.loading.gguf import GGUF, packaged_file
from diffusion_lens.loading.hub import fetch_file, fetch_tokenizer
from diffusion_lens.loading.source import given_options
from diffusion_lens.model.config import as_device
from diffusion_lens.records.results import provenance
from diffusion_lens.settings import checked_arguments
from weight_conversion.files import WHOLE

CHECKS = ("hash", "config", "weights", "reference", "page loss", "facts", "recall", "padding", "bfloat16", "diagnosis")
OF_TEXTS = ("page loss", "facts", "recall")
OF_WHOLE_TEXTS = ("page loss", "facts", "padding", "bfloat16", "diagnosis")
NO_TOKENIZER = "the model has no tokenizer; name the folder of one with --tokenizer"
NO_CANVAS = "a text does not say where the open canvas begins, which this model reads unlike the context before it"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@checked_arguments
def check_model(
    model: HookedDiffusionTransformer,
    *,
    expected: Expected | None = None,
    file: Path | None = None,
    reference: Reference | None = None,
    data: str | None = None,
    recall: bool | None = None,
    name: str | None = None,
    only: Collection[str] = CHECKS,
) -> CheckReport:
    """Check whether a model is what it claims to be. The model is not changed.

    Args:
        model: Model to check.
        expected: Model that it should be, such as `Expected.of("smdm-1028m")`.
        file: File of its weights, for the hash.
        reference: Logits of the original code.
        data: Data set or file with facts of the reversal curse, as for `open_source`.
        recall: Whether recall is measured; by default, if the expected model was tuned on these facts.
        name: Name of the model in the report.
        only: Checks to run, a subset of `CHECKS`. The diagnosis explains failures of the other checks that run.

    Raises:
        ValueError: The reference or the data do not fit the model, the data contain no such facts, or a check is
            unknown.
        FileNotFoundError: The data are not on this machine and cannot be fetched.
    """
    if unknown := sorted(set(only) - set(CHECKS)):
        raise ValueError(f"there is no check {unknown[0]!r}; the checks are {', '.join(CHECKS)}")
    if reference is not None:
        reference.check_fits(model.cfg.architecture)
    questions = None if data is None else open_questions(data)
    if questions is not None and model.tokenizer is not None:
        require_known_words(model, questions)
    run = _CheckRun(model, expected, only, reference)
    with at_check_time(model):
        run.run_all(file, questions, recall)
        described = provenance(model, model.cfg)
    model_name = name or (expected.name if expected else model.cfg.model_name)
    record = {**described, "seconds": run.seconds, "memory_bytes": _peak_memory(model)}
    return CheckReport(model_name, expected.name if expected else None, tuple(run.findings), record)


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
    ignore_config_keys: Sequence[str] | None = None,
) -> CheckReport:
    """Load a checkpoint and check whether it is what it claims to be.

    Args:
        name_or_path: Argument of `from_pretrained`.
        claimed: Name in the catalogue of the model that it should be; by default `name_or_path` if it is such a name.
        reference: File with the original code's logits.
        data: Data set or file with facts of the reversal curse.
        config, tokenizer, device, dtype: Arguments of `from_pretrained`. The tokenizer of the claimed model is used if
            there is none beside the checkpoint.
        mode, block_size, mask_token_id, ignore_config_keys: Arguments of `from_pretrained`. The catalogue's config is
            that of the mode.

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
    file = _file(name_or_path, path)
    known_config, known_tokenizer = _missing_parts(path, expected)

    # 2. Load it; if it is refused, report the reason and the hash of its file.
    start = time.perf_counter()
    try:
        model = HookedDiffusionTransformer.from_pretrained(
            name_or_path,
            config=config or known_config,
            tokenizer=tokenizer or known_tokenizer,
            device=resolved_device,
            dtype=DTYPES[dtype],
            **given_options(mode, block_size, mask_token_id, ignore_config_keys),
        )
    except ValueError as error:
        if not path.exists() and expected is None:
            raise
        said = f"refused: {' '.join(str(error).split())}"
        cause = f"the checkpoint does not load: {error}"
        findings = (check_hash(expected, file), Finding("load", "off", said, cause))
        return CheckReport(name_or_path, None if expected is None else expected.name, findings)

    # 3. Check the loaded model.
    seconds = round(time.perf_counter() - start, 3)
    report = check_model(
        model,
        expected=expected,
        file=file,
        reference=loaded_reference,
        data=data,
        recall=None if data is None else True,
        name=name_or_path,
    )
    n_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    said = f"{n_bytes / 1e9:.2f} GB of weights ({dtype}) in {seconds:.1f} seconds"
    loaded = Finding("load", "ok", said, numbers={"seconds": seconds, "weights_bytes": n_bytes})
    return replace(report, findings=(loaded, *report.findings))


@dataclass
class _CheckRun:
    """State that the checks of one model share; `measure` is the reference's if there is one, otherwise the page's."""

    model: HookedDiffusionTransformer
    expected: Expected | None
    only: Collection[str]
    reference: Reference | None
    findings: list[Finding] = field(default_factory=list)
    measure: tuple[Measure, Parts] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    page: Page | None = None

    @cached_property
    def compositions(self) -> list[Composition]:
        """The composition scores, computed once; for a large network this takes a while."""
        return compositions(self.model)

    def run_all(self, file: Path | None, questions: FactSource | None, recall: bool | None) -> None:
        """Run the checks. One that raises an error has failed, and the others continue."""
        model, expected = self.model, self.expected
        checks: dict[str, Callable[[], list[Finding]]] = {
            "hash": lambda: [check_hash(expected, file)],
            "config": lambda: [check_config(expected, model.cfg.architecture)],
            "weights": lambda: [check_weights(model, self.compositions)],
            "reference": self.compare,
            "page loss": self.read,
            "facts": lambda: check_facts(model, texts_for(model)),
            "recall": lambda: [check_recall(model, expected, questions, recall)],
            "padding": lambda: [check_padding(model, self.rows()[0])],
            "bfloat16": lambda: [check_half_precision(model, self.rows()[:2])],
            "diagnosis": self.diagnose,
        }
        for check, function in checks.items():
            if check not in self.only or (check == "reference" and self.reference is None):
                continue
            if check in OF_TEXTS and model.tokenizer is None:
                self.findings.append(Finding(check, "not run", NO_TOKENIZER))
                continue
            if check in OF_WHOLE_TEXTS and model.cfg.self_conditioning:
                self.findings.append(Finding(check, "not run", NO_CANVAS))
                continue
            start = time.perf_counter()
            try:
                self.findings += function()
            except (ValueError, RuntimeError, IndexError, ArithmeticError) as error:
                self.findings.append(Finding(check, "off", f"failed: {' '.join(str(error).split())}"))
            self.seconds[check] = round(time.perf_counter() - start, 3)

    def read(self) -> list[Finding]:
        texts = texts_for(self.model)
        self.page = read_page(self.model, texts)
        losses = page_losses(self.model, self.page.ordered)
        right = right_loss(self.expected, self.model.cfg.dtype)
        if self.measure is None:
            self.measure = PageMeasure(self.page.ordered, self.model.cfg.d_vocab_out, right), losses
        return [check_page(self.model, texts, self.page, right, float(losses.sum()))]

    def compare(self) -> list[Finding]:
        reference = self.reference
        assert reference is not None
        distance = reference.distance(self.model)
        measure = ReferenceMeasure(reference, reference.tolerance(self.model))
        self.measure = measure, measure.parts(distance)
        return [check_reference(self.model, reference, distance)]

    def rows(self) -> torch.Tensor:
        """Some rows of tokens: from the page, else from the reference, else random."""
        if self.page is not None:
            rows = self.page.ordered
        elif self.reference is not None and self.reference.attention_mask is None:
            rows = self.reference.tokens
        else:
            n_pos = min(32, self.model.cfg.n_ctx - 8)
            generator = torch.Generator().manual_seed(0)
            rows = torch.randint(self.model.cfg.d_vocab_out, (2, n_pos), generator=generator)
        return rows.to(self.model.cfg.device)

    def diagnose(self) -> list[Finding]:
        """Try likely mistakes; if a check failed, also mistakes in single parts of the model."""
        if self.measure is None:
            return [Finding("diagnosis", "not run", "there is nothing to measure: neither a tokenizer nor a reference")]
        measure, before = self.measure
        off = any(finding.outcome == "off" and finding.check in COMPUTED for finding in self.findings)
        if not off and isinstance(measure, ReferenceMeasure):
            return [Finding("diagnosis", "not run", "nothing to explain")]
        if not off and isinstance(measure, PageMeasure):
            measure = replace(measure, share=QUIET_SHARE)
        known = any(finding.check == "config" and finding.outcome == "ok" for finding in self.findings)
        foreign = foreign_parts(self.compositions)
        search = Search(self.model, measure, before)
        return [diagnose(search, self.mask_ids(), foreign, off=off, config_known=known)]

    def mask_ids(self) -> list[int]:
        """Candidates for the id of [MASK], if the model has one."""
        cfg, tokenizer = self.model.cfg, self.model.tokenizer
        if not cfg.has_mask:
            return []
        candidates = [
            None if self.expected is None else getattr(self.expected.architecture, "mask_token_id", None),
            getattr(tokenizer, "mask_token_id", None),
            None if tokenizer is None else len(tokenizer),
            cfg.d_vocab - 1,
            cfg.blank - 1,
            cfg.blank + 1,
        ]
        if (given := self.reference) is not None and given.before is not None and given.after is not None:
            candidates += given.before[given.before != given.after].unique().tolist()
        return [candidate for candidate in candidates if candidate is not None]


def _peak_memory(model: HookedDiffusionTransformer) -> int | None:
    """Peak memory in bytes, of the GPU or otherwise of the process; `None` if it is unknown."""
    device = torch.device(model.cfg.device or "cpu")
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows does not have this module
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def _missing_parts(path: Path, expected: Expected | None) -> tuple[Any, Path | None]:
    """Config and tokenizer of the claimed model for a local checkpoint that has none beside it. The config is that of a
    `Repository` in the catalogue, and the tokenizer one that is on this machine."""
    if expected is None or not path.exists() or path.suffix == GGUF:
        return None, None
    folder = path if path.is_dir() else path.parent
    entry, bundled = PUBLISHED.get(expected.name), BUNDLED.get(expected.name)
    config = None
    if isinstance(entry, Repository) and not (folder / "config.json").exists():
        config = dict(entry.config)
    if any((folder / name).exists() for name in TOKENIZER_FILES):
        return config, None
    if bundled is not None or not isinstance(entry, PublishedFile):
        return config, None if bundled is None else bundled.folder
    try:
        return config, fetch_tokenizer({"local_files_only": True}, folder)
    except FileNotFoundError:
        return config, None


def _file(name: str, path: Path) -> Path | None:
    """The file with the weights, if they are a single file."""
    if path.is_dir():
        return path / WHOLE if (path / WHOLE).exists() else None
    if path.exists():
        return path
    if bundled := BUNDLED.get(name.lower()):
        return bundled.path
    if packaged := packaged_file(name):
        return packaged
    entry = PUBLISHED.get(name.lower())
    try:
        return fetch_file(entry, {"local_files_only": True}) if isinstance(entry, PublishedFile) else None
    except (FileNotFoundError, ValueError):
        return None
