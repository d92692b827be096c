"""`Finding`, the result of one check, and `CheckReport`, which presents all findings as text or strict JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal

from diffusion_lens.records.results import Saved
from diffusion_lens.records.schema import built
from weight_conversion import read_json, restore_numbers, write_json

Outcome = Literal["ok", "off", "noted", "not run"]
KIND = "diffusion_lens check"
WIDTH = 116
# The checks that compare the model's outputs with known ones. The others check files and weights, or compare the model
# with itself.
COMPUTED = ("reference", "page loss", "facts", "facts, one pass", "facts, by the loop", "recall")
UNTESTED = (
    "not tested. Nothing that the model computes was compared with anything: give it a tokenizer (--tokenizer) for the "
    "page and the facts, or logits of the original code (--reference)."
)
SHOWN = 5  # alternatives in the text, best first; the JSON has all


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: Name of the check, such as "page loss".
        outcome: "ok"; "off" if the model is not what it claims to be; "noted" for a measurement without a known value
            to compare with; "not run" for the reason in `said`.
        said: Description of the result.
        likely: Likely cause of a failure; empty if the check cannot determine it.
        numbers: Numbers of the result, for programs.
    """

    check: str
    outcome: Outcome
    said: str
    likely: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckReport(Saved):
    """All findings on one model.

    Attributes:
        model: Name or path of the model, as it was given.
        expected: Name in the catalogue of the model that it should be; `None` without such a claim.
        findings: Findings in the order of the checks.
        record: Model, hash of its weights, dtype, device, versions, seconds, memory.
    """

    KIND = KIND

    model: str
    expected: str | None
    findings: tuple[Finding, ...]
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether no check failed, and the model's outputs were compared with known ones."""
        return not self.off and not self.untested

    @property
    def untested(self) -> bool:
        """Whether checks of the model's outputs were requested, and none of them could run."""
        outcomes = {finding.outcome for finding in self.findings if finding.check in COMPUTED}
        return bool(outcomes) and not outcomes & {"ok", "off"}

    @property
    def off(self) -> tuple[Finding, ...]:
        """The findings of the checks that failed."""
        return tuple(finding for finding in self.findings if finding.outcome == "off")

    @property
    def likely(self) -> tuple[str, ...]:
        """The likely causes without repetition, in the order of the findings."""
        return tuple(dict.fromkeys(finding.likely for finding in self.off if finding.likely))

    def to_text(self) -> str:
        """One line per finding, then the verdict with the likely causes."""
        width = max((len(finding.check) for finding in self.findings), default=0)
        lines = []
        for finding in self.findings:
            head = f"{finding.outcome:<8}{finding.check:<{width}}  "
            lines += wrap(finding.said, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
            if self.off:
                trials = finding.numbers.get("trials", ())[:SHOWN]
                lines += [f"{' ' * len(head)}{trial['score']:>8.3g}  {trial['name']}" for trial in trials]
        if self.record.get("seconds"):
            memory = self.record.get("memory_bytes")
            peak = f", at most {memory / 1e9:.2f} GB of memory" if memory else ""
            lines += ["", f"{sum(self.record['seconds'].values()):.1f} seconds{peak} on {self.record['device']}"]
        claim = f" as {self.expected!r}" if self.expected and self.expected != self.model else ""
        n_ran = sum(finding.outcome in ("ok", "off") for finding in self.findings)
        if self.untested and not self.off:
            return "\n".join([*lines, "", f"{self.model}{claim}: {UNTESTED}"])
        if self.passed:
            return "\n".join([*lines, "", f"{self.model}{claim}: nothing is off in {n_ran} checks."])
        lines += [
            "",
            f"{self.model}{claim}: {len(self.off)} of {n_ran} checks say that something is off. Likely wrong:",
        ]
        for cause in self.likely or ("none of the faults known here explains it; compare with the original code",):
            lines += wrap(cause, WIDTH, initial_indent="- ", subsequent_indent="  ")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, which `weight_conversion.to_json` turns into strict JSON."""
        return {
            "kind": KIND,
            "model": self.model,
            "expected": self.expected,
            "passed": self.passed,
            "likely": list(self.likely),
            "findings": [asdict(finding) for finding in self.findings],
            "record": dict(self.record),
        }

    def save(self, path: str | Path) -> Path:
        """Write strict JSON, to attach to a bug report. A number that is not finite is null and listed apart."""
        target = Path(path)
        write_json(self.to_dict(), target)
        return target

    @classmethod
    def load(cls, path: str | Path) -> "CheckReport":
        """Read a report that `save` wrote.

        Raises:
            ValueError: The file is not such a report.
        """
        content = restore_numbers(read_json(Path(path)))
        if not isinstance(content, Mapping) or content.get("kind") != KIND:
            raise ValueError(f"{path} is not a report of `check`")
        return built(cls, content, str(path))
