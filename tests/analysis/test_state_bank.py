"""Banks of canvases of one query: the mean of single calls, what they reveal, and what is no bank."""

from dataclasses import replace

import pytest
import torch

from diffusion_lens import Query
from diffusion_lens.analysis import (
    CausalTrace,
    StateBank,
    answer_probability,
    causal_trace,
    compute_key,
    optimize_value,
    patch_grid,
    trace_trajectory,
)
from diffusion_lens.analysis.causal_tracing import trace as trace_module
from diffusion_lens.data.toy_facts import load

CLOSE = dict(rtol=1e-4, atol=1e-6)
FACT = load().facts(trained="both", asked="p2d")[3]


def bank_of(every, n=3):
    """Canvases by hand, whose tokens behind the subject differ; the answer is masked on each, or follows them."""
    model, queries = every.model, []
    for i in range(n):
        tokens = every.tokens[0, :9].clone()
        tokens[6:8] = every.tokens[1, i : i + 2]
        if model.cfg.has_mask:
            tokens[8] = model.cfg.blank
        queries.append(Query(tokens, (2, 5), (9 if model.cfg.is_autoregressive else 8,), (3,)))
    return StateBank(tuple(queries))


def other_subject(query):
    tokens = query.tokens.clone()
    tokens[2:5] = torch.tensor([11, 12, 13])
    return replace(query, tokens=tokens)


@pytest.mark.parametrize("settings", [dict(kind="mlp", window=2), dict(severed="attn", corruption="replace")])
def test_the_trace_of_a_bank_is_the_mean_of_the_traces_of_its_canvases(several, settings):
    bank, settings = bank_of(several), dict(noise=0.5, samples=2, **settings)
    trace = causal_trace(several.model, bank, **settings)
    each = [causal_trace(several.model, query, **settings) for query in bank]
    for name in ("scores", "token_scores", "clean_token_scores", "corrupted_token_scores", "indirect_effect"):
        torch.testing.assert_close(
            getattr(trace, name), torch.stack([getattr(one, name) for one in each]).mean(0), **CLOSE
        )
    for name in ("clean", "corrupted", "total_effect"):
        assert getattr(trace, name) == pytest.approx(sum(getattr(one, name) for one in each) / 3, abs=1e-6)
    assert trace.known == all(one.known for one in each)
    assert [i for i, word in enumerate(trace.str_tokens) if word == "…"] == [6, 7]
    assert len({float(one.clean) for one in each}) == 3


@pytest.mark.parametrize("every", ["lit_gpt-mdm"], indirect=True)
def test_the_clean_run_has_a_row_for_each_canvas_and_the_corrupted_one_for_each_sample(every):
    rows = []
    counted = every.model.embed.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    causal_trace(every.model, bank_of(every, 3), noise=0.5, samples=4)
    counted.remove()
    assert rows == [3, 12]


