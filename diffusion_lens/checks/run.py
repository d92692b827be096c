"""Runs all checks of one model. Each relies on the earlier ones: file, config, weights, then the model's outputs."""

import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from diffusion_lens.checks.agreement import check_half_precision, check_padding
from diffusion_lens.checks.composition import Composition, compositions, foreign_parts
from diffusion_lens.checks.diagnosis import diagnose
from diffusion_lens.checks.expected import Expected, check_config, check_hash
from diffusion_lens.checks.facts import check_facts
from diffusion_lens.checks.finding import COMPUTED, CheckReport, Finding
from diffusion_lens.checks.measures import QUIET_SHARE, Measure, PageMeasure, Parts, ReferenceMeasure
from diffusion_lens.checks.page import check_page, page_losses, right_loss
from diffusion_lens.checks.recall import check_recall, open_questions, require_known_words
from diffusion_lens.checks.reference import Reference, check_reference
from diffusion_lens.checks.texts import read_page, texts_for
from diffusion_lens.checks.told_time import at_check_time
from diffusion_lens.checks.weights import check_weights
from diffusion_lens.data.sources import FactSource
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.records import provenance

CHECKS = ("hash", "config", "weights", "reference", "page loss", "facts", "recall", "padding", "bfloat16", "diagnosis")
NO_TOKENIZER = "the model has no tokenizer; name the folder of one with --tokenizer"


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
    run = _CheckRun(model, expected, only)
    with at_check_time(model):
        run.run_all(file, reference, questions, recall)
        described = provenance(model, model.cfg)
    model_name = name or (expected.name if expected else model.cfg.model_name)
    record = {**described, "seconds": run.seconds, "memory_bytes": peak_memory(model)}
    return CheckReport(model_name, expected.name if expected else None, tuple(run.findings), record)


@dataclass
class _CheckRun:
    """State that the checks of one model share.

    Attributes:
        model: Model to check.
        expected: Model that it should be.
        only: Names of the checks to run.
        findings: Findings so far.
        measure: Measure for the diagnosis and its value: the reference's if there is one, otherwise the page's.
        seconds: Time of each check in seconds.
        page: Page in the model's tokens.
        reference: Logits of the original code.
    """

    model: HookedDiffusionTransformer
    expected: Expected | None
    only: Collection[str]
    findings: list[Finding] = field(default_factory=list)
    measure: tuple[Measure, Parts] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    page: Any = None
    reference: Reference | None = None

    @cached_property
    def compositions(self) -> list[Composition]:
        """The composition scores, computed once; for a large network this takes a while."""
        return compositions(self.model)

    def run_all(
        self, file: Path | None, reference: Reference | None, questions: FactSource | None, recall: bool | None
    ) -> None:
        """Run the checks in order; the arguments are those of `check_model`."""
        model, expected = self.model, self.expected
        self.guard("hash", lambda: [check_hash(expected, file)])
        self.guard("config", lambda: [check_config(expected, model.cfg.architecture)])
        self.guard("weights", lambda: [check_weights(model, self.compositions)])
        if reference is not None:
            self.guard("reference", lambda: self.compare(reference))
        if model.tokenizer is None:
            requested = [check for check in ("page loss", "facts", "recall") if check in self.only]
            self.findings += [Finding(check, "not run", NO_TOKENIZER) for check in requested]
        else:
            self.guard("page loss", self.read)
            self.guard("facts", lambda: check_facts(model, texts_for(model)))
            self.guard("recall", lambda: [check_recall(model, expected, questions, recall)])
        self.guard("padding", lambda: [check_padding(model, self.rows()[0])])
        self.guard("bfloat16", lambda: [check_half_precision(model, self.rows()[:2])])
        self.guard("diagnosis", self.diagnose)

    def guard(self, check: str, function: Callable[[], list[Finding]]) -> None:
        """Run a check. If it raises an error, it has failed, and the other checks continue."""
        if check not in self.only:
            return
        start = time.perf_counter()
        try:
            self.findings += function()
        except (ValueError, RuntimeError, IndexError, ArithmeticError) as error:
            self.findings.append(Finding(check, "off", f"failed: {' '.join(str(error).split())}"))
        self.seconds[check] = round(time.perf_counter() - start, 3)

    def read(self) -> list[Finding]:
        """Check the loss on the page."""
        texts = texts_for(self.model)
        self.page = read_page(self.model, texts)
        losses = page_losses(self.model, self.page.ordered)
        right = right_loss(self.expected, self.model.cfg.dtype)
        if self.measure is None:
            self.measure = PageMeasure(self.page.ordered, self.model.cfg.d_vocab_out, right), losses
        return [check_page(self.model, texts, self.page, right, float(losses.sum()))]

    def compare(self, reference: Reference) -> list[Finding]:
        """Compare the model with the original code."""
        self.reference = reference
        distance = reference.distance(self.model)
        self.measure = (
            ReferenceMeasure(reference, reference.tolerance(self.model)),
            ReferenceMeasure.parts(distance),
        )
        return [check_reference(self.model, reference, distance)]

    def rows(self) -> torch.Tensor:
        """Some rows of tokens: from the page, else from the reference, else random."""
        if self.page is not None:
            rows: torch.Tensor = self.page.ordered
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
        return [
            diagnose(
                self.model,
                measure,
                before,
                mask_ids=self._mask_ids(),
                foreign=foreign_parts(self.compositions),
                something_off=off,
                config_known=known,
            )
        ]

    def _mask_ids(self) -> list[int]:
        """Candidates for the id of [MASK], if the model has one."""
        cfg, tokenizer = self.model.cfg, self.model.tokenizer
        if not cfg.has_mask:
            return []
        known = self.expected.architecture if self.expected else None
        candidates = [
            known.mask_token_id if known else None,
            getattr(tokenizer, "mask_token_id", None),
            None if tokenizer is None else len(tokenizer),
            cfg.d_vocab - 1,
            cfg.blank - 1,
            cfg.blank + 1,
        ]
        if self.reference is not None and self.reference.before is not None and self.reference.after is not None:
            candidates += self.reference.before[self.reference.before != self.reference.after].unique().tolist()
        return [candidate for candidate in candidates if candidate is not None]


def peak_memory(model: HookedDiffusionTransformer) -> int | None:
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
