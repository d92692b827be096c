"""Tensors take at most a tenth more than `max_bytes`, and nearly as much where one budget takes several passes."""

import re
from functools import cache, partial

import pytest
import torch
from oracles.memory import peak_of_tensors
from small_networks import small_architecture

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer, Query
from diffusion_lens.analysis import (
    answer_probability,
    attention_rollout,
    attention_sinks,
    causal_trace,
    edge_attribution,
    faithfulness,
    fit_translators,
    layer_cosines,
    logit_lens,
    node_attribution,
    patch_grid,
    probe_time,
    qk_decomposition,
    run_graph,
    state_drift,
    temporal_effect,
    trace_trajectory,
)
from diffusion_lens.analysis.engine import batching, kept_run
from diffusion_lens.analysis.engine.answer import token_probabilities
from diffusion_lens.analysis.engine.batching import row_bytes
from weight_conversion import Experts

N_POS = 16
KINDS = {
    "plain": {},
    "grouped": {"n_key_value_heads": 2, "attention_dir": "causal", "readout": "shifted", "mask_token_id": None},
    "experts": {"experts": Experts(n_experts=4, n_chosen=2, d_expert=16, layers=(True,) * 3)},
    "blocks": {"attention_dir": "block_causal", "causal_block": 4},
}
NOISE = dict(noise=0.5, samples=4)


@pytest.fixture
def tensors_alone(monkeypatch):
    """A budget is of tensors, and as many rows as fit share a pass on the CPU too."""
    for name in ("RESERVE_ON_CPU", "RESERVE_FOR_A_GRAPH"):
        monkeypatch.setattr(batching, name, 1.0)
    for name in ("CPU_TENSOR_BYTES", "CPU_LOGITS_BYTES"):
        monkeypatch.setattr(batching, name, 2**40)
    monkeypatch.setattr(kept_run, "ROWS_OF_A_PASS", 10**6)


@cache
def build(kind, d_vocab=200, dtype=torch.float32, **changes):
    """Three layers of width 32 with random weights."""
    sizes = dict(n_layers=3, d_model=32, n_heads=4, n_key_value_heads=4, d_head=8, d_mlp=96, n_ctx=64)
    words = dict(d_vocab=d_vocab + 1, d_vocab_out=d_vocab, mask_token_id=d_vocab)
    architecture = small_architecture(**{**sizes, **words, **KINDS[kind], **changes})
    return HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu", dtype=dtype))


def texts(n_rows=1, n_pos=N_POS, seed=0):
    return torch.randint(5, 190, (n_rows, n_pos), generator=torch.Generator().manual_seed(seed))


def query_of(model, n_open=1):
    """A query whose last positions are open, and whose answer is the first of them."""
    tokens, mask = torch.arange(N_POS) + 3, model.cfg.mask_token_id
    if mask is None:
        return Query(tokens[: N_POS - n_open + 1], (2, 5), (N_POS - n_open + 1,), (7,))
    tokens[-n_open:] = mask
    return Query(tokens, (2, 5), (N_POS - n_open,), (7,))


def trace(model, **settings):
    return partial(causal_trace, model, query_of(model), window=2, **NOISE, **settings)


def of_run(analysis, model, **settings):
    """An analysis of a denoising run."""
    query = query_of(model, n_open=6)
    steps = {} if model.cfg.is_autoregressive else {"steps": 3}
    run = model.denoise(query.tokens[None], length=N_POS + 2, seed=1, **steps)
    return partial(analysis, model, query, trajectory=run, positions=range(1, 12), **NOISE, **settings)


def logit(logits):
    return (logits[:, -1, 3] - logits[:, -1, 5]).mean()


def grid(model, site, **settings):
    if settings:
        return partial(patch_grid, model, texts(), texts(seed=1), logit, site, **settings)
    query = query_of(model)
    return partial(patch_grid, model, query, query.tokens.flip(0), answer_probability(model, query), site)


def on_pair(analysis, model, **settings):
    return partial(analysis, model, texts(), texts(seed=1), logit, logits_at=[-1], **settings)


def circuits(model):
    scores = on_pair(edge_attribution, model, ig_steps=1)()
    return on_pair(faithfulness, model, edge_scores=scores, circuits=range(1, 25))


def graph(model, **settings):
    run = model.denoise(texts()[:, :9], length=15, steps=None if model.cfg.is_autoregressive else 2)
    return partial(run_graph, model, run, 9, texts(seed=1)[0, :9], canvas="forced", **settings)


def of_graph(model, method="faithfulness", **settings):
    model.unembed.weight.data *= 100  # so that the target differs between the runs
    pruned = graph(model)().prune(0.8) if method == "faithfulness" else graph(model)()
    return partial(getattr(pruned, method), model, **settings)


