"""What a check found, and the report that all of them make: lines for people, strict JSON for a bug report."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal

from weight_conversion import read_json, restore_numbers, write_json

Outcome = Literal["ok", "off", "noted", "not run"]
KIND = "diffusion_lens check"
WIDTH = 116
# The checks that compare what the model computes; the others look at weights, or compare the model with itself.
COMPUTED = ("reference", "page loss", "facts", "facts, one pass", "facts, by the loop", "recall")
UNTESTED = (
    "not tested. Nothing that the model computes was compared with anything: give it a tokenizer (--tokenizer) for the "
    "page and the facts, or logits of the original code (--reference)."
)
SHOWN = 5  # alternatives, the best first; the JSON has all


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: its name, "page loss".
        outcome: "ok"; "off", when the model is not what it says; "noted", a measurement that nothing was held against;
            "not run", for the reason that `said` gives.
        said: what was measured, in words.
        likely: of what is off, the likely cause; empty where the check cannot tell.
        numbers: what was measured, for programs.
    """

    check: str
    outcome: Outcome
    said: str
    likely: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckReport:
    """Every finding on one model.

    Attributes:
        model: its name or path, as it was asked for.
        expected: name in the catalogue of what it should be; `None` where nothing was claimed.
        findings: in the order in which the checks ran.
        record: model, hash of its weights, dtype, device, versions, seconds, memory.
    """

    model: str
    expected: str | None
    findings: tuple[Finding, ...]
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether nothing is off, and what the model computes was compared with something."""
        return not self.off and not self.untested

    @property
    def untested(self) -> bool:
        """Whether the checks of what the model computes were asked for, and none of them could run."""
        outcomes = {finding.outcome for finding in self.findings if finding.check in COMPUTED}
        return bool(outcomes) and not outcomes & {"ok", "off"}

    @property
    def off(self) -> tuple[Finding, ...]:
        """The findings that say something is wrong."""
        return tuple(finding for finding in self.findings if finding.outcome == "off")

    @property
    def likely(self) -> tuple[str, ...]:
        """The likely causes, each once, in the order of the findings."""
        return tuple(dict.fromkeys(finding.likely for finding in self.off if finding.likely))

    def to_text(self) -> str:
        """One line a finding, then the verdict with the likely causes."""
        width = max((len(finding.check) for finding in self.findings), default=0)
        lines = []
        for finding in self.findings:
            head = f"{finding.outcome:<8}{finding.check:<{width}}  "
            lines += wrap(finding.said, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
            if self.off:
                tried = finding.numbers.get("trials", ())[:SHOWN]
                lines += [f"{' ' * len(head)}{trial['score']:>8.3g}  {trial['name']}" for trial in tried]
        if self.record.get("seconds"):
            memory = self.record.get("memory_bytes")
            peak = f", at most {memory / 1e9:.2f} GB of memory" if memory else ""
            lines += ["", f"{sum(self.record['seconds'].values()):.1f} seconds{peak} on {self.record['device']}"]
        as_what = f" as {self.expected!r}" if self.expected and self.expected != self.model else ""
        ran = sum(finding.outcome in ("ok", "off") for finding in self.findings)
        if self.untested and not self.off:
            return "\n".join([*lines, "", f"{self.model}{as_what}: {UNTESTED}"])
        if self.passed:
            return "\n".join([*lines, "", f"{self.model}{as_what}: nothing is off in {ran} checks."])
        lines += [
            "",
            f"{self.model}{as_what}: {len(self.off)} of {ran} checks say that something is off. Likely wrong:",
        ]
        for cause in self.likely or ("none of the faults known here explains it; compare with the original code",):
            lines += wrap(cause, WIDTH, initial_indent="- ", subsequent_indent="  ")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `weight_conversion.to_json` makes strict JSON of it."""
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
        """Write strict JSON, to attach to a bug report; a number that is not finite is null, with its reason."""
        target = Path(path)
        write_json(self.to_dict(), target)
        return target

    @classmethod
    def load(cls, path: str | Path) -> "CheckReport":
        """Read what `save` wrote.

        Raises:
            ValueError: another file.
        """
        told = restore_numbers(read_json(Path(path)))
        if not isinstance(told, Mapping) or told.get("kind") != KIND:
            raise ValueError(f"{path} is no report of `check`")
        findings = tuple(Finding(**finding) for finding in told["findings"])
        return cls(told["model"], told["expected"], findings, told["record"])
