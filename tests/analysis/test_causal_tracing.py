"""Grids equal ROME's own tracer, and the laws of a trace hold."""

import pytest
import torch

from diffusion_lens import Fact, Query
from diffusion_lens.analysis import CausalTrace, causal_trace, noise_scale
from diffusion_lens.hook_names import resid_post


def query_of(golden, case, tokens):
    place = case["prompt_len"] - (golden.kind == "mdm")
    return Query(
        tokens=tokens[0],
        subject=tuple(case["subject_range"]),
        answer_positions=(place,),
        answer_tokens=(case["answer"],),
    )


@pytest.fixture
def query(either):
    return query_of(either, either.cases("causal_trace")[0], either.tensors("causal_trace")["case0.tokens"])


def test_grids_are_romes(golden):
    recorded = golden.tensors("causal_trace")
    for case in golden.cases("causal_trace"):
        prefix = f"case{case['case']}."
        query = query_of(golden, case, recorded[prefix + "tokens"])
        settings = dict(noise=case["noise"], samples=case["samples"], seed=1)
        trace = causal_trace(golden.model, query, **settings)
        close = dict(rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.tensor(trace.clean), recorded[prefix + "high_score"].float(), **close)
        torch.testing.assert_close(torch.tensor(trace.corrupted), recorded[prefix + "low_score"].float(), **close)
        torch.testing.assert_close(trace.scores, recorded[prefix + "scores.resid"], **close)
        for window in case["windows"]:
            for kind in ("mlp", "attn"):
                windowed = causal_trace(golden.model, query, kind=kind, window=window, **settings).scores
                torch.testing.assert_close(windowed, recorded[f"{prefix}scores.{kind}.window{window}"], **close)


def test_a_cell_is_what_ordinary_hooks_give(either, query):
    """One cell the slow way: the whole network, one place restored by hand."""
    model, layer, place = either.model, 1, 3
    start, stop = query.subject
    trace = causal_trace(model, query, noise=0.5, samples=4, seed=9)
    _, clean = model.run_with_cache(query.tokens[None])
    import numpy as np

    drawn = 0.5 * np.random.RandomState(9).randn(4, stop - start, model.cfg.d_model)

    def corrupt(embedding, hook):
        embedding = embedding.clone()
        embedding[:, start:stop] += torch.from_numpy(drawn).float()
        return embedding

    def put_back(resid, hook):
        resid = resid.clone()
        resid[:, place] = clean[resid_post(layer)][0, place]
        return resid

    logits = model.run_with_hooks(
        query.tokens.repeat(4, 1), fwd_hooks=[("hook_embed", corrupt), (resid_post(layer), put_back)]
    )
    row = query.answer_positions[0] - (either.kind == "ar")
    probability = logits[:, row].softmax(-1)[:, query.answer_tokens[0]].mean()
    torch.testing.assert_close(trace.scores[place, layer], probability.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["resid", "mlp", "attn"])
def test_no_noise_no_effect(either, query, kind):
    trace = causal_trace(either.model, query, kind=kind, noise=0.0, samples=2)
    assert trace.total_effect == pytest.approx(0, abs=1e-6)
    assert trace.indirect_effect.abs().max() < 1e-6


def test_restoring_the_place_that_is_read_after_the_last_block_is_the_clean_run(either, query):
    trace = causal_trace(either.model, query, noise=0.5, samples=3)
    read = query.answer_positions[0] - (either.kind == "ar")
    assert trace.scores[read, -1].item() == pytest.approx(trace.clean, abs=1e-6)
    others = [place for place in range(len(query.tokens)) if place != read]
    assert (trace.scores[others, -1] - trace.corrupted).abs().max() < 1e-6


def test_before_the_subject_a_causal_model_has_nothing_to_restore(either, query):
    effect = causal_trace(either.model, query, noise=0.5, samples=3).indirect_effect[: query.subject[0]].abs().max()
    assert (effect < 1e-6) == (either.kind == "ar")


def test_how_cells_are_packed_changes_nothing(either, query):
    wide = causal_trace(either.model, query, noise=0.5, samples=3)
    narrow = causal_trace(either.model, query, noise=0.5, samples=3, max_batch=3)
    torch.testing.assert_close(wide.scores, narrow.scores, rtol=0, atol=1e-6)


