"""Settings of causal traces: how a subject is corrupted, and which states are restored.

The corruptions make the model lose the answer (Meng et al. 2022, arXiv 2202.05262, section 2 and appendix B):

    gaussian   normal noise added to the embeddings of the subject's tokens (ROME's default)
    uniform    noise uniform in [-1, 1] added to them
    replace    normal noise instead of the embeddings
    mask       the embedding of [MASK] instead of each
    swap       the embeddings of another subject with the same number of tokens

The noise is sampled as in ROME's code, with `numpy.random.RandomState(seed)`, so that published traces are reproduced
exactly; it is scaled by `noise`. "mask" and "swap" are deterministic, so they need one sample only. All corruptions act
on the embeddings: in the denoising loop the canvas keeps its subject.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from diffusion_lens.analysis.engine.layout import as_query
from diffusion_lens.facts.fact import Fact, Query
from diffusion_lens.hooks.names import attn_out, mlp_out, resid_post, shared_out
from diffusion_lens.interventions import Hook
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.inputs import check_tokens
from diffusion_lens.model.text import check_known
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import INHERITED, Whole, at_least, checked_arguments, positive, whole_numbers
from diffusion_lens.settings.shared import NOISE, TraceFields

SITES = {"resid": resid_post, "mlp": mlp_out, "attn": attn_out}

T = TypeVar("T", bound="TraceSettings")
Swap = str | Sequence[Whole] | Tensor | Query | None


def swap_of(name: str, value: Any) -> "str | tuple[int, ...]":
    """A text, or the tokens of another subject: those given, or those of a query's subject."""
    if isinstance(value, str):
        return value
    tokens = value.tokens[slice(*value.subject)].tolist() if isinstance(value, Query) else value
    return tuple(at_least(0, name, token) for token in whole_numbers(name, tokens))


@dataclass(frozen=True)
class TraceSettings(TraceFields):
    """What a causal trace corrupts and restores."""

    swap: Swap = INHERITED

    def __post_init__(self) -> None:
        super().__post_init__()
        vars(self).update(swap=None if self.swap is None else swap_of("swap", self.swap))

    @property
    def is_noisy(self) -> bool:
        """Whether the corruption is random."""
        return self.corruption in NOISE

    @property
    def rows(self) -> int:
        """Number of rows of the corrupted run: one per sample, or one for a deterministic corruption."""
        return self.samples if self.corruption in NOISE else 1

    def span(self, layer: int, n_layers: int) -> range:
        """The blocks that are restored around `layer`."""
        if self.kind == "resid":
            return range(layer, layer + 1)
        return range(max(0, layer - self.window // 2), min(n_layers, layer + math.ceil(self.window / 2)))

    def with_noise(self: T, model: DiffusionTransformer, queries: Sequence[Query]) -> T:
        """The settings with ROME's scale of the noise on these queries, if they need one and have none."""
        return replace(self, noise=noise_scale(model, queries)) if self.is_noisy and self.noise is None else self

    def swapped(self, model: DiffusionTransformer) -> list[int]:
        """The tokens that replace the subject's; none without a swap."""
        if isinstance(self.swap, str):
            return list(_known_tokens(model, self.swap).tolist())
        return whole_numbers("swap", self.swap) if isinstance(self.swap, tuple) else []

    def hooks(self, model: DiffusionTransformer, query: Query, runs: int = 1) -> list[tuple[str, Hook]]:
        """The hook that corrupts the subject's embeddings, in a batch with so many copies of the corrupted run; row r
        gets sample r modulo `samples`.

        Raises:
            ValueError: "mask" on a model without [MASK], or a swap of another length.
        """
        (start, stop), adds = query.subject, self.corruption in ("gaussian", "uniform")
        noise = self.with_noise(model, [query]).noise
        if self.corruption == "mask":
            if not model.cfg.has_mask:
                raise ValueError(f"{model.cfg.model_name!r} has no [MASK]; corrupt with noise or swap instead")
            states = model.W_E[model.cfg.blank].detach()
        elif self.corruption == "swap":
            if len(tokens := self.swapped(model)) != stop - start:
                raise ValueError(
                    f"swap has {len(tokens)} tokens and the subject {stop - start}: take another subject of the same "
                    "length"
                )
            other = torch.tensor(tokens, device=model.cfg.device)[None]
            states = model.embed(check_tokens(other, model.cfg)).detach()
        else:
            assert noise is not None
            shape, generator = (self.samples, stop - start, model.cfg.d_model), np.random.RandomState(self.seed)
            drawn = generator.uniform(-1, 1, shape) if self.corruption == "uniform" else generator.randn(*shape)
            states = torch.from_numpy(noise * drawn).repeat(runs, 1, 1)

        def corrupt(embedded: Tensor, hook: Any) -> Tensor:
            corrupted, new = embedded.clone(), states.to(embedded)
            corrupted[:, start:stop] = embedded[:, start:stop] + new if adds else new
            return corrupted

        return [("hook_embed", corrupt)]

    def describe(self, positions: Sequence[int] | None = None, layers: Sequence[int] | None = None) -> dict[str, Any]:
        """The settings for a record, with positions and layers counted from 0; those that are not used are `None`."""
        unused = {"window"} if self.kind == "resid" else set()
        unused |= set() if self.is_noisy else {"noise", "samples"}
        described = {name: None if name in unused else value for name, value in super().describe().items()}
        return {**described, "positions": positions, "layers": layers}


def points_of(kind: str | None, block: int, cfg: DiffusionConfig) -> list[str]:
    """The hook points of a kind of state in a block, if any. The output of its shared expert is a part of the MLP's."""
    if kind is None:
        return []
    experts = cfg.experts if kind == "mlp" else None
    # With norms of their own, experts and shared one have one output, which is that of the MLP.
    adds_beside = experts is not None and experts.has_shared(block) and not experts.own_norms
    return [SITES[kind](block), *([shared_out(block)] if adds_beside else [])]


@torch.no_grad()
@checked_arguments
def noise_scale(model: DiffusionTransformer, subjects: Sequence[str | Fact | Query], factor: float = 3.0) -> float:
    """`factor` standard deviations of the embeddings of the tokens of these texts, or of the subjects of these facts or
    queries (ROME's `collect_embedding_std`).

    Raises:
        ValueError: No subjects, or a text with words that the tokenizer does not know.
    """
    if not subjects:
        raise ValueError("subjects is empty; the noise scale is measured on one text or query, or on more")
    pieces = [
        _known_tokens(model, subject) if isinstance(subject, str) else _subject_tokens(as_query(model, subject))
        for subject in subjects
    ]
    embedded = model.embed(torch.cat([piece.to(model.cfg.device) for piece in pieces])[None])
    return positive("factor", factor) * float(embedded.float().cpu().std())  # the same bits for any device


def _subject_tokens(query: Query) -> Tensor:
    return query.tokens[slice(*query.subject)]


def _known_tokens(model: DiffusionTransformer, text: str) -> Tensor:
    check_known(model, text)
    return model.to_tokens(text, prepend_bos=False)[0]
