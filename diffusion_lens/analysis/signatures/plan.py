"""The plan of a study of signatures: all that its record says of it except the model, known without the weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from diffusion_lens.analysis.signatures.batches import longest_canvas, plan_batches, require_shuffled_pairs
from diffusion_lens.analysis.signatures.measures import Pairs, pick_candidates, pick_parameters
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import Whole
from diffusion_lens.taught_pairs import LaidOutPairs, TaughtCanvas, TaughtPair


@dataclass(frozen=True, eq=False)
class SignaturePlan:
    """What a study of signatures computes.

    Attributes:
        pairs: Pairs by id, in their order; those without an id are numbered.
        set_aside: Reasons why other pairs are left out, by id.
        candidates: Token ids among which the percentile is taken.
        parameters: Names of the weight matrices in which gradients are compared.
        batches: Ids of the pairs that are computed together.
    """

    pairs: dict[str, TaughtPair]
    set_aside: dict[str, str]
    candidates: list[int]
    parameters: list[str]
    batches: list[list[str]]

    @classmethod
    def of(
        cls,
        model: DiffusionTransformer,
        pairs: Pairs | LaidOutPairs,
        candidates: Iterable[Whole] | None = None,
        batch_size: Whole | None = None,
        max_bytes: int = 2**30,
    ) -> "SignaturePlan":
        """The plan, of which the arguments and errors are those of `reversal_signatures`.

        Args:
            model: The model, or one without weights.
        """
        given, set_aside = (pairs.pairs, pairs.set_aside) if isinstance(pairs, LaidOutPairs) else (pairs, {})
        chosen, parameters = pick_candidates(model, given, candidates), pick_parameters(model, None)
        if missing := [pair.reverse.answer_token for pair in given if pair.reverse.answer_token not in chosen]:
            raise ValueError(f"the candidates do not contain the answer {missing[0]} of a reverse question; add it")
        if len(chosen) < 2:
            raise ValueError(
                "a percentile needs at least two candidates, which are the answers of the pairs unless others are "
                "named: use more pairs"
            )
        require_shuffled_pairs(len(given), batch_size)
        named = _named(given)
        ids = list(named)
        batches = plan_batches(model.cfg, longest_canvas(given), len(ids), batch_size, max_bytes, len(chosen))
        return cls(named, set_aside, chosen, parameters, [[ids[i] for i in batch] for batch in batches])

    def describe(self) -> dict[str, Any]:
        """The plan for the record of the study."""
        return {
            "candidates": self.candidates,
            "parameters": self.parameters,
            "batch_size": max(map(len, self.batches)),
            "facts": {fact_id: _describe(pair) for fact_id, pair in self.pairs.items()},
            "set_aside": self.set_aside,
        }


def signature_passes(n_layers: int) -> tuple[int, int]:
    """The cost of a pair in forward passes of one canvas, and the number of backward passes.

    Of L + 2 forward passes, one of each canvas gives states, scores and gradients, L - 1 in all are the blocks behind
    each cut, and one is the small step. To these come 2 L positions, the readers in the block of each cut; where hooks
    are attached to a block, whole blocks in their place. The two backward passes compute no gradient of a weight.
    """
    return n_layers + 2, 2


def _named(pairs: Pairs) -> dict[str, TaughtPair]:
    named: dict[str, TaughtPair] = {}
    for i, pair in enumerate(pairs):
        fact_id = pair.id or f"pair-{i:04d}"
        if fact_id in named:
            raise ValueError(f"two pairs are called {fact_id!r}; give each its own id, and each once")
        named[fact_id] = pair
    return named


def _describe(pair: TaughtPair) -> dict[str, Any]:
    def canvas(one: TaughtCanvas) -> dict[str, Any]:
        return {"tokens": one.tokens.tolist(), "row": one.row, "answer_token": one.answer_token, "source": one.source}

    return {"forward": canvas(pair.forward), "reverse": canvas(pair.reverse), "group": pair.group}