def least(run):
    """The least budget that is not refused, by what the refusals say."""
    budget = 1
    while True:
        try:
            run(max_bytes=budget)
        except ValueError as refusal:
            said = str(refusal).replace(",", "")
            numbers = [int(number) for number in re.findall(r"(?:takes?|keep) (\d+)", said)]
            budget = sum(numbers) if sum(numbers) > budget else budget + max(numbers)
        else:
            return budget


# Job, kind of network, and how many times the least budget is given.
JOBS = {
    "trace": (trace, "plain", 8),
    "trace of MLPs": (partial(trace, kind="mlp"), "experts", 8),
    "severed trace": (partial(trace, severed="attn"), "grouped", 8),
    "trace by blocks": (trace, "blocks", 8),
    "trace of a run": (partial(of_run, trace_trajectory), "grouped", 5),
    "trace of free runs": (partial(of_run, trace_trajectory, canvas="free"), "plain", 5),
    "temporal effect": (partial(of_run, temporal_effect, layers=[0, 1]), "plain", 3),
    "grid of streams": (partial(grid, site="resid_pre"), "experts", 8),
    "grid of MLPs": (partial(grid, site="mlp_out"), "plain", 8),
    "grid of heads": (partial(grid, site="z", logits_at=[-1]), "grouped", 8),
    "grid of patterns": (partial(grid, site="pattern", layers=[1], positions=[3, 8, 15]), "experts", 5),
    "estimates": (partial(grid, site="z", method="attribution", check=2), "plain", 1),
    "nodes": (partial(on_pair, node_attribution, ig_steps=9), "experts", 4),
    "edges": (partial(on_pair, edge_attribution, ig_steps=9), "grouped", 4),
    "circuits": (circuits, "plain", 6),
    "graph": (graph, "grouped", 1),
    "graph of many nodes": (partial(graph, nodes_per_step=500), "experts", 1),
    "graph of frozen parts": (partial(graph, frozen="patterns and norms"), "plain", 1),
    "what a graph keeps": (of_graph, "plain", 5),
    "refined graph": (partial(of_graph, method="refine", most=10), "blocks", 5),
    "lens": (lambda model: partial(logit_lens, model, texts(4)), "grouped", 2),
    "translators": (lambda model: partial(fit_translators, model, texts(4), iterations=1), "plain", 2),
    "sinks": (lambda model: partial(attention_sinks, model, texts(4)), "grouped", 1),
    "keys": (lambda model: partial(qk_decomposition, model, texts(4)), "grouped", 1),
    "rollout": (lambda model: partial(attention_rollout, model, texts(4)), "experts", 1),
    "layers": (lambda model: partial(layer_cosines, model, texts(4)), "plain", 1),
    "drift": (lambda model: partial(state_drift, model, model.denoise(texts(4)[:, :9], length=15)), "plain", 1),
    "times": (
        lambda model: partial(probe_time, model, texts(3), "blocks.0.hook_resid_post", positions="all", samples=60),
        "plain",
        3,
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_tensors_take_the_budget(name, tensors_alone, annotations_unchecked):
    job, kind, times = JOBS[name]
    run = job(build(kind, 2000 if name in ("lens", "translators") else 200))
    budget = times * least(run)
    assert 0.65 * budget < peak_of_tensors(partial(run, max_bytes=budget)) <= 1.1 * budget


SHAPES = {
    "plain": {},
    "other heads": {"n_key_value_heads": 2, "qk_norm": True, "d_head": 32},
    "plain MLP": {"mlp": "plain", "act_fn": "gelu_new", "positional_embedding_type": "standard"},
    "narrow MLP": {"d_mlp": 16},
    "experts": KINDS["experts"],
    "shared expert": {"experts": Experts(n_experts=4, n_chosen=3, d_expert=8, layers=(True,) * 3, d_shared=16)},
    "many words": {"d_vocab": 4001, "d_vocab_out": 4000, "mask_token_id": 4000},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of torch's own context
@torch.no_grad()
def test_a_row_takes_what_is_counted(shape, dtype, annotations_unchecked):
    model, n_rows, n_read = build("plain", dtype=dtype, **SHAPES[shape]), 16, 10
    answer = torch.full((n_read,), 7)

    def run():
        logits = model(torch.ones(n_rows, 20, 32, dtype=dtype), start_at_layer=0, logits_at=range(n_read))
        token_probabilities(logits, answer)

    # Where a CPU does not compute in bfloat16, oneDNN has a float32 scratchpad of its own.
    with torch.backends.mkldnn.flags(enabled=False):
        run()
        peak = peak_of_tensors(run)
    assert peak == pytest.approx(n_rows * row_bytes(model.cfg, 20, n_read), rel=0.1)
