"""The search computes few positions above the edited layer, and finds what it finds on whole canvases."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from oracles.plain_rome import plain_search

from diffusion_lens import Query
from diffusion_lens.analysis.rome import ValueSettings, optimize_values
from diffusion_lens.model.noise import hidden_tokens
from diffusion_lens.model.packing import rows_of_least_work

GENTLE = ValueSettings(lr=0.05, steps=3)  # steps small enough that round-off stays small


def request_of(model, seed, prefixes=(0, 5)):
    """Prompts with six tokens, of which the second and third are the subject, and an object of two; their essence."""
    tokens = torch.randint(10, 500, (20,), generator=torch.Generator().manual_seed(seed)).tolist()
    canvas = [31] if model.cfg.is_autoregressive else hidden_tokens(model.cfg, 2)
    queries = [
        Query(torch.tensor(tokens[:n] + tokens[10:16] + canvas), (n + 1, n + 3), (n + 6, n + 7), (31, 32))
        for n in prefixes
    ]
    ending = [7, 8] if model.cfg.is_autoregressive else [7, 8, *hidden_tokens(model.cfg, 1)]
    return queries, Query(torch.tensor(tokens[11:13] + ending), (0, 2), (), ())


def on_whole_canvases(model, requests, layer, **settings):
    """A hook in the last block expects whole canvases, so all of them are computed."""
    with model.hooks(fwd_hooks=[(f"blocks.{model.cfg.n_layers - 1}.hook_resid_post", lambda resid, hook: None)]):
        return optimize_values(model, requests, layer, **settings)


def assert_same(values, others):
    for value, other in zip(values, others, strict=True):
        torch.testing.assert_close(value.losses, other.losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(value.vector, other.vector, rtol=1e-3, atol=1e-4)
        assert value.probability_after == pytest.approx(other.probability_after, rel=1e-3)


def test_positions_that_delta_moves_are_enough(summed, monkeypatch):
    """On summed kind, with the canvases in two rows of different lengths."""
    monkeypatch.setattr(
        "diffusion_lens.analysis.rome.canvases.rows_of_least_work",
        lambda lengths, *_: [min(i, 1) for i in range(len(lengths))],
    )
    requests, essences = zip(*(request_of(summed.model, seed) for seed in range(2)), strict=True)
    settings = dict(essences=essences, settings=GENTLE)
    values = optimize_values(summed.model, requests, 0, **settings)
    assert_same(values, on_whole_canvases(summed.model, requests, 0, **settings))
    assert all(value.probability_after != value.probability_before for value in values)


@pytest.mark.parametrize("causal", [False, True])
def test_biases_of_scores_are_those_of_the_positions(specimen, causal):
    config = {"n_layers": 3, "d_model": 32, "n_heads": 4, "n_key_value_heads": 2, "d_head": 8, "d_mlp": 48}
    sizes = {"n_ctx": 32, "d_vocab": 512, "d_vocab_out": 511, "positional_embedding_type": "alibi"}
    kind = {"attention_dir": "causal", "readout": "shifted", "mask_token_id": None}
    kind = kind if causal else {"attention_dir": "bidirectional", "readout": "in_place", "mask_token_id": 511}
    model = specimen({"family": "diffusion_lens", "name": "small", **config, **sizes, **kind}).model
    queries, essence = request_of(model, 0)
    losses, vector = plain_search(model, queries, essence, 0, GENTLE)
    [value] = optimize_values(model, [queries], 0, essences=[essence], settings=GENTLE)
    torch.testing.assert_close(value.losses, losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(value.vector, vector, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("every", ["sdar"], indirect=True)
def test_an_object_in_a_block_before_the_subject_is_read_there(every):
    """δ never reaches it, but the essence, so only the divergence grows."""
    mask = every.model.cfg.mask_token_id
    query = Query(torch.tensor([11, 12, mask, mask, 13, 14, 15, 16]), (5, 7), (2, 3), (31, 32))
    settings = dict(essences=[request_of(every.model, 0)[1]], settings=GENTLE)
    [value], [other] = (search(every.model, [query], 0, **settings) for search in (optimize_values, on_whole_canvases))
    torch.testing.assert_close(value.losses, other.losses, rtol=1e-4, atol=1e-5)
    assert value.losses[:, 1].unique().numel() == 1


@pytest.mark.parametrize("every", ["nemotron-prompt"], indirect=True)
def test_blocks_of_all_canvases_begin_where_it_is_said(every):
    """Also of those that go on when others have ended."""
    requests = [request_of(every.model, seed, (0,))[0] for seed in range(3)]
    with every.model.at_block(4):
        settings = ValueSettings(lr=0.05, steps=4, kl_factor=0.0, stop_below=0.0)
        values = optimize_values(every.model, requests, 0, settings=settings)
        settings = replace(settings, stop_below=sorted(float(value.losses[2, 0]) for value in values)[1])
        values = optimize_values(every.model, requests, 0, settings=settings)
        assert len({len(value.losses) for value in values}) > 1
        assert_same(values, on_whole_canvases(every.model, requests, 0, settings=settings))
    elsewhere = optimize_values(every.model, requests, 0, settings=settings)
    assert not torch.allclose(values[0].losses[0], elsewhere[0].losses[0])


@pytest.mark.parametrize(
    ("every", "moved", "known"),
    [("lit_gpt-mdm", 8 + 13 + 5, 0), ("lit_gpt-ar", 5 + 5 + 3, 2 + 7 + 1)],
    indirect=["every"],
)
def test_an_iteration_computes_what_delta_moves_and_a_row_depends_on(every, moved, known, token_layers):
    """On a causal model from the subject's last token on; what comes before that is computed once."""
    (queries, essence), n_above = request_of(every.model, 0), every.model.cfg.n_layers - 1
    padded = 3 * max(len(query.tokens) for query in queries)
    for steps in (1, 4):
        settings = ValueSettings(lr=0.05, steps=steps, stop_below=0.0)
        with token_layers() as counted:
            optimize_values(every.model, [queries], 0, essences=[essence], settings=settings)
        assert counted == [padded + n_above * (known + steps * moved)]


