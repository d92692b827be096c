"""Facts for training and queries: fictional people (toy and reversal curse), parents of celebrities, lines of poems,
Wikipedia, ROME's facts."""

from diffusion_lens.data.celebrities import parent_child
from diffusion_lens.data.fact_files import read_facts
from diffusion_lens.data.pretrained_reversals import WikiReversal, poem_pairs
from diffusion_lens.data.reversal_curse import ReversalCurse
from diffusion_lens.data.rome_facts import EditRequest, bake, counterfact, known_1000
from diffusion_lens.data.toy_facts import ToyFacts

__all__ = [
    "EditRequest",
    "ReversalCurse",
    "ToyFacts",
    "WikiReversal",
    "bake",
    "counterfact",
    "known_1000",
    "parent_child",
    "poem_pairs",
    "read_facts",
]
