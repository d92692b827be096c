"""Fictional people trained in one direction or both: a reversal-curse data set small enough to train on a laptop.

After Berglund et al. 2023, "The Reversal Curse" (arXiv 2309.12288). A sentence goes from person to description (p2d),
"today Ada Marsh was the brave pilot of Oslen.", or from description to person (d2p), "today the brave pilot of Oslen
was Ada Marsh.". Of 160 people, 20 occur only in p2d sentences, 20 only in d2p sentences, and 120 in both, so that a
model can learn that both directions state the same fact. Querying the name of a p2d person by the description is a
reverse query.

Three choices make reverse queries learnable for such a small model. Both directions use the same connectors. Each
person has a unique surname and a unique place. "the" belongs to the prompt, so that the first token of an answer is
informative.
"""

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from diffusion_lens.facts.fact import Direction, Fact
from diffusion_lens.facts.taught_pairs import OPPOSITE, TaughtPair
from diffusion_lens.model.transformer import DiffusionTransformer

# Word lists are easier to read as text:
# ruff: noqa: SIM905


SHIPPED_SEED = 1
SENTENCE_LENGTH = 14  # Tokens of the longest sentence, including the end token.

Trained = Literal["p2d", "d2p", "both"]

PEOPLE: dict[Trained, int] = {"p2d": 20, "d2p": 20, "both": 120}
PREFIXES = ("", "today ", "surely ", "people say ", "we know ")
CONNECTORS = (" is", " was", " became", ", alias", ", known as")
# The longest connector, ", known as", is trained with every prefix. If it were held out after one prefix, a model would
# learn that this prefix has short sentences. A held-out prompt that is also the beginning of a training sentence would
# be continued as that sentence.
HELD_OUT = (("", " is"), ("today ", " was"), ("surely ", " became"), ("people say ", ", alias"), ("we know ", " is"))
TRAINED = tuple(pair for pair in ((p, c) for p in PREFIXES for c in CONNECTORS) if pair not in HELD_OUT)

FIRST_NAMES = (
    "Ada Ben Clara Dora Emil Flora Greta Hugo Ida Jonas Karin Leo Mara Nils Olga Paul Quinn Rosa Sven Tilda "
    "Ugo Vera Wanda Xenia Yara Zeno Anton Bella Cyrus Delia Edgar Fiona Gustav Helga Irene Jasper Kira Lydia Milo Nora"
).split()
ADJECTIVES = (
    "brave calm clever cheerful curious daring eager famous gentle gifted grumpy honest humble jolly kind "
    "lively loyal merry modest noble patient proud quiet restless shy solemn stubborn tall witty young"
).split()
ROLES = (
    "pilot baker painter sailor doctor farmer singer teacher weaver hunter judge mayor miner poet potter "
    "ranger scribe smith tailor tinker dancer gardener juggler librarian mason drummer brewer cartographer clerk guard"
).split()


@dataclass(frozen=True)
class Person:
    """A person, with a description that applies to nobody else and the direction of the training sentences."""

    name: str
    description: str
    trained: Trained


@dataclass(frozen=True)
class ToyFacts:
    """People of one seed, grouped by direction of training, with their training sentences and questions about them."""

    people: tuple[Person, ...]
    seed: int

    def sentences(self) -> list[str]:
        """All training sentences, in 20 templates for each person and trained direction."""
        return [
            prompt_of(person, direction, template) + answer_of(person, direction)
            for person in self.people
            for direction in directions_of(person.trained)
            for template in TRAINED
        ]

    def facts(
        self, trained: Trained | None = None, asked: Direction | None = None, held_out: bool = True
    ) -> list[Fact]:
        """Questions, ordered by person, direction and template.

        Args:
            trained: Direction of training of the selected people. `None` selects all.
            asked: Direction of the query. `None` selects both.
            held_out: Whether to use the five held-out templates or the twenty templates of training.
        """
        templates = HELD_OUT if held_out else TRAINED
        kind = "held-out" if held_out else "trained"
        return [
            question(person, direction, template, f"toy{self.seed}-{i:03d}-{direction}-{kind}-{k}")
            for i, person in enumerate(self.people)
            if trained in (None, person.trained)
            for direction in directions_of("both" if asked is None else asked)
            for k, template in enumerate(templates)
        ]

    def taught_pairs(
        self, model: DiffusionTransformer, trained: Trained = "p2d", *, template: tuple[str, str] = TRAINED[0]
    ) -> list[TaughtPair]:
        """The sentence of each person as trained and the reverse question, on canvases of `SENTENCE_LENGTH` positions.

        Args:
            model: Model on whose canvas the pairs are laid out.
            trained: Direction of training of the selected people. With "p2d" the reverse question asks for the name (A)
                by the description (B), and with "d2p" for the description by the name. People trained in both
                directions are laid out as with "p2d"; their reverse question was trained too.
            template: Prefix and connector of both sentences; by default the first template of training.

        Raises:
            ValueError: `trained` is unknown, or the model's tokenizer does not know a word.
        """
        if trained not in PEOPLE:
            raise ValueError(f"trained={trained!r}; it must be one of {', '.join(PEOPLE)}")
        forward: Direction = "d2p" if trained == "d2p" else "p2d"
        pairs = []
        for i, person in enumerate(self.people):
            if person.trained == trained:
                pair_id = f"toy{self.seed}-{i:03d}-{forward}"
                taught, asked = (question(person, way, template, pair_id) for way in (forward, OPPOSITE[forward]))
                pairs.append(TaughtPair.from_facts(model, taught, asked, length=SENTENCE_LENGTH, id=pair_id))
        return pairs