class Mean(torch.nn.Module):
    """A module of somebody else, which mixes the positions of a canvas."""

    def forward(self, x):
        return x.mean(dim=1, keepdim=True).expand_as(x)


def test_modules_that_may_mix_positions_see_whole_canvases(specimen, configs):
    model = specimen(configs["llama"]).model
    model.blocks[1].mlp = Mean()
    queries, essence = request_of(model, 0)
    losses, _ = plain_search(model, queries, essence, 0, GENTLE)
    [value] = optimize_values(model, [queries], 0, essences=[essence], settings=GENTLE)
    torch.testing.assert_close(value.losses, losses, rtol=1e-4, atol=1e-5)


def test_rows_take_the_least_work():
    """Without a cost of keys everything stands in one row; with nothing else, equal sequences stand alone."""
    assert set(rows_of_least_work([5, 3, 8], 100, 0)) == {0}
    assert sorted(rows_of_least_work([4] * 6, 1, 1000)) == list(range(6))
    for per_key, lengths in product((1, 10, 100), ([9, 1, 1, 1], [3, 3, 3, 3, 2, 2], [7])):
        rows = rows_of_least_work(lengths, 100, per_key)
        work = work_of(rows, lengths, per_key)
        assert work <= work_of([0] * len(lengths), lengths, per_key)
        assert work <= work_of(range(len(lengths)), lengths, per_key)


def work_of(rows, lengths, per_key):
    filled = [sum(length for row, length in zip(rows, lengths, strict=True) if row == i) for i in set(rows)]
    return len(filled) * max(filled) * (100 + per_key * max(filled))
