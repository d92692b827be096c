"""Facts of the real world: those that models know, those that editors rewrite, and those asked back.

    known_1000     ROME's facts that GPT-2 XL completes rightly, traced there (Meng et al. 2022, arXiv 2202.05262)
    counterfact    ROME's requests to write a false object, with probes of what else changes (section 3.2, appendix D)
    bake           requests of the same form, each with the question asked the other way round, from the new object to
                   the subject (Ma et al. 2023, "Untying the Reversal Curse", arXiv 2310.10322)

Each is one JSON file, read from a path or fetched into the cache. An answer begins with a space, as ROME's code writes
it; spaces that end a prompt are dropped, so that the answer's is the only one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffusion_lens.data.download import fetch_from_hub, fetch_from_web
from diffusion_lens.data.template_spans import fact_about
from diffusion_lens.facts import Fact, Probe
from diffusion_lens.model.transformer import DiffusionTransformer
from weight_conversion import read_json

ROME_HOST = "https://rome.baulab.info/data/dsets"
KNOWN_FACTS = 1209
BAKE_REPO = "jym7/BAKE"
BAKE_REVISION = "main"  # the data set's commit is not known to us


@dataclass(frozen=True)
class EditRequest:
    """A false object to write, and what to ask when it is written.

    Attributes:
        true: the request's prompt with the object of the real world.
        new: the same prompt with the object to write.
        paraphrases: other words for the request, after text that has nothing to do with it; the new object answers.
        neighbours: other subjects that share the true object, which is to stay. The data do not mark these subjects:
            the whole prompt stands for them.
        reverse: asked from the new object, the request's subject answers; None where the data set asks no such thing.
        reverse_true: the same question with the answer of the real world, where the data set gives one.
    """

    true: Fact
    new: Fact
    paraphrases: tuple[Fact, ...]
    neighbours: tuple[Fact, ...]
    reverse: Fact | None = None
    reverse_true: Fact | None = None

    @property
    def id(self) -> str:
        """Data set and case, "counterfact-12"."""
        return self.new.id

    def probes(self, model: DiffusionTransformer) -> dict[str, list[Probe]]:
        """What `edit_success` asks: the new object against the true one, for neighbours the true against the new.

        Each answer stands on a canvas with as many places as it has tokens.
        """
        asked: dict[str, list[tuple[Fact, Fact | None]]] = {
            "efficacy": [(self.new, self.true)],
            "paraphrase": [(fact, replace(fact, answer=self.true.answer)) for fact in self.paraphrases],
            "neighbourhood": [(fact, replace(fact, answer=self.new.answer)) for fact in self.neighbours],
            "reverse": [(self.reverse, self.reverse_true)] if self.reverse else [],
        }
        return {
            group: [Probe(fact.to_query(model), rival.to_query(model) if rival else None) for fact, rival in pairs]
            for group, pairs in asked.items()
            if pairs
        }


def known_1000(path: str | Path | None = None, *, progress: bool = False) -> list[Fact]:
    """The facts of ROME's causal traces: `KNOWN_FACTS` of them, whatever the name.

    A prompt is a template with its subject and, where GPT-2 XL went on with other words before the answer, these.

    Args:
        path: a copy of `known_1000.json`; fetched from rome.baulab.info if None.
        progress: show the download.

    Raises:
        FileNotFoundError: no such file, or it cannot be fetched.
        ValueError: a file that is not of the form, with the record that is not.
    """
    facts: list[Fact] = []
    for where, record in _records(path, "known_1000.json", "known_1000", progress):
        subject, template = _text(record, where, "subject"), _text(record, where, "template")
        prompt = _text(record, where, "prompt").rstrip()
        # A name may come again in the words that follow; the template says where it stands.
        start = prompt.find(subject, max(template.find("{}"), 0))
        if start < 0 and (start := prompt.find(subject)) < 0:
            raise ValueError(f"{where}: the subject {subject!r} is not in the prompt {prompt!r}")
        answer = _answer(record, where, "attribute")
        number = record.get("known_id", len(facts))
        facts.append(fact_about((start, start + len(subject)), prompt, answer, id=f"known-{number}"))
    return facts


def counterfact(path: str | Path | None = None, *, progress: bool = False) -> list[EditRequest]:
    """The 21,919 requests of CounterFact (45 MB).

    The form is that of ROME's code, `dsets/counterfact.py`; the whole file was not at hand when this was written.

    Args:
        path: a copy of `counterfact.json`; fetched from rome.baulab.info if None.
        progress: show the download.

    Raises:
        FileNotFoundError, ValueError: as `known_1000`.
    """
    records = _records(path, "counterfact.json", "counterfact", progress)
    return [_request(record, where, "counterfact", i) for i, (where, record) in enumerate(records)]


def bake(path: str | Path | None = None, *, progress: bool = False) -> list[EditRequest]:
    """The requests of BAKE-Q&J, each with its reverse question.

    The form is that of the authors' evaluation code (`mjy1111/BAKE`, `bir.py`); the file itself was not at hand, so a
    request without a reverse question, or without a true answer to it, is taken as it is. Nor is the commit fixed: what
    is fetched is the newest `BAKE_qa.json` of the hub's data set `jym7/BAKE` (Apache 2.0).

    Args:
        path: a copy of `BAKE_qa.json`; fetched if None. `BAKE_judge.json` is read too, without its reverse judgements.
        progress: show the download.

    Raises:
        FileNotFoundError, ValueError: as `known_1000`.
    """
    if path is None:
        by_hand = "pass its path: bake('BAKE_qa.json')"
        path = fetch_from_hub(BAKE_REPO, "BAKE_qa.json", revision=BAKE_REVISION, by_hand=by_hand, progress=progress)
    return [_request(record, where, "bake", i) for i, (where, record) in enumerate(_read(Path(path)))]


def _request(record: Mapping[str, Any], where: str, data_set: str, position: int) -> EditRequest:
    name = f"{data_set}-{record.get('case_id', position)}"
    subject = _text(record, where, "requested_rewrite", "subject")
    template = _text(record, where, "requested_rewrite", "prompt")
    start = template.find("{}")
    if start < 0:
        raise ValueError(f"{where}: the request {template!r} has no place {{}} for its subject")
    prompt, span = template.replace("{}", subject).rstrip(), (start, start + len(subject))
    true, new = (_answer(record, where, "requested_rewrite", key, "str") for key in ("target_true", "target_new"))
    neighbours = _texts(record, where, "neighborhood_prompts")
    paraphrases = _texts(record, where, "paraphrase_prompts")
    reverse, reverse_true = _reverse(record, where, name, new.strip()) if "reverse_qa" in record else (None, None)
    return EditRequest(
        true=fact_about(span, prompt, true, id=f"{name}-true"),
        new=fact_about(span, prompt, new, id=name),
        paraphrases=tuple(_ask(p, subject, new, f"{name}-paraphrase-{i}") for i, p in enumerate(paraphrases)),
        neighbours=tuple(_ask(p, p, true, f"{name}-neighbour-{i}") for i, p in enumerate(neighbours)),
        reverse=reverse,
        reverse_true=reverse_true,
    )


def _reverse(record: Mapping[str, Any], where: str, name: str, new: str) -> tuple[Fact, Fact | None]:
    prompt = _text(record, where, "reverse_qa", "prompt")
    asked = _ask(prompt, new, _answer(record, where, "reverse_qa", "target_new", "str"), f"{name}-reverse")
    if "target_true" not in record["reverse_qa"]:
        return asked, None
    true = _answer(record, where, "reverse_qa", "target_true", "str")
    return asked, replace(asked, answer=true, id=f"{name}-reverse-true")


def _ask(prompt: str, subject: str, answer: str, name: str) -> Fact:
    """A question whose subject is its last mention, or the whole prompt where there is none."""
    prompt, subject = prompt.rstrip(), subject.rstrip()
    start = prompt.rfind(subject)
    return fact_about((start, start + len(subject)) if start >= 0 else (0, len(prompt)), prompt, answer, id=name)


def _records(
    path: str | Path | None, file: str, function: str, progress: bool
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path is None:
        by_hand = f"pass its path: {function}('{file}')"
        path = fetch_from_web(f"{ROME_HOST}/{file}", by_hand=by_hand, progress=progress)
    return _read(Path(path))


def _read(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each record, and how to name it in an error."""
    path = path.expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    records = read_json(path)
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path} is no list of records")
    return ((f"{path}, record {i}", record) for i, record in enumerate(records))


def _field(record: Mapping[str, Any], where: str, *keys: str) -> Any:
    value: Any = record
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"{where} has no {'.'.join(keys)}; it has {', '.join(record)}")
        value = value[key]
    return value


def _text(record: Mapping[str, Any], where: str, *keys: str) -> str:
    value = _field(record, where, *keys)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {'.'.join(keys)} is {value!r}, not text")
    return value


def _texts(record: Mapping[str, Any], where: str, key: str) -> list[str]:
    value = _field(record, where, key)
    if not isinstance(value, list) or not all(isinstance(text, str) and text.strip() for text in value):
        raise ValueError(f"{where}: {key} is {value!r:.80}, not a list of texts")
    return value


def _answer(record: Mapping[str, Any], where: str, *keys: str) -> str:
    return f" {_text(record, where, *keys).strip()}"
