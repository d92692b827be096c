"""A trace takes the memory of the weights and at most the budget it was given."""

import re
from functools import cache, partial

import pytest
import torch
from oracles.memory import peak_of_tensors, resident_bytes

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer, Query
from diffusion_lens.analysis import causal_trace
from diffusion_lens.analysis.causal_tracing.trace import RestoredRuns
from diffusion_lens.analysis.engine.kept_run import KeptRun
from weight_conversion import Architecture

NOISE = dict(noise=0.5, samples=4)
KINDS = [("resid", None), ("resid", "mlp"), ("resid", "attn"), ("mlp", None), ("attn", None)]
by_kind = pytest.mark.parametrize(
    ("variant", "kind", "severed"),
    [(variant, *kind) for variant, kind in zip(["masked", "causal"] * 3, [*KINDS, KINDS[0]], strict=True)],
    ids=lambda name: name or "whole",
)
by_variant = pytest.mark.parametrize("variant", ["masked", "causal"])


@cache
def build(variant, dtype=torch.float32, **changes):
    """A deep narrow model with random weights; grouped heads."""
    masked = variant == "masked"
    facts = dict(n_layers=12, d_model=64, n_heads=4, n_key_value_heads=2, d_head=16, d_mlp=256, d_vocab_out=100)
    facts |= changes
    architecture = Architecture(
        family="lit_gpt",
        name=variant,
        d_vocab=facts["d_vocab_out"] + masked,
        n_ctx=64,
        attention_dir="bidirectional" if masked else "causal",
        readout="in_place" if masked else "shifted",
        mask_token_id=facts["d_vocab_out"] if masked else None,
        **facts,
    )
    return HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu", dtype=dtype))


def last_position_query(model, n_pos=20):
    """A query whose answer is at the last position, or on a causal model at the next one."""
    tokens, mask = torch.arange(n_pos) + 3, model.cfg.mask_token_id
    if mask is None:
        return Query(tokens, (2, 5), (n_pos,), (7,))
    tokens[-1] = mask
    return Query(tokens, (2, 5), (n_pos - 1,), (7,))


def needed_bytes(model, query, **settings):
    """The two numbers of the error message: bytes kept, and bytes of one cell."""
    with pytest.raises(ValueError, match="max_bytes=1 is too small") as raised:
        causal_trace(model, query, **settings, max_bytes=1)
    numbers = re.search(r"keep ([\d,]+) bytes, and one cell of 4 rows takes ([\d,]+) more", str(raised.value))
    return [int(number.replace(",", "")) for number in numbers.groups()]


def stored_bytes(thing):
    """Bytes of all tensors that an object has, each storage once."""
    storages, todo = {}, [*vars(thing).values()]
    while todo:
        value = todo.pop()
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, KeptRun):
            todo += [value.activations, value.logits]
    return sum(storages.values())


@by_kind
def test_what_is_kept_is_counted(variant, kind, severed, monkeypatch):
    model, runs = build(variant, n_layers=4), []

    def remember(*args, **kwargs):
        runs.append(RestoredRuns(*args, **kwargs))
        return runs[-1]

    monkeypatch.setattr("diffusion_lens.analysis.causal_tracing.trace.RestoredRuns", remember)
    settings = dict(kind=kind, severed=severed, window=3, **NOISE)
    causal_trace(model, last_position_query(model), **settings, positions=[-1])
    kept = stored_bytes(runs[0])
    counted, _ = needed_bytes(model, last_position_query(model), **settings)
    assert kept <= counted <= 1.1 * kept


@by_kind
def test_a_budget_too_small_says_how_much_is_needed(variant, kind, severed):
    """With so much every tensor fits, from the first pass to the last cell; with a byte less nothing begins."""
    model = build(variant, n_layers=4)
    settings = dict(kind=kind, severed=severed, window=3, layers=[1, 2, 3], positions=[2, 11, -1], **NOISE)
    trace = partial(causal_trace, model, last_position_query(model), **settings)
    needed = sum(needed_bytes(model, last_position_query(model), **settings))
    assert needed / 5 < peak_of_tensors(lambda: trace(max_bytes=needed)) <= needed
    with pytest.raises(ValueError, match=f"max_bytes={needed - 1:,} is too small"):
        trace(max_bytes=needed - 1)


@by_variant
def test_a_budget_too_small_is_refused_before_anything_is_run(variant, token_layers):
    model = build(variant, n_layers=2)
    with token_layers() as counted, pytest.raises(ValueError, match="max_bytes=1 is too small"):
        causal_trace(model, last_position_query(model), **NOISE, max_bytes=1)
    assert counted == [0]


def test_a_hundred_traces_keep_no_memory(annotations_unchecked):
    """A trace holds more than 300 KB at once. What one kept, such as a stream of 20 KB, all would keep."""
    model = build("masked", n_layers=2)
    query = last_position_query(model)

    def traces(count):
        for _ in range(count):
            causal_trace(model, query, positions=[-1], layers=[0], **NOISE)
        return resident_bytes()

    after_warming_up = traces(20)
    assert traces(100) - after_warming_up < 100 * 10_000