def test_a_longer_answer_is_the_product_of_its_tokens(either, query):
    model = either.model
    n = len(query.tokens)
    if either.kind == "mdm":
        both = Query(query.tokens, query.subject, (n - 2, n - 1), (11, 12))
        logits = model(query.tokens[None])[0, [n - 2, n - 1]]
    else:
        both = Query(torch.cat([query.tokens, torch.tensor([11])]), query.subject, (n, n + 1), (11, 12))
        logits = model(both.tokens[None])[0, [n - 1, n]]
    expected = logits.softmax(-1)[[0, 1], [11, 12]].prod()
    assert causal_trace(model, both, noise=0.5, samples=2).clean == pytest.approx(expected.item(), rel=1e-5)


def test_noise_scale_is_three_standard_deviations(tiny):
    embedded = tiny.W_E[tiny.to_tokens("Gustav Geisser")[0]]
    expected = 3 * embedded.std(correction=1).item()
    assert noise_scale(tiny, ["Gustav Geisser"]) == pytest.approx(expected, rel=1e-5)


def test_the_embedded_pair_reads_late(tiny):
    """On a fact it knows, the place that is read carries the effect from the first block on."""
    fact = Fact("Gustav Geisser is the", "Gustav Geisser", " brave drummer of Rolsen.")
    query = fact.to_query(tiny, answer_places=10, first_tokens=1)
    trace = causal_trace(tiny, query, noise=noise_scale(tiny, [query]))
    read = 4 if tiny.cfg.model_name == "tiny-mdm" else 3
    assert trace.clean > 0.9
    assert trace.total_effect > 0.3
    assert trace.indirect_effect[:, 1:].sum(1).argmax() == read


def test_save_load_and_plot(tiny, tmp_path):
    fact = Fact("Gustav Geisser is the", "Gustav Geisser", " brave drummer of Rolsen.")
    trace = causal_trace(tiny, fact.to_query(tiny), noise=0.2, samples=2, seed=4)
    again = CausalTrace.load(trace.save(tmp_path / "trace.safetensors"))
    assert torch.equal(again.scores, trace.scores)
    for name in ("clean", "corrupted", "str_tokens", "subject", "record"):
        assert getattr(again, name) == getattr(trace, name)
    assert {"seed", "samples", "noise", "model", "weights_sha256", "versions"} <= set(again.record)
    ax = again.plot()
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[:3] == ["Gustav*", "Geisser*", "is"]
    image = ax.get_images()[0]
    torch.testing.assert_close(torch.from_numpy(image.get_array().data), trace.scores)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kind="residual"), "unknown kind 'residual'"),
        (dict(samples=0), "samples=0"),
        (dict(noise=float("nan")), "noise=nan"),
        (dict(noise=-1.0), "noise=-1.0"),
        (dict(kind="mlp", window=0), "window=0"),
        (dict(max_batch=0), "max_batch=0"),
        (dict(samples=20, max_batch=4), "max_batch=4 does not hold one cell of 20 draws"),
    ],
)
def test_bad_settings(either, query, options, message):
    with pytest.raises(ValueError, match=message):
        causal_trace(either.model, query, **{"noise": 0.5, **options})


def test_a_query_without_an_answer(either, query):
    with pytest.raises(ValueError, match="has no answer"):
        causal_trace(either.model, Query(query.tokens, query.subject, (), ()), noise=0.5)


@pytest.mark.parametrize(("position", "token"), [(8, 512), (8, 99999), (8, -1)])
def test_an_answer_that_cannot_be_written(either, query, position, token):
    with pytest.raises(ValueError, match=f"cannot write the answer tokens .{token}"):
        causal_trace(either.model, Query(query.tokens, query.subject, (position,), (token,)), noise=0.5)


def test_nothing_precedes_the_first_place_of_a_causal_model(either, query):
    first = Query(query.tokens, query.subject, (0,), (3,))
    if either.kind == "mdm":
        assert causal_trace(either.model, first, noise=0.5, samples=1).clean > 0
        return
    with pytest.raises(ValueError, match="nothing precedes place 0"):
        causal_trace(either.model, first, noise=0.5)


def test_noise_scale_needs_subjects(tiny):
    with pytest.raises(ValueError, match="no subjects"):
        noise_scale(tiny, [])