def test_a_bank_of_one_canvas_is_the_query(every):
    bank = bank_of(every, 1)
    (query,), settings = bank, dict(noise=0.5, samples=2)
    one, other = (causal_trace(every.model, given, **settings) for given in (bank, query))
    for name in ("scores", "token_scores"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    for name in ("clean", "corrupted", "str_tokens", "known"):
        assert getattr(one, name) == getattr(other, name)


def test_the_grid_of_a_bank_is_the_mean_of_the_grids_of_its_canvases(summed):
    model, bank = summed.model, bank_of(summed)
    corrupted = (
        bank.after(other_subject(bank.queries[0]))
        if not model.cfg.is_autoregressive
        else StateBank(tuple(map(other_subject, bank)))
    )
    for settings in (dict(sites="resid_post"), dict(sites="z", method="attribution", check=0)):
        grid = patch_grid(model, bank, corrupted, answer_probability(model, bank), **settings)
        each = [
            patch_grid(model, one, other, answer_probability(model, one), **settings)
            for one, other in zip(bank, corrupted, strict=True)
        ]
        torch.testing.assert_close(grid.scores, torch.stack([one.scores for one in each]).mean(dim=0), **CLOSE)
        torch.testing.assert_close(grid.clean, torch.stack([one.clean for one in each]).mean(), **CLOSE)
        assert grid.effect.abs().max() > 1e-5


def test_the_key_of_a_bank_is_the_mean_and_its_value_serves_all_canvases(several):
    model, bank, layer = several.model, bank_of(several), several.dense_layers[0]
    keys = [compute_key(model, query, layer).vector for query in bank]
    torch.testing.assert_close(compute_key(model, bank, layer).vector, torch.stack(keys).mean(dim=0), **CLOSE)
    settings = dict(kl_factor=0.0, weight_decay=0.0, stop_below=0.0)
    first = [optimize_value(model, query, layer, steps=1, **settings).losses[0, 1] for query in bank]
    value = optimize_value(model, bank, layer, steps=4, lr=0.1, **settings)
    torch.testing.assert_close(value.losses[0, 1], torch.stack(first).mean(), **CLOSE)
    assert value.losses[-1, 0] < value.losses[0, 0]
    one = optimize_value(model, StateBank(bank.queries[:1]), layer, steps=3, lr=0.1, **settings)
    alone = optimize_value(model, bank.queries[0], layer, steps=3, lr=0.1, **settings)
    assert torch.equal(one.vector, alone.vector)


@pytest.mark.parametrize("every", ["lit_gpt-mdm"], indirect=True)
def test_canvases_that_do_not_fit_together_are_run_apart(every, monkeypatch, tmp_path):
    bank, settings = bank_of(every, 5), dict(noise=0.5, samples=2)
    whole, sizes = causal_trace(every.model, bank, **settings), []
    runs = trace_module.RestoredRuns

    def few_rows(clean, corrupted, *args):
        if corrupted.n_rows > 4:
            raise ValueError("max_bytes is too small")
        sizes.append(corrupted.n_rows)
        return runs(clean, corrupted, *args)

    monkeypatch.setattr(trace_module, "RestoredRuns", few_rows)
    parts = causal_trace(every.model, bank, **settings)
    assert sizes == [4, 2, 4]
    torch.testing.assert_close(parts.scores, whole.scores, **CLOSE)
    assert parts.clean == pytest.approx(whole.clean)
    assert parts.str_tokens == whole.str_tokens
    assert parts.record == whole.record
    loaded = CausalTrace.load(whole.save(tmp_path / "trace.safetensors"))
    assert loaded.record["bank"]["tokens"] == [query.tokens.tolist() for query in bank]
    monkeypatch.undo()
    with pytest.raises(ValueError, match="max_bytes=10 is too small"):
        causal_trace(every.model, bank, max_bytes=10, **settings)


@pytest.mark.parametrize("tiny", ["tiny-mdm", "tiny-uniform"], indirect=True)
def test_a_bank_reveals_the_text_that_the_model_writes_around_the_answer(tiny):
    query = FACT.to_query(tiny, n_masks=7, first_tokens=1)
    bank = StateBank.of(tiny, query, n=40, seed=3)
    answer, start = list(query.answer_positions), min(query.answer_positions)
    filled = query.tokens.clone()
    filled[answer] = torch.tensor(query.answer_tokens)
    prompt = filled if tiny.cfg.has_mask else filled[: start + 1]
    text = tiny.denoise(prompt[None], length=len(filled)).tokens[0]
    numbers = []
    for state in bank:
        revealed = state.tokens != query.tokens
        assert torch.equal(state.tokens[revealed], text[revealed])
        assert not revealed[: start + 1].any()
        numbers.append(int(revealed.sum()))
    assert {0, 6} <= {*numbers} if tiny.cfg.has_mask else len({*numbers}) > 3
    assert torch.equal(bank.tokens, StateBank.of(tiny, query, n=40, seed=3).tokens)
    assert not torch.equal(bank.tokens, StateBank.of(tiny, query, n=40, seed=4).tokens)
    halves = StateBank.of(tiny, query, n=4, shares=[0, 1])
    assert torch.equal(halves.tokens[0], query.tokens)
    assert torch.equal(halves.tokens[2], query.tokens)
    assert torch.equal(halves.tokens[1, start + 1 :], text[start + 1 :])
    assert len(StateBank.of(tiny, query, n=2, shares=0.5)) == 2
    assert causal_trace(tiny, bank, noise=0.4, samples=1, layers=[0], positions=[3]).scores.shape == (1, 1)


@pytest.mark.parametrize("tiny", ["tiny-mdm", "tiny-block"], indirect=True)
def test_a_bank_of_a_run_has_its_canvases_on_which_the_answer_is_masked(tiny):
    query = FACT.to_query(tiny, n_masks=7, first_tokens=1)
    run = tiny.denoise(query.tokens[None].repeat(3, 1), steps=8, temperature=1.0, seed=2)
    (answer,) = query.answer_positions
    bank = StateBank.from_trajectory(tiny, run, query)
    expected = {
        tuple(tiny.cfg.readable(run.canvases[step, row]).tolist())
        for row in range(3)
        for step in range(int(run.revealed_at[row, answer]) + 1)
    }
    assert {tuple(state.tokens.tolist()) for state in bank} == expected
    assert len(bank) == len(expected)
    assert bank.origin["steps"] == list(range(int(run.revealed_at[:, answer].max()) + 1))
    first = StateBank.from_trajectory(tiny, run, query, steps=[0])
    assert torch.equal(first.tokens, query.tokens[None])
    with pytest.raises(ValueError, match="before step 8 the answer is not wholly masked, or there is no such step"):
        StateBank.from_trajectory(tiny, run, query, steps=[0, 8])
    other = replace(query, tokens=query.tokens.roll(1))
    with pytest.raises(ValueError, match="the run has another prompt or length than the query"):
        StateBank.from_trajectory(tiny, run, other)


def test_a_bank_of_a_run_has_the_probability_of_the_answer_in_the_run(every):
    """Or is refused, where the network reads more than its canvas."""
    model, tokens = every.model, every.tokens[0, :13].clone()
    if model.cfg.has_mask:
        tokens[6:] = model.cfg.blank
    prompt = tokens if model.cfg.has_mask else tokens[:7]
    run = model.denoise(prompt[None], steps=13, length=13, seed=2)
    query = Query(tokens, (2, 4), (7,), (int(run.tokens[0, 7]),))
    reads_more = model.cfg.time_conditioning or model.cfg.self_conditioning or model.cfg.counts_from_prompt
    if model.cfg.is_autoregressive or reads_more:
        for make in (lambda: StateBank.of(model, query), lambda: StateBank.from_trajectory(model, run, query)):
            with pytest.raises(ValueError, match=r"a query has one canvas|beside its canvas.*trace_trajectory"):
                make()
        return
    settings = dict(noise=0.3, samples=1, layers=[0], positions=[2])
    bank = StateBank.from_trajectory(model, run, query)
    steps = {tuple(run.canvases[step, 0].tolist()): step for step in bank.origin["steps"]}
    by_step = trace_trajectory(model, query, steps.values(), trajectory=run, **settings)
    assert causal_trace(model, bank, **settings).clean == pytest.approx(float(by_step.clean.mean()), abs=1e-6)


@pytest.mark.parametrize("tiny", ["tiny-ar"], indirect=True)
def test_a_causal_model_has_one_canvas(tiny):
    query = FACT.to_query(tiny, first_tokens=1)
    run = tiny.denoise(FACT.prompt, max_new_tokens=2)
    for make in (lambda: StateBank.of(tiny, FACT), lambda: StateBank.from_trajectory(tiny, run, query)):
        with pytest.raises(ValueError, match="so a query has one canvas"):
            make()


@pytest.mark.parametrize("tiny", ["tiny-block"], indirect=True)
def test_a_model_that_writes_by_blocks_reads_no_random_canvases(tiny):
    with pytest.raises(ValueError, match=r"writes block by block.*StateBank\.from_trajectory"):
        StateBank.of(tiny, FACT.to_query(tiny, n_masks=7, first_tokens=1))


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_what_is_no_bank(tiny):
    query = FACT.to_query(tiny, n_masks=7, first_tokens=1)
    with pytest.raises(ValueError, match="no masked position beside those of its answer"):
        StateBank.of(tiny, FACT.to_query(tiny))
    with pytest.raises(ValueError, match=r"shares=1\.5; a share of the masked positions is between 0 and 1"):
        StateBank.of(tiny, query, shares=1.5)
    with pytest.raises(ValueError, match="n=0; it must be at least 1"):
        StateBank.of(tiny, query, n=0)
    with pytest.raises(ValueError, match="a bank of no canvases"):
        StateBank(())
    longer = FACT.to_query(tiny, n_masks=8, first_tokens=1)
    with pytest.raises(ValueError, match=r"canvas 1 of the bank has the length \d+, and canvas 0 \d+"):
        StateBank((query, longer))
    bank = StateBank.of(tiny, query, n=2)
    with pytest.raises(ValueError, match="the query has 8 positions from its answer on, 1 of them its answer's"):
        bank.after(longer)
    shorter = load().facts(trained="both", asked="p2d")[9]
    moved = bank.after(shorter.to_query(tiny, n_masks=7, first_tokens=1))
    assert torch.equal(moved.tokens[:, -7:], bank.tokens[:, -7:])
    with pytest.raises(ValueError, match="the clean run has 2 rows and the corrupted run 1"):
        patch_grid(tiny, bank, query, answer_probability(tiny, bank), "resid_post")
