"""The relations of `site_facts`, their values, and the words of its sentences."""

from dataclasses import dataclass

from diffusion_lens.data.toy_facts import PREFIXES

ADVERBS = ("", "often ", "still ", "gladly ")
MIDDLES = ("", ", they say,", ", as everybody knows,", " without doubt", " from abroad indeed")
MIDDLES_WITH_PERSON = (", friend of {},", ", unlike {},", " and not {}")
PREFIXES_WITH_PERSON = ("unlike {}, ", "says {}, ")
HELD_OUT_ADVERBS = tuple((prefix, ADVERBS[i % len(ADVERBS)]) for i, prefix in enumerate(PREFIXES))
TRAINED_ADVERBS = tuple(
    pair for pair in ((prefix, adverb) for prefix in PREFIXES for adverb in ADVERBS) if pair not in HELD_OUT_ADVERBS
)


@dataclass(frozen=True)
class Relation:
    """A relation of a person to one of sixteen values.

    Attributes:
        name: Name of the relation.
        verbs: Two verbs that state it.
        values: Possible values, one token each.
    """

    name: str
    verbs: tuple[str, str]
    values: tuple[str, ...]


RELATIONS = tuple(
    Relation(name, verbs, tuple(values.split()))
    for name, verbs, values in (
        (
            "instrument",
            ("plays", "practises"),
            "flute harp drums violin cello trumpet oboe lute guitar piano banjo zither bassoon tuba organ fiddle",
        ),
        (
            "animal",
            ("owns", "keeps"),
            "cats dogs goats sheep horses geese ducks hens pigs bees doves rabbits cows donkeys parrots ferrets",
        ),
        (
            "home",
            ("lives", "dwells"),
            "upstairs downstairs uptown downtown inland offshore ashore upstream downstream uphill downhill overseas "
            "outdoors underground afloat nearby",
        ),
        (
            "time",
            ("works", "serves"),
            "mornings evenings nights afternoons weekends weekdays mondays tuesdays wednesdays thursdays fridays "
            "saturdays sundays holidays summers winters",
        ),
        (
            "food",
            ("eats", "cooks"),
            "beans lentils rice noodles fish soup mushrooms potatoes cabbage carrots pancakes dumplings eggs leeks "
            "turnips peas",
        ),
        (
            "colour",
            ("wears", "likes"),
            "red blue green yellow orange purple black white grey brown pink scarlet turquoise indigo maroon beige",
        ),
    )
)
RELATION_OF = {verb: relation for relation in RELATIONS for verb in relation.verbs}
