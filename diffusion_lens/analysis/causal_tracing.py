"""Causal tracing (Meng et al. 2022, arXiv 2202.05262, section 2): which states carry the answer?

Three runs of one query. *Clean*: as it is. *Corrupted*: Gaussian noise on the embeddings of the subject's tokens,
several draws, p(answer) averaged over them. *Restored*: corrupted, but with one state put back to its clean value: the
residual stream after one block ("resid"), or the MLP or attention outputs of a window of blocks ("mlp", "attn"), at
one place. The indirect effect of a state is p_restored - p_corrupted.

Restoring a state at layer l changes nothing below l. So the corrupted residual streams are kept, and each cell starts
from the one that enters its first restored block; all places of a layer go through as one batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens import plots
from diffusion_lens.facts import Query
from diffusion_lens.hook_names import attn_out, mlp_out, resid_post, resid_pre
from diffusion_lens.interventions import add_noise, restore
from diffusion_lens.metrics import joint_probability
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import load_result, provenance, save_result

SITES = {"resid": resid_post, "mlp": mlp_out, "attn": attn_out}


@dataclass(frozen=True, eq=False)
class CausalTrace:
    """One query traced.

    Attributes:
        scores: Float[pos layer], p(answer) with that state restored.
        clean: p(answer) of the clean run.
        corrupted: p(answer) of the corrupted run, mean over the draws.
        str_tokens: the canvas, a string a place.
        subject: first and one past the last place of the subject.
        record: kind, window, noise, samples, seed, answer, model, weights' hash, versions.
    """

    scores: Float[Tensor, "pos layer"]
    clean: float
    corrupted: float
    str_tokens: list[str]
    subject: tuple[int, int]
    record: dict[str, Any]

    @property
    def indirect_effect(self) -> Float[Tensor, "pos layer"]:
        """How much of the answer a state brings back: scores - corrupted."""
        return self.scores - self.corrupted

    @property
    def total_effect(self) -> float:
        """How much the corruption takes away: clean - corrupted."""
        return self.clean - self.corrupted

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        record = {name: value for name, value in vars(self).items() if name != "scores"}
        return save_result(path, "causal trace", {"scores": self.scores}, record)

    @classmethod
    def load(cls, path: str | Path) -> "CausalTrace":
        """Read what `save` wrote."""
        tensors, record = load_result(path, "causal trace")
        fields: dict[str, Any] = {**tensors, **record, "subject": tuple(record["subject"])}
        return cls(**fields)

    def plot(self, ax: Any = None, title: str | None = None, limits: tuple[float, float] | None = None) -> Any:
        """ROME's heat map: tokens down, the subject's starred, layers across. Returns the matplotlib axes.

        Args:
            limits: probabilities at the ends of the colour scale; by default from corrupted to the highest score.
        """
        highest = max(float(self.scores.max()), self.corrupted + 1e-6)
        return plots.heat_map(
            self.scores,
            str_tokens=self.str_tokens,
            subject=self.subject,
            limits=limits or (self.corrupted, highest),
            kind=self.record["kind"],
            answer=self.record["answer"],
            title=title,
            ax=ax,
        )


@torch.no_grad()
def causal_trace(
    model: DiffusionTransformer,
    query: Query,
    kind: str = "resid",
    *,
    noise: float,
    samples: int = 10,
    seed: int = 1,
    window: int = 10,
    max_batch: int = 512,
    progress: bool = False,
) -> CausalTrace:
    """Trace one query on either variant.

    Args:
        query: canvas, subject and answer. A longer answer counts as a whole: the product of its tokens' probabilities.
        kind: what is restored: "resid" the residual stream after a block, "mlp" or "attn" the outputs of a window.
        noise: standard deviation of the noise; `noise_scale` gives ROME's 3 standard deviations of the embeddings.
        samples: draws of noise.
        seed: of `numpy.random.RandomState`, as in ROME's code, so that published traces are met number for number.
        window: blocks restored around each layer l, from l - window // 2 to l + ceil(window / 2) exclusive; for "resid"
            not used.
        max_batch: rows per forward pass.
        progress: show a bar.

    Raises:
        ValueError: a setting out of range, or a query without an answer.
    """
    _check(kind, noise, samples, window, max_batch)
    _check_answer(model, query)
    tokens = query.tokens.to(model.cfg.device)[None]
    answer = torch.tensor(query.answer_tokens, device=tokens.device)
    rows = model.readout.rows(torch.tensor(query.answer_positions, device=tokens.device))
    n_layers, n_pos = model.cfg.n_layers, tokens.shape[1]
    kept = [SITES[kind](layer) for layer in range(n_layers)]

    clean_logits, clean = model.run_with_cache(tokens, names_filter=kept, logits_at=rows, remove_batch_dim=True)
    corruption = add_noise(_draw(query, model.cfg.d_model, noise, samples, seed), slice(*query.subject))
    with model.hooks(fwd_hooks=[("hook_embed", corruption)]):
        low_logits, low = model.run_with_cache(
            tokens.expand(samples, -1),
            names_filter=[resid_pre(layer) for layer in range(n_layers)],
            logits_at=rows,
        )

    scores = torch.zeros(n_pos, n_layers)
    cells_per_batch = max(1, max_batch // samples)
    for layer in tqdm(range(n_layers), desc=f"trace {kind}", unit="layer", disable=not progress):
        span = _window(kind, layer, n_layers, window)
        for places in torch.arange(n_pos).split(cells_per_batch):
            each = places.repeat_interleave(samples)
            hooks: list[Any] = [(SITES[kind](block), restore(clean[SITES[kind](block)], each)) for block in span]
            resid = low[resid_pre(span[0])].repeat(len(places), 1, 1)
            logits = model.run_with_hooks(resid, start_at_layer=span[0], logits_at=rows, fwd_hooks=hooks)
            restored = joint_probability(logits, answer).view(len(places), samples)
            scores[places, layer] = restored.mean(dim=1).cpu()

    record = {
        "kind": kind,
        "window": None if kind == "resid" else window,
        "noise": noise,
        "samples": samples,
        "seed": seed,
        "answer": model.words(query.answer_tokens),
        **provenance(model, model.cfg),
    }
    return CausalTrace(
        scores=scores,
        clean=joint_probability(clean_logits, answer).item(),
        corrupted=joint_probability(low_logits, answer).mean().item(),
        str_tokens=model.words(tokens[0].tolist()),
        subject=query.subject,
        record=record,
    )


@torch.no_grad()
def noise_scale(model: DiffusionTransformer, subjects: Sequence[str] | Sequence[Query], factor: float = 3.0) -> float:
    """`factor` standard deviations of the embeddings of the subjects' tokens (ROME's `collect_embedding_std`).

    Args:
        subjects: texts, or queries, whose subject tokens are taken in place.
    """
    if not subjects:
        raise ValueError("no subjects were given to measure the noise scale on")
    pieces = [
        model.to_tokens(subject, prepend_bos=False)[0]
        if isinstance(subject, str)
        else subject.tokens[slice(*subject.subject)]
        for subject in subjects
    ]
    embedded = model.embed(torch.cat([piece.to(model.cfg.device) for piece in pieces])[None])
    return factor * float(embedded.float().std())


def _window(kind: str, layer: int, n_layers: int, window: int) -> Sequence[int]:
    """The restored blocks around `layer`."""
    if kind == "resid":
        return range(layer, layer + 1)
    return range(max(0, layer - window // 2), min(n_layers, layer + math.ceil(window / 2)))


def _draw(query: Query, d_model: int, noise: float, samples: int, seed: int) -> Float[Tensor, "sample place d_model"]:
    start, stop = query.subject
    drawn = np.random.RandomState(seed).randn(samples, stop - start, d_model)
    return torch.from_numpy(noise * drawn)


def _check_answer(model: DiffusionTransformer, query: Query) -> None:
    if not query.answer_tokens:
        raise ValueError("the query has no answer: there is no probability to trace")
    if outside := [token for token in query.answer_tokens if not 0 <= token < model.cfg.d_vocab_out]:
        raise ValueError(
            f"{model.cfg.model_name!r} cannot write the answer tokens {outside}; only 0 to d_vocab_out - 1"
        )
    if model.cfg.attention_dir == "causal" and 0 in query.answer_positions:
        raise ValueError("nothing precedes place 0, so a causal model has no probability for an answer there")


def _check(kind: str, noise: float, samples: int, window: int, max_batch: int) -> None:
    if kind not in SITES:
        raise ValueError(f"unknown kind {kind!r}; it is one of {', '.join(SITES)}")
    if not math.isfinite(noise) or noise < 0:
        raise ValueError(f"noise={noise}; it must be a finite number, 0 or more")
    for name, count in (("samples", samples), ("window", window), ("max_batch", max_batch)):
        if count < 1:
            raise ValueError(f"{name}={count}; it must be at least 1")
    if samples > max_batch:
        raise ValueError(f"max_batch={max_batch} does not hold one cell of {samples} draws; raise it to {samples}")
