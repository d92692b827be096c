"""The facts of the study, and what is asked about them: forward, in reverse, in other words, and as requests to edit.

A file of facts is JSON: `facts`, rows as in ROME's `known_1000.json`, with `relation_id`, and with `held_out` true if
the subject was held out from the twin's training; and `relations` by id, each with sentences in which {} stands for the
subject and then for the attribute:

    statement     "The capital of {} is {}"
    reverse       "The city of {} is the capital of", which the subject completes
    paraphrases   "{} has its capital in", which the attribute completes

A fact without one of these relations is recalled and traced only.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffusion_lens.data import known_1000
from diffusion_lens.data.rome_facts import EditRequest
from diffusion_lens.facts.fact import Fact
from diffusion_lens.model.transformer import DiffusionTransformer
from weight_conversion import read_json, write_json

SHIPPED = Path(__file__).with_name("facts.json")
NEIGHBOURS = 4  # of each edit


@dataclass(frozen=True)
class Relation:
    """The sentences of a relation."""

    name: str
    statement: str
    reverse: str
    paraphrases: tuple[str, ...]

    def forward(self, subject: str) -> str:
        """The statement up to the attribute."""
        return self.statement.format(subject, "\n").split("\n")[0].rstrip()


@dataclass(frozen=True)
class Questions:
    """The facts of a file.

    Attributes:
        facts: The facts as ROME asks them. Each names its subject as its person, and its attribute as its description.
        relations: Relations by id.
        relation_of: Id of the relation of each fact that has one, by the fact's id.
        held_out: Ids of the facts whose subject the twin's training did not name.
    """

    facts: list[Fact]
    relations: dict[str, Relation]
    relation_of: dict[str, str]
    held_out: frozenset[str]

    @classmethod
    def read(cls, path: str | Path, scratch: Path, limit: int = 0) -> "Questions":
        """The questions of a file, or `limit` of them; `scratch` is a folder for a copy of its rows.

        Raises:
            ValueError: The file has no relations, or no fact that is held out.
        """
        content: Any = read_json(Path(path))
        if not isinstance(content, dict) or not content.get("relations") or not content.get("facts"):
            raise ValueError(f'{path} has not {{"facts": [...], "relations": {{...}}}} as {SHIPPED} has')
        n_read = min(limit or len(content["facts"]), len(content["facts"]))
        chosen = [content["facts"][i * len(content["facts"]) // n_read] for i in range(n_read)]
        write_json(chosen, scratch / "known.json")
        rows = dict(zip(known_1000(scratch / "known.json"), chosen, strict=True))
        relations = {
            name: Relation(**{**given, "paraphrases": tuple(given["paraphrases"])})
            for name, given in content["relations"].items()
        }
        named = {fact.id: row["relation_id"] for fact, row in rows.items() if row.get("relation_id") in relations}
        held_out = frozenset(fact.id for fact, row in rows.items() if row.get("held_out", False))
        if not held_out:
            raise ValueError(
                f'no fact of {path} has "held_out": true, and the study is about facts held out from adapt'
            )
        facts = [
            replace(fact, person=fact.subject, description=row["attribute"], asked="p2d") for fact, row in rows.items()
        ]
        return cls(facts, relations, named, held_out)

    def by_relation(self, ids: set[str]) -> dict[str, list[Fact]]:
        """The facts with these ids that have a relation, by its id."""
        found: dict[str, list[Fact]] = defaultdict(list)
        for fact in self.facts:
            if fact.id in ids and fact.id in self.relation_of:
                found[self.relation_of[fact.id]].append(fact)
        return dict(found)

    def forward(self, fact: Fact) -> Fact:
        """The fact in its relation's own sentence."""
        prompt = self.relations[self.relation_of[fact.id]].forward(fact.subject)
        return replace(fact, prompt=prompt, template="", subject_start=None)

    def reverse(self, fact: Fact, attribute: str | None = None) -> Fact:
        """The question from the attribute, or from another one, to the subject."""
        named = attribute or fact.description
        prompt = self.relations[self.relation_of[fact.id]].reverse.format(named)
        asked = replace(fact, id=f"{fact.id}-reverse", prompt=prompt, template="", asked="d2p")
        return replace(asked, subject=named, subject_start=None, answer=f" {fact.subject}")

    def in_both_directions(self, ids: set[str], most: int) -> list[tuple[Fact, Fact]]:
        """Facts forward and in reverse, each with an attribute of its own, from all relations in turn."""
        queues = [list({fact.description: fact for fact in same}.values()) for same in self.by_relation(ids).values()]
        return [(fact, self.reverse(fact)) for fact in in_turn(queues)[:most]]

    def edits(self, model: DiffusionTransformer, ids: set[str], most: int) -> list[EditRequest]:
        """Requests to give a subject the attribute of another, from all relations in turn; answers have one token."""
        requests = [
            [request for i in range(len(same)) if (request := self._edit(model, same, i))]
            for same in self.by_relation(ids).values()
        ]
        return in_turn(requests)[:most]

    def _edit(self, model: DiffusionTransformer, same: list[Fact], i: int) -> EditRequest | None:
        """The request about one fact of a relation, if the relation has another attribute."""
        own = same[i]
        others = [fact for fact in (*same[i + 1 :], *same[:i]) if fact.description != own.description]
        if not others:
            return None
        given = others[0]  # its attribute becomes that of `own`
        true = first_token(model, own)
        new = replace(true, answer=first_token(model, given).answer, id=f"{own.id}-edit")
        relation = self.relations[self.relation_of[own.id]]
        unchanged = [fact for fact in same if fact is not own and fact.description != given.description]
        # ROME's neighbours share the true attribute; others of the relation follow where these are few.
        unchanged.sort(key=lambda fact: fact.description != own.description)
        asked = first_token(model, self.reverse(own, given.description))
        sentences = (relation.forward(own.subject), *(each.format(own.subject) for each in relation.paraphrases))
        return EditRequest(
            true=true,
            new=new,
            paraphrases=tuple(
                replace(new, prompt=prompt, template="", subject_start=None, id=f"{new.id}-{number}")
                for number, prompt in enumerate(prompt for prompt in sentences if prompt != own.prompt)
            ),
            neighbours=tuple(first_token(model, fact) for fact in unchanged[:NEIGHBOURS]),
            reverse=asked,
            reverse_true=replace(asked, answer=first_token(model, self.reverse(given)).answer),
        )


def in_turn(queues: list[list[Any]]) -> list[Any]:
    """One of each queue, then the next of each."""
    return [queue[i] for i in range(max(map(len, queues), default=0)) for queue in queues if i < len(queue)]


def first_token(model: DiffusionTransformer, fact: Fact) -> Fact:
    """The fact with the first token of its answer."""
    word = model.tokenizer.decode(fact.tokenize(model)[1][:1])
    return replace(fact, answer=f" {word.lstrip()}")
