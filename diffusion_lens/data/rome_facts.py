"""Facts of the real world: known facts, requests to edit facts, and reverse questions.

    known_1000     facts that GPT-2 XL completes correctly, which ROME traces (Meng et al. 2022, arXiv 2202.05262)
    counterfact    ROME's requests to write a false object, with probes of side effects (section 3.2, appendix D)
    bake           requests of the same form, each with the reverse question from the new object to the subject
                   (Ma et al. 2023, "Untying the Reversal Curse", arXiv 2310.10322)

Each is one JSON file, which is read from a path or downloaded into the cache. An answer begins with a space, as in
ROME's code. Spaces at the end of a prompt are removed, so that there is only one space before the answer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffusion_lens.data.download import fetch_from_hub, fetch_from_web
from diffusion_lens.data.reversal_curse import fact_about
from diffusion_lens.facts.fact import Fact, Probe, Query
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import checked_arguments
from weight_conversion import read_json

ROME_HOST = "https://rome.baulab.info/data/dsets"
KNOWN_FACTS = 1209
BAKE_REPO = "jym7/BAKE"
BAKE_REVISION = "main"  # We do not know the commit of the published data set.


@dataclass(frozen=True)
class EditRequest:
    """A request to write a false object, with the questions that test the edit, where the data set has them.

    Attributes:
        true: Prompt of the request with the true object as its answer.
        new: The same prompt with the object to write as its answer.
        paraphrases: Paraphrases of the prompt after unrelated text, with the new object as their answer.
        neighbours: Prompts about other subjects that share the true object, which should not change. ROME's data do not
            mark these subjects, so the subject of each fact is its whole prompt.
        reverse: Question from the new object to the subject.
        reverse_true: The same question with the true answer.
        reverse_old: Question from the true object to the subject, which it has before the edit.
        sharing_a_name: Prompts of the same relation about other subjects that share a word with the subject, each with
            its own object, which should not change.
        other_relations: Prompts about other attributes of the subject, which should not change.
    """

    true: Fact
    new: Fact
    paraphrases: tuple[Fact, ...]
    neighbours: tuple[Fact, ...]
    reverse: Fact | None = None
    reverse_true: Fact | None = None
    reverse_old: Fact | None = None
    sharing_a_name: tuple[Fact, ...] = ()
    other_relations: tuple[Fact, ...] = ()

    @property
    def id(self) -> str:
        """Name of the data set and number of the case, such as "counterfact-12"."""
        return self.new.id

    def probes(
        self, model: DiffusionTransformer, lay_out: Callable[[Fact], Query] | None = None
    ) -> dict[str, list[Probe]]:
        """The probes of `edit_success`: the new object against the true one, for neighbours the true against the new.

        The groups shared_name, other_relations and reverse_old have no rivals: there the model has to prefer the
        subject's own answer to all other tokens. `lay_out` puts a fact on the model's canvas, by default `to_query`.
        """
        place = lay_out or (lambda fact: fact.to_query(model))
        pairs_by_group: dict[str, list[tuple[Fact, Fact | None]]] = {
            "efficacy": [(self.new, self.true)],
            "paraphrase": [(fact, replace(fact, answer=self.true.answer)) for fact in self.paraphrases],
            "neighbourhood": [(fact, replace(fact, answer=self.new.answer)) for fact in self.neighbours],
            "shared_name": [(fact, None) for fact in self.sharing_a_name],
            "other_relations": [(fact, None) for fact in self.other_relations],
            "reverse": [(self.reverse, self.reverse_true)] if self.reverse else [],
            "reverse_old": [(self.reverse_old, None)] if self.reverse_old else [],
        }
        return {
            group: [Probe(place(fact), place(rival) if rival else None) for fact, rival in pairs]
            for group, pairs in pairs_by_group.items()
            if pairs
        }


@checked_arguments
def known_1000(path: str | Path | None = None) -> list[Fact]:
    """The facts of ROME's causal traces. Despite the name there are `KNOWN_FACTS` of them.

    A prompt is a template filled with its subject, followed by the words that GPT-2 XL wrote before the answer, if any.

    Args:
        path: Path of a copy of `known_1000.json`. `None` downloads it from rome.baulab.info.

    Raises:
        FileNotFoundError: The file does not exist or cannot be downloaded.
        ValueError: A record does not have the expected form; the message names it.
    """
    facts: list[Fact] = []
    for where, record in _records(path, "known_1000.json", "known_1000"):
        subject, template = _text(record, where, "subject"), _text(record, where, "template")
        prompt = _text(record, where, "prompt").rstrip()
        # The subject may occur again after its slot. The template gives the position of the slot.
        start = prompt.find(subject, max(template.find("{}"), 0))
        if start < 0 and (start := prompt.find(subject)) < 0:
            raise ValueError(f"{where}: the subject {subject!r} is not in the prompt {prompt!r}")
        answer = _answer(record, where, "attribute")
        number = record.get("known_id", len(facts))
        facts.append(fact_about((start, start + len(subject)), prompt, answer, id=f"known-{number}"))
    return facts


@checked_arguments
def counterfact(path: str | Path | None = None) -> list[EditRequest]:
    """The 21,919 requests of `counterfact.json` (45 MB); arguments and errors as in `known_1000`.

    The format follows ROME's code, `dsets/counterfact.py`. This reader was not tested on the complete file.
    """
    records = enumerate(_records(path, "counterfact.json", "counterfact"))
    return [_request(record, where, f"counterfact-{record.get('case_id', i)}") for i, (where, record) in records]


@checked_arguments
def bake(path: str | Path | None = None) -> list[EditRequest]:
    """The requests of BAKE-Q&J, each with its reverse question; arguments and errors as in `known_1000`.

    The file is a copy of `BAKE_qa.json`, or of `BAKE_judge.json`, whose reverse judgements are ignored. The format
    follows the authors' evaluation code (`mjy1111/BAKE`, `bir.py`). This reader was not tested on the published file,
    so it accepts requests without a reverse question, or without a true answer to it. The commit is not fixed: the
    newest `BAKE_qa.json` of the hub's data set `jym7/BAKE` (Apache 2.0) is downloaded.
    """
    if path is None:
        by_hand = "pass its path: bake('BAKE_qa.json')"
        path = fetch_from_hub(BAKE_REPO, "BAKE_qa.json", revision=BAKE_REVISION, by_hand=by_hand)
    records = enumerate(_read(Path(path)))
    return [_request(record, where, f"bake-{record.get('case_id', i)}") for i, (where, record) in records]


def _request(record: Mapping[str, Any], where: str, name: str) -> EditRequest:
    subject = _text(record, where, "requested_rewrite", "subject")
    template = _text(record, where, "requested_rewrite", "prompt")
    start = template.find("{}")
    if start < 0:
        raise ValueError(f"{where}: the request {template!r} has no slot {{}} for its subject")
    prompt, span = template.replace("{}", subject).rstrip(), (start, start + len(subject))
    true, new = (_answer(record, where, "requested_rewrite", key, "str") for key in ("target_true", "target_new"))
    neighbours = _texts(record, where, "neighborhood_prompts")
    paraphrases = _texts(record, where, "paraphrase_prompts")
    reverse = reverse_true = None
    if "reverse_qa" in record:
        prompt_of_reverse = _text(record, where, "reverse_qa", "prompt")
        answer = _answer(record, where, "reverse_qa", "target_new", "str")
        reverse = _question(prompt_of_reverse, new.strip(), answer, f"{name}-reverse")
        if "target_true" in record["reverse_qa"]:
            answer = _answer(record, where, "reverse_qa", "target_true", "str")
            reverse_true = replace(reverse, answer=answer, id=f"{name}-reverse-true")
    return EditRequest(
        true=fact_about(span, prompt, true, id=f"{name}-true"),
        new=fact_about(span, prompt, new, id=name),
        paraphrases=tuple(_question(p, subject, new, f"{name}-paraphrase-{i}") for i, p in enumerate(paraphrases)),
        neighbours=tuple(_question(p, p, true, f"{name}-neighbour-{i}") for i, p in enumerate(neighbours)),
        reverse=reverse,
        reverse_true=reverse_true,
    )


def _question(prompt: str, subject: str, answer: str, name: str) -> Fact:
    """A fact whose subject span is the last mention of the subject, or the whole prompt if there is no mention."""
    prompt, subject = prompt.rstrip(), subject.rstrip()
    start = prompt.rfind(subject)
    return fact_about((start, start + len(subject)) if start >= 0 else (0, len(prompt)), prompt, answer, id=name)


def _records(path: str | Path | None, file: str, function: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path is None:
        by_hand = f"pass its path: {function}('{file}')"
        path = fetch_from_web(f"{ROME_HOST}/{file}", by_hand=by_hand)
    return _read(Path(path))


def _read(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each record with its name for error messages."""
    path = path.expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    records = read_json(path)
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path} is not a list of records")
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
