"""Tokens that hold padding give every analysis what the same tokens give alone."""

from dataclasses import replace

import pytest
import torch

from diffusion_lens import Query
from diffusion_lens.analysis import answer_probability, causal_trace, patch_grid
from diffusion_lens.analysis.rome import (
    RankOneEdit,
    compute_key,
    compute_keys,
    edit_success,
    optimize_value,
    optimize_values,
    second_moment,
)
from diffusion_lens.analysis.rome.values import ValueSettings
from diffusion_lens.evaluation import chain_rule_nll, monte_carlo_nll

CLOSE = dict(rtol=1e-4, atol=1e-5)
PAD, N_PAD = 2, 4
SIDES = pytest.mark.parametrize("side", ["left", "right"])
# A bidirectional model and a causal one; "dream" below is bidirectional with the shifted readout.
DIRECTIONS = pytest.mark.parametrize("own_pad", ["llada", "llama"], indirect=True)

PAIRED = pytest.mark.parametrize(("own_pad", "side"), [("llada", "right"), ("llama", "left")], indirect=["own_pad"])


def padded(tokens, side):
    """A row with padding, and its first real position."""
    padding = torch.full((N_PAD,), PAD)
    return (torch.cat([padding, tokens]), N_PAD) if side == "left" else (torch.cat([tokens, padding]), 0)


def query_of(model, prompt=(11, 12, 13, 14, 15), token=99):
    """A query of one token after a prompt; on a causal model it stands on the canvas, so that padding may follow."""
    last = token if model.cfg.is_autoregressive else model.cfg.mask_token_id
    return Query(torch.tensor([*prompt, last]), (1, 3), (len(prompt),), (token,))


def with_padding(query, side):
    tokens, shift = padded(query.tokens, side)
    subject, positions = (
        tuple(position + shift for position in span) for span in (query.subject, query.answer_positions)
    )
    return replace(query, tokens=tokens, subject=subject, answer_positions=positions), shift


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
@pytest.mark.parametrize(
    ("own_pad", "method", "side"),
    [
        ("llada", "exact", "left"),
        ("llada", "attribution", "left"),
        ("dream", "exact", "right"),
        ("llama", "exact", "left"),
        ("llama", "exact", "right"),
    ],
    indirect=["own_pad"],
)
def test_a_grid_over_ragged_tokens_is_that_of_the_row_alone(own_pad, side, method):
    short, long = (" ".join(f"w{i}" for i in words) for words in (range(20, 25), range(30, 39)))
    clean = own_pad.to_tokens([short, long], padding_side=side)
    corrupted, shift = clean.clone(), N_PAD * (side == "left")
    corrupted[:, shift + 1] = 77
    alone = [tokens[:1, shift : shift + 5] for tokens in (clean, corrupted)]
    more = dict(method=method, layers=[1])
    grids = patch_grid(own_pad, clean, corrupted, lambda logits: logits[0, shift + 4, 5], ["resid_pre", "z"], **more)
    own = patch_grid(own_pad, *alone, lambda logits: logits[0, 4, 5], ["resid_pre", "z"], **more)
    assert grids["z"].clean == pytest.approx(own_pad(clean)[0, shift + 4, 5].item(), abs=1e-5)
    for site, grid in grids.items():
        torch.testing.assert_close(grid.clean, own[site].clean, **CLOSE)
        torch.testing.assert_close(grid.corrupted, own[site].corrupted, **CLOSE)
        torch.testing.assert_close(grid.scores[:, shift : shift + 5], own[site].scores, **CLOSE)
        beside = grid.scores[0, [position for position in range(9) if not shift <= position < shift + 5]]
        torch.testing.assert_close(beside, beside[:1].expand_as(beside), **CLOSE)


@DIRECTIONS
@SIDES
def test_a_grid_of_a_padded_query(own_pad, side):
    query = query_of(own_pad)
    other, shift = with_padding(query, side)
    corrupted, padded_corrupted = (replace(original, tokens=original.tokens.clone()) for original in (query, other))
    corrupted.tokens[1] = padded_corrupted.tokens[shift + 1] = 77
    own = patch_grid(own_pad, query, corrupted, answer_probability(own_pad, query), "resid_post")
    grid = patch_grid(own_pad, other, padded_corrupted, answer_probability(own_pad, other), "resid_post")
    torch.testing.assert_close(grid.clean, own.clean, **CLOSE)
    torch.testing.assert_close(grid.scores[:, shift : shift + 6], own.scores, **CLOSE)


RESTORATIONS = [dict(kind="resid", severed="mlp"), dict(kind="mlp", window=2), dict(kind="attn")]


