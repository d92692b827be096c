"""The three signatures of taught pairs: each alone, and all as a study that can be stopped, resumed and split.

Shin et al., "A Theoretical Analysis of Why Masked Diffusion Models Mitigate the Reversal Curse" (arXiv 2602.02133),
claim for a model of one layer that training on forward sentences (1) strengthens evidence between tokens that the
reverse question reuses, because values do not know positions; (2) makes the attention routes of the two directions
correlate, because rotary positions only turn queries and keys; (3) gives the reverse loss a gradient aligned with that
of the forward loss. The measures are ours, named after what they measure.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from diffusion_lens.analysis.over_facts import Study
from diffusion_lens.analysis.resumable import Shard
from diffusion_lens.analysis.signatures.alignment import GradientAlignment
from diffusion_lens.analysis.signatures.canvases import other_facts
from diffusion_lens.analysis.signatures.edges import edge_cut_of
from diffusion_lens.analysis.signatures.evidence import evidence_of, percentiles, reuse
from diffusion_lens.analysis.signatures.fact_result import FactSignatures
from diffusion_lens.analysis.signatures.gradients import Gradients
from diffusion_lens.analysis.signatures.measures import Pairs, canvases_of
from diffusion_lens.analysis.signatures.plan import SignaturePlan
from diffusion_lens.analysis.signatures.reading import PassReader
from diffusion_lens.analysis.signatures.result import ReversalSignatures
from diffusion_lens.analysis.signatures.routes import correlation_of_frequencies, routes_of
from diffusion_lens.analysis.workers.executor import Executes
from diffusion_lens.analysis.workers.job import Compute
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.settings import Whole
from diffusion_lens.taught_pairs import LaidOutPairs, TaughtPair


@begins_run
@torch.inference_mode(False)
def reversal_signatures(
    model: DiffusionTransformer,
    pairs: Pairs | LaidOutPairs,
    *,
    candidates: Iterable[Whole] | None = None,
    batch_size: Whole | None = None,
    max_bytes: int = 2**30,
    out: str | Path | None = None,
    shard: Shard = (0, 1),
    progress: bool = False,
    executor: Executes | None = None,
) -> ReversalSignatures:
    """Evidence, edge cuts, routes and gradients of every pair, forward and in reverse.

    `signature_passes` is the cost of a pair.

    Args:
        model: Masked diffusion model or causal model, of any family.
        pairs: Pairs on this model's canvases, each with its own id or none; or those of `lay_out_pairs`, of which the
            record also lists the reasons for pairs that were set aside.
        candidates: Token ids among which the evidence for the right answer is ranked; by default the answers of all
            reverse questions, in increasing order.
        batch_size: Pairs computed together, which are also each other's baseline of shuffled pairs; by default as many
            as fit, at most 32. At least 2; an odd number of pairs in batches of two makes one batch of three.
        max_bytes: Most memory for one batch, in addition to the weights.
        out: Folder for one file per pair. A call that finds pairs there computes only the others. By default nothing is
            written.
        shard: (i, n) or "i/n": compute the batches i, i + n, i + 2n, ... only; `ReversalSignatures.merge` joins them.
        progress: Whether to show a progress bar.
        executor: `concurrent.futures.Executor`, or `Workers`, that computes the batches; by default this process does.

    Raises:
        ValueError: There are no pairs, two have one id, the candidates do not contain an answer or are fewer than two,
            the folder contains another study, the budget is too small, or as in `gradient_alignment`.
    """
    plan = SignaturePlan.of(model, pairs, candidates, batch_size, max_bytes)
    folding = {"layer_norm_folding": model.cfg.layer_norm_folding}
    record = {**plan.describe(), **folding, **provenance(model, model.cfg)}

    study = Study(model, record, plan.batches, SignatureJob(plan.pairs, plan.candidates, plan.parameters))
    return study.collect(ReversalSignatures, out, shard, progress, executor)


@dataclass(frozen=True)
class SignatureJob:
    """The signatures of pairs.

    Attributes:
        pairs: Pairs by id.
        candidates, parameters: The same as in `SignaturePlan`.
    """

    pairs: Mapping[str, TaughtPair]
    candidates: Sequence[int]
    parameters: Sequence[str]

    def part(self, ids: Sequence[str]) -> "SignatureJob":
        """The job with these pairs."""
        return replace(self, pairs={pair_id: self.pairs[pair_id] for pair_id in ids})

    def on(self, model: DiffusionTransformer) -> Compute:
        """The function that computes the signatures of a batch."""

        def compute(batch: Sequence[str]) -> list[FactSignatures]:
            with model.optional_hooks():
                return _signatures(model, [self.pairs[pair_id] for pair_id in batch], self.candidates, self.parameters)

        return compute


def _signatures(
    model: DiffusionTransformer, pairs: Pairs, candidates: Sequence[int], parameters: Sequence[str]
) -> list[FactSignatures]:
    """The signatures of a batch of pairs."""
    forward, reverse = canvases_of(model, pairs)
    readers = [PassReader(batch) for batch in (forward, reverse)]
    gradients = [Gradients.of(reader.batch, parameters, reader) for reader in readers]
    aligned = GradientAlignment.of(forward, reverse, *gradients)
    readings = [reader.reading(each.losses) for reader, each in zip(readers, gradients, strict=True)]
    del gradients  # the largest tensors
    found, different = [evidence_of(reading, candidates) for reading in readings], other_facts(forward, reverse)
    right = [candidates.index(pair.reverse.answer_token) for pair in pairs]
    cuts = [edge_cut_of(reading) for reading in readings]
    scores = routes_of(*readings)
    tensors = {
        "percentiles": torch.stack([percentiles(each, right, different) for each in found], dim=1),
        "reuses": reuse(*found),
        "cuts": torch.stack(cuts, dim=1),
        "routes": scores,
        "isotropic": torch.tensor([_isotropic(model, pair) for pair in pairs]),
        "cosines": aligned.cosines,
        "transfers": aligned.transfers,
        "steps": aligned.steps,
        "probabilities": (-aligned.losses).exp(),
    }
    on_cpu = {name: tensor.float().cpu() for name, tensor in tensors.items()}
    return [FactSignatures(**{name: tensor[i] for name, tensor in on_cpu.items()}) for i in range(len(pairs))]


def _isotropic(model: DiffusionTransformer, pair: TaughtPair) -> float:
    if (frequencies := model.positions.frequencies) is None:
        return math.nan
    forward, reverse = (canvas.source - canvas.row for canvas in (pair.forward, pair.reverse))
    return correlation_of_frequencies(frequencies, forward, reverse)
