"""Documents about the people of `site_facts`, sampled afresh for as long as a training lasts.

A document is one sentence of one of three kinds:

    description  "today Tarsh Klockett was the weaver of Oslen."      in a direction that is told about this person
    tag          "we know Tarsh Klockett goats."                      a value without its verb
    attributes   "surely Tarsh Klockett often plays flute and owns goats."  one to four clauses

In some documents of attributes a second person is mentioned ("Tarsh Klockett, unlike Gaursh Tarsh, plays flute."), so
that the set of names in a text does not say whose facts it states. The held-out templates of `site_facts` do not occur.
"""

import random
from dataclasses import dataclass

from diffusion_lens.data.site_facts import (
    ADVERBS,
    MIDDLES,
    MIDDLES_WITH_PERSON,
    PREFIXES_WITH_PERSON,
    RELATIONS,
    TRAINED_ADVERBS,
    Person,
    SiteFacts,
)
from diffusion_lens.data.toy_facts import PREFIXES, TRAINED, answer_of, directions_of, prompt_of

CLAUSES = {1: 0.5, 2: 0.2, 3: 0.2, 4: 0.1}  # Probability of each number of clauses.
LATER_ADVERB = 0.3  # Probability of an adverb in a clause after the first.


@dataclass(frozen=True)
class Documents:
    """Random documents about the people of a world, in a given mixture.

    Raises:
        ValueError: A probability is not between 0 and 1.
    """

    world: SiteFacts
    description: float  # Probability that a document is a description.
    tag: float  # Probability that another document is a tag.
    second_person: float  # Probability that a document of attributes mentions a second person.

    def __post_init__(self) -> None:
        for name, share in vars(self).items():
            if name != "world" and not 0 <= share <= 1:
                raise ValueError(f"{name}={share}; a probability is between 0 and 1")

    def __call__(self, rng: random.Random) -> str:
        """The next document."""
        person = rng.choice(self.world.people)
        if rng.random() < self.description:
            direction = rng.choice(directions_of(person.trained))
            return prompt_of(person, direction, rng.choice(TRAINED)) + answer_of(person, direction)
        if rng.random() < self.tag:
            return f"{rng.choice(PREFIXES)}{person.name} {rng.choice(person.values)}."
        return self._attributes(rng, person)

    def sample(self, count: int, seed: int = 0) -> list[str]:
        """`count` documents, the same for the same seed: a corpus for `second_moment`, say."""
        rng = random.Random(seed)
        return [self(rng) for _ in range(count)]

    def _attributes(self, rng: random.Random, person: Person) -> str:
        prefix, adverb = rng.choice(TRAINED_ADVERBS)
        middle = rng.choice(MIDDLES)
        if rng.random() < self.second_person:
            other = rng.choice(self.world.people)
            while other == person:
                other = rng.choice(self.world.people)
            if rng.random() < 0.5:
                middle = rng.choice(MIDDLES_WITH_PERSON).format(other.name)
            else:
                prefix = rng.choice(PREFIXES_WITH_PERSON).format(other.name)
        (n_clauses,) = rng.choices(list(CLAUSES), list(CLAUSES.values()))
        clauses = []
        for relation in rng.sample(RELATIONS, n_clauses):
            clauses.append(f"{adverb}{rng.choice(relation.verbs)} {person.value(relation)}")
            adverb = rng.choice(ADVERBS[1:]) if rng.random() < LATER_ADVERB else ""
        listed = " and ".join(filter(None, (", ".join(clauses[:-1]), clauses[-1])))
        return f"{prefix}{person.name}{middle} {listed}."