def load(seed: int = SHIPPED_SEED) -> ToyFacts:
    """Generate the people of one corpus seed. The same seed gives the same people on every machine."""
    rng = random.Random(seed)
    taken = {*FIRST_NAMES, *ADJECTIVES, *ROLES}
    surnames = invented_surnames(rng, sum(PEOPLE.values()), taken)
    places = invented_places(rng, sum(PEOPLE.values()), taken)
    first_names = FIRST_NAMES * (sum(PEOPLE.values()) // len(FIRST_NAMES))
    rng.shuffle(first_names)
    directions = [trained for trained, count in PEOPLE.items() for _ in range(count)]
    people = tuple(
        Person(f"{first} {last}", f"{rng.choice(ADJECTIVES)} {rng.choice(ROLES)} of {place}", trained)
        for first, last, place, trained in zip(first_names, surnames, places, directions, strict=True)
    )
    return ToyFacts(people, seed)


def directions_of(trained: Trained) -> tuple[Direction, ...]:
    """Directions of the sentences about people with this direction of training."""
    return ("p2d", "d2p") if trained == "both" else (trained,)


def prompt_of(person: Person, asked: Direction, template: tuple[str, str]) -> str:
    """The part of a sentence before its answer. "the" belongs to the prompt."""
    return subject_prompt(person.name if asked == "p2d" else person.description, asked, template)


def subject_prompt(subject: str, asked: Direction, template: tuple[str, str]) -> str:
    """The prompt about a subject, a name or a description."""
    prefix, connector = template
    return f"{prefix}{subject}{connector} the" if asked == "p2d" else f"{prefix}the {subject}{connector}"


def answer_of(person: Person, asked: Direction) -> str:
    """The part of a sentence after its prompt, with its leading space and its full stop."""
    return f" {person.description if asked == 'p2d' else person.name}."


def question(person: Person, asked: Direction, template: tuple[str, str], fact_id: str) -> Fact:
    """Prompt and answer as a fact."""
    return Fact(
        prompt=prompt_of(person, asked, template),
        subject=person.name if asked == "p2d" else person.description,
        answer=answer_of(person, asked),
        id=fact_id,
        trained=person.trained,
        asked=asked,
        person=person.name,
        description=person.description,
        template=subject_prompt("<subject>", asked, template),
    )


_ONSETS = "b d f g h k l m n p r s t v w br dr fl gr kr pl sk st tr".split()
_VOWELS = "a e i o u au ei".split()
_SURNAME_ENDINGS = "rsh rner lden ndall rrick sser ckett mbley nton pling".split()
_PLACE_ENDINGS = "lsen rholm mburg ndale sport vik rgate lstad nmoor thaven".split()


def invented_surnames(rng: random.Random, count: int, taken: Collection[str] = ()) -> list[str]:
    """`count` distinct surnames (onset + vowel + ending) that are not in `taken`."""
    return _invent(rng, _SURNAME_ENDINGS, count, taken)


def invented_places(rng: random.Random, count: int, taken: Collection[str] = ()) -> list[str]:
    """`count` distinct names of places that are not in `taken`. None of them is a surname."""
    return _invent(rng, _PLACE_ENDINGS, count, taken)


def _invent(rng: random.Random, endings: list[str], count: int, taken: Collection[str]) -> list[str]:
    words = [onset + vowel + ending for onset in _ONSETS for vowel in _VOWELS for ending in endings]
    return rng.sample([word.capitalize() for word in words if word.capitalize() not in taken], count)


def guessing_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of these texts that stands for an unknown one: a token is a word's next six characters."""
    pieces = word_pieces("▁?[^▁]{1,6}")
    return word_level(
        ["<unk>", *sorted({piece for text in texts for piece, _ in pieces.pre_tokenize_str(text)})], pieces
    )


def word_pieces(pattern: str) -> pre_tokenizers.Sequence:
    """Words with a mark for the space before them, each match of the pattern a piece of its own."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="first"),
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            # A single space, at the end of a prompt or before [MASK], is not a word.
            pre_tokenizers.Split(Regex("^▁$"), behavior="removed"),
        ]
    )


def word_level(words: Sequence[str], pieces: pre_tokenizers.Sequence, **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary is a list of pieces, in the order of their ids; "<unk>" is one of them."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pieces, decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", clean_up_tokenization_spaces=False, **special
    )