@pytest.mark.parametrize(
    ("own_pad", "side", "hooked", "settings"),
    [
        ("llada", "left", False, RESTORATIONS[0]),
        ("llada", "right", True, RESTORATIONS[0]),
        ("dream", "left", False, RESTORATIONS[2]),
        ("dream", "left", True, RESTORATIONS[1]),
        ("llama", "left", False, RESTORATIONS[0]),
        ("llama", "right", False, RESTORATIONS[1]),
        ("llama", "right", True, RESTORATIONS[0]),
    ],
    indirect=["own_pad"],
)
def test_a_trace_of_a_padded_query(own_pad, side, settings, hooked):
    query = query_of(own_pad)
    other, shift = with_padding(query, side)
    hooks = [("blocks.1.hook_attn_out", lambda activation, hook: 0.5 * activation)] if hooked else []
    with own_pad.hooks(fwd_hooks=hooks):
        own, trace = (causal_trace(own_pad, laid_out, noise=0.5, samples=2, **settings) for laid_out in (query, other))
        without_noise = causal_trace(own_pad, other, noise=0.0, samples=1, **settings)
    assert (trace.clean, trace.corrupted) == pytest.approx((own.clean, own.corrupted), rel=1e-4)
    torch.testing.assert_close(trace.scores[shift : shift + 6], own.scores, **CLOSE)
    assert bool((trace.scores - own.corrupted).abs()[[*range(shift), *range(shift + 6, 10)]].max() < 1e-6)
    torch.testing.assert_close(without_noise.scores, torch.full_like(without_noise.scores, own.clean), **CLOSE)


@DIRECTIONS
@SIDES
def test_keys_of_a_padded_query_whatever_its_neighbours(own_pad, side):
    query = query_of(own_pad)
    other, _ = with_padding(query, side)
    neighbours = [query_of(own_pad, range(40, 44)), query_of(own_pad, range(40, 60))]
    own = compute_key(own_pad, query, 1).keys
    torch.testing.assert_close(compute_key(own_pad, other, 1).keys, own, **CLOSE)
    for neighbour in neighbours:
        torch.testing.assert_close(compute_keys(own_pad, [other, neighbour], 1)[0].keys, own, **CLOSE)
        alone = compute_key(own_pad, neighbour, 1).keys
        torch.testing.assert_close(compute_keys(own_pad, [other, neighbour], 1)[1].keys, alone, **CLOSE)


@PAIRED
def test_values_for_a_padded_query(own_pad, side):
    query, essence = query_of(own_pad), query_of(own_pad, (11, 12, 13, 50))
    if not own_pad.cfg.has_mask:
        essence = replace(essence, tokens=essence.tokens[:-1])
    bare = replace(essence, answer_positions=(), answer_tokens=())
    other, _ = with_padding(query, side)
    padded_essence, _ = with_padding(bare, side)
    own = optimize_value(own_pad, query, 1, essence=bare, steps=3)
    value = optimize_value(own_pad, other, 1, essence=padded_essence, steps=3)
    longer = query_of(own_pad, range(40, 60))
    settings = ValueSettings(steps=3)
    together, _ = optimize_values(own_pad, [other, longer], 1, essences=[padded_essence, bare], settings=settings)
    for result in (value, together):
        assert result.probability_before == pytest.approx(own.probability_before, rel=1e-4)
        assert result.probability_after == pytest.approx(own.probability_after, rel=1e-2)
        torch.testing.assert_close(result.losses, own.losses, rtol=1e-2, atol=1e-3)


@PAIRED
def test_an_edit_is_judged_on_padded_probes_as_on_plain_ones(own_pad, side):
    query = query_of(own_pad)
    other, _ = with_padding(query, side)
    edit = RankOneEdit(
        own_pad, 1, compute_key(own_pad, query, 1), optimize_value(own_pad, query, 1, kl_factor=0.0, steps=5)
    )
    own, report = (edit_success(own_pad, edit, {"efficacy": [probe]}) for probe in (query, other))
    torch.testing.assert_close(report.probabilities, own.probabilities, **CLOSE)
    assert torch.equal(report.wins, own.wins)


@PAIRED
def test_the_second_moment_leaves_padding_out(own_pad, side):
    rows = [torch.arange(20, 26), torch.arange(30, 40)]
    batch = torch.stack([padded(rows[0], side)[0], rows[1]])
    own = second_moment(own_pad, rows, 1)
    for corpus in (batch, list(batch)):
        moment = second_moment(own_pad, corpus, 1)
        assert moment.count == own.count == 16
        assert torch.equal(moment.total, own.total)


@pytest.mark.parametrize("own_pad", ["llada"], indirect=True)
def test_a_corpus_whose_padding_is_ambiguous_is_refused(own_pad):
    tokenizer = own_pad.tokenizer
    try:
        tokenizer.pad_token = tokenizer.eos_token
        batch = torch.tensor([[20, 21, 22, 0], [30, 31, 32, 33]])
        with pytest.raises(ValueError, match=r"row 0 of the tokens ends with '<eos>'.* a list of rows without padding"):
            second_moment(own_pad, batch, 1)
        assert second_moment(own_pad, list(batch), 1).count == 8
    finally:
        tokenizer.pad_token = "<pad>"


@DIRECTIONS
@SIDES
def test_the_likelihood_after_a_padded_prompt(own_pad, side):
    prompt, answer = torch.tensor([11, 12, 13]), torch.tensor([21, 22])
    other, _ = padded(prompt, side)
    assert torch.equal(chain_rule_nll(own_pad, other, answer), chain_rule_nll(own_pad, prompt, answer))
    if own_pad.cfg.has_mask:
        own, estimate = (monte_carlo_nll(own_pad, start, answer, samples=4) for start in (prompt, other))
        assert estimate.value == own.value
