"""v*: the plain procedure finds the same, many requests find what each finds alone, nothing is left behind."""

from dataclasses import replace

import pytest
import torch
from oracles.plain_rome import plain_search
from refusals import unrefused

from diffusion_lens import Fact, Query
from diffusion_lens.analysis import noise_scale
from diffusion_lens.analysis.rome import (
    ValueResult,
    ValueSettings,
    optimize_value,
    optimize_values,
    query_with_prefixes,
)
from diffusion_lens.data import toy_facts
from diffusion_lens.model.noise import hidden_tokens

GENTLE = dict(lr=0.05, steps=6)  # steps small enough that round-off stays small
GUSTAV = Fact("Gustav Geisser is the", "Gustav Geisser", " brave drummer of Rolsen.")


def request_of(model, seed, answer=(31, 32, 33), prefixes=(0, 3)):
    """Prompts of several lengths on this model's canvas, and their essence."""
    tokens = torch.randint(10, 500, (20,), generator=torch.Generator().manual_seed(seed)).tolist()
    canvas = list(answer[:-1]) if model.cfg.is_autoregressive else hidden_tokens(model.cfg, len(answer))
    queries = [
        Query(
            torch.tensor(tokens[:n] + tokens[10:16] + canvas),
            (n + 1, n + 3),
            tuple(range(n + 6, n + 6 + len(answer))),
            tuple(answer),
        )
        for n in prefixes
    ]
    ending = [7, 8] if model.cfg.is_autoregressive else [7, 8, *hidden_tokens(model.cfg, 1)]
    return queries, Query(torch.tensor(tokens[11:13] + ending), (0, 2), (), ())


@pytest.fixture
def request_and_essence(every):
    return request_of(every.model, seed=0)


both_variants = pytest.mark.parametrize("every", ["lit_gpt-mdm", "lit_gpt-ar"], indirect=True)
# A masked model read in place, one with the shifted readout, and a causal model: with the first and the last layer.
readouts_and_layers = pytest.mark.parametrize(
    ("every", "layer"),
    [("lit_gpt-mdm", 0), ("lit_gpt-mdm", 2), ("dream", 0), ("llama", 0), ("lit_gpt-ar", 2), ("uniform", 0)],
    indirect=["every"],
)


@readouts_and_layers
def test_the_plain_procedure_finds_the_same(every, request_and_essence, layer):
    """The whole network and all logits in every iteration, as ROME's code runs it."""
    losses, vector = plain_search(every.model, *request_and_essence, layer, ValueSettings(**GENTLE))
    value = optimize_value(every.model, request_and_essence[0], layer, essence=request_and_essence[1], **GENTLE)
    torch.testing.assert_close(value.losses, losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(value.vector, vector, rtol=1e-3, atol=1e-4)
    if layer == 2:  # the last: nothing carries δ to the positions that are read
        assert (value.losses[:, 2:] == 0).all()
        assert torch.equal(value.vector, value.initial)
    else:
        assert (value.losses[1:, 1:] > 0).all()
        assert value.losses[-1, 1] < value.losses[0, 1]


def test_loss_is_the_mean_over_prompts_each_run_alone(several):
    """No prompt sees another's padding, with δ and without."""
    model, (queries, essence), layer = several.model, request_of(several.model, seed=0), several.dense_layers[-2]
    value = optimize_value(model, queries, layer, essence=essence, **GENTLE)
    for row, delta in ((0, torch.zeros_like(value.delta)), (-1, value.delta)):
        log_p = []
        for query in queries:

            def edit(out, hook, position=query.subject[1] - 1, delta=delta):
                out = out.clone()
                out[:, position] += delta
                return out

            logits = model.run_with_hooks(query.tokens[None], fwd_hooks=[(f"blocks.{layer}.hook_mlp_out", edit)])
            rows = [position - (model.cfg.readout == "shifted") for position in query.answer_positions]
            if model.cfg.head != "logits":  # [MASK] takes no part in the softmax
                logits[..., model.cfg.mask_token_id] = -1e6
            log_p.append(logits.detach()[0].log_softmax(-1)[rows, query.answer_tokens])
        assert value.losses[row, 1].item() == pytest.approx(-torch.stack(log_p).mean().item(), abs=1e-5)
        probability = value.probability_after if row else value.probability_before
        assert probability == pytest.approx(log_p[0].sum().exp().item(), rel=1e-4)


@pytest.mark.parametrize("either", ["mdm", "ar"], indirect=True)
def test_requests_together_are_requests_alone(either):
    check_together(either.model)


@pytest.mark.parametrize("worth_a_pass", [0, 1000])
@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_requests_on_whole_canvases_are_requests_alone(either, monkeypatch, worth_a_pass):
    """Hooks above the layer see whole canvases, those of essences in the same batch or in one of their own."""
    monkeypatch.setattr("diffusion_lens.analysis.rome.values._PADDING_PER_PASS", worth_a_pass)
    lengths = set()
    with either.model.hooks(fwd_hooks=[("blocks.2.hook_resid_post", lambda x, hook: lengths.add(x.shape[1]))]):
        check_together(either.model)
    assert len(lengths) == (2 if worth_a_pass == 0 else 1)


def check_together(model):
    """Some are done early; the others go on as if nothing had happened."""
    requests, essences = zip(*(request_of(model, seed, (31 + seed,)) for seed in range(3)), strict=True)

    def alone(**settings):
        return [
            optimize_value(model, request, 1, essence=essence, lr=0.05, steps=6, **settings)
            for request, essence in zip(requests, essences, strict=True)
        ]

    # The request that begins lowest is done in the middle of its descent, another later or never.
    lowest = min(alone(), key=lambda value: float(value.losses[0, 0]))
    settings = ValueSettings(lr=0.05, steps=6, stop_below=float(lowest.losses[3:5, 0].mean()))
    together = optimize_values(model, requests, 1, essences=essences, settings=settings)
    packed = optimize_values(model, requests, 1, essences=essences, settings=settings, max_batch=1)
    assert len({len(value.losses) for value in together}) > 1
    for same, *others in zip(alone(stop_below=settings.stop_below), together, packed, strict=True):
        for value in others:
            torch.testing.assert_close(value.losses, same.losses, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(value.vector, same.vector, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(value.key, same.key, rtol=1e-4, atol=1e-5)
            assert value.probability_after == pytest.approx(same.probability_after, rel=1e-3)


@both_variants
def test_delta_stays_in_its_ball(every, request_and_essence):
    value = optimize_value(
        every.model, request_and_essence[0], 1, essence=request_and_essence[1], lr=5.0, steps=3, clamp_norm_factor=0.5
    )
    assert value.delta.norm().item() == pytest.approx(0.5 * value.initial.norm().item(), rel=1e-4)


def test_partial_states_of_an_object(either):
    """The states by hand: nothing shown, the first one or two tokens shown, the last one or two."""
    model, (queries, _) = either.model, request_of(either.model, seed=4, prefixes=(0,))
    settings = dict(kl_factor=0.0, steps=1)
    partial = optimize_value(model, queries, 1, over_states="partial", **settings)
    masked = optimize_value(model, queries, 1, over_states="masked", **settings)
    if either.kind == "ar":
        assert torch.equal(partial.losses, masked.losses)
        return
    log_p = []
    for shown in ((), (0,), (0, 1), (2,), (1, 2)):
        canvas, hidden = queries[0].tokens.clone(), [i for i in range(3) if i not in shown]
        for i in shown:
            canvas[queries[0].answer_positions[i]] = queries[0].answer_tokens[i]
        positions, tokens = (
            [span[i] for i in hidden] for span in (queries[0].answer_positions, queries[0].answer_tokens)
        )
        log_p.append(model(canvas[None]).detach()[0].log_softmax(-1)[positions, tokens].mean())
    assert partial.losses[0, 1].item() == pytest.approx(-sum(log_p).item() / 5, abs=1e-5)
    assert partial.probability_before == pytest.approx(masked.probability_before, rel=1e-5)


def test_the_essence_by_default(tiny):
    query = GUSTAV.to_query(tiny)
    tokens = tiny.encode("Gustav Geisser is a")
    mask = tiny.cfg.mask_token_id
    essence = Query(torch.tensor(tokens + ([] if mask is None else [mask])), (0, 2), (), ())
    for at in ("readout", "subject_last"):
        settings = dict(essence_at=at, steps=3, stop_below=0.0)
        spelled_out = optimize_value(tiny, query, 0, essence=essence, **settings)
        assert torch.equal(optimize_value(tiny, query, 0, **settings).losses, spelled_out.losses)
        assert spelled_out.losses[-1, 2] > 0
    at_readout = optimize_value(tiny, query, 0, steps=3, stop_below=0.0)
    assert not torch.equal(at_readout.losses, spelled_out.losses)
    named = replace(essence, answer_positions=(4,), answer_tokens=(5,))
    assert torch.equal(optimize_value(tiny, query, 0, essence=named, steps=3, stop_below=0.0).losses, at_readout.losses)


def known_facts(model):
    """Some of the held-out question whose first word the model gets right, on canvases of 14 positions."""
    queries = []
    for fact in toy_facts.load().facts()[::145]:
        n_prompt = model.to_tokens(fact.prompt).shape[1]
        query = fact.to_query(model, n_masks=14 - n_prompt, first_tokens=1)
        rows = model.readout.rows(torch.tensor(query.answer_positions))
        if model(query.tokens[None], logits_at=rows).argmax().item() == query.answer_tokens[0]:
            queries.append(query)
    return queries


def test_v_star_makes_the_bundled_models_recall(tiny):
    """With its subject in place, p(o) is at least 0.9. With noise on all of the subject one vector brings back a part.

    Not all of it: in so shallow a model the first attention has read the subject before v* enters.
    """
    queries = known_facts(tiny)
    assert len(queries) > 7
    values = optimize_values(tiny, queries, 0)
    recalled = torch.tensor([value.probability_after for value in values])
    assert (recalled >= 0.9).float().mean() >= 0.9

    before, after = search_under_noise(tiny, queries, 3.0, ValueSettings(kl_factor=0.0))
    assert before.mean() < 0.2
    assert after.mean() > 0.5
    assert (after >= before - 1e-6).all()

    freely = ValueSettings(kl_factor=0.0, weight_decay=0.0, clamp_norm_factor=1e9, steps=40)
    _, after = search_under_noise(tiny, queries, 1.0, freely)
    assert (after >= 0.9).float().mean() >= 0.9


def search_under_noise(model, queries, deviations, settings):
    """p(object) in the corrupted runs, one draw of noise each, without v* of block 0 and with it."""
    noise = torch.randn(
        len(queries),
        max(len(query.tokens) for query in queries),
        model.cfg.d_model,
        generator=torch.Generator().manual_seed(0),
    )
    for row, query in zip(noise, queries, strict=True):
        row[: query.subject[0]] = row[query.subject[1] :] = 0
    noise *= noise_scale(model, queries) * deviations / 3
    with model.hooks(fwd_hooks=[("hook_embed", lambda embedding, hook: embedding + noise)]):
        values = optimize_values(model, queries, 0, settings=settings)
    probabilities = [(value.probability_before, value.probability_after) for value in values]
    before, after = torch.tensor(probabilities).T
    return before, after


@both_variants
def test_in_half_precision(every, request_and_essence):
    """bfloat16 weights: finite, and near float32. Its eight bits of mantissa leave relative errors of a few percent."""
    from diffusion_lens import HookedDiffusionTransformer

    half = HookedDiffusionTransformer.from_pretrained(
        every.checkpoint, config=every.config, device="cpu", dtype=torch.bfloat16
    )
    full, low = (
        optimize_value(m, request_and_essence[0], 1, essence=request_and_essence[1], **GENTLE)
        for m in (every.model, half)
    )
    assert low.vector.dtype == torch.float32
    assert low.vector.isfinite().all()
    torch.testing.assert_close(low.losses[0], full.losses[0], rtol=0.03, atol=0.03)
    assert torch.cosine_similarity(low.delta, full.delta, dim=0) > 0.9
    assert (low.vector - full.vector).norm() < 0.05 * full.vector.norm()


@both_variants
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_grad_mode_and_flags_are_left_as_they_were(every, request_and_essence, mode):
    model = every.model
    frozen = model.blocks[0].attn.q.weight.requires_grad_(False)
    try:
        with mode():
            value = optimize_value(model, request_and_essence[0], 1, essence=request_and_essence[1], **GENTLE)
            assert not torch.is_grad_enabled()
        assert not frozen.requires_grad
        assert all(weight.requires_grad for weight in model.parameters() if weight is not frozen)
        assert all(weight.grad is None for weight in model.parameters())
    finally:
        frozen.requires_grad_(True)
    assert value.losses[-1, 0] < value.losses[0, 0]
    assert not value.vector.requires_grad


@both_variants
def test_a_loss_that_is_no_number(every, request_and_essence):
    model = every.model

    def spoil(resid, hook):
        return resid * float("nan")

    with (
        pytest.raises(ValueError, match=r"is nan at iteration 0 .*the cause is in the weights or a hook"),
        torch.no_grad(),
        model.hooks(fwd_hooks=[("blocks.2.hook_resid_post", spoil)]),
    ):
        optimize_value(model, request_and_essence[0], 1, essence=request_and_essence[1])
    assert all(weight.requires_grad for weight in model.parameters())


def test_save_load_and_plot(tiny, tmp_path):
    queries = query_with_prefixes(tiny, GUSTAV, ["today "], length=14, first_tokens=2)
    value = optimize_value(tiny, queries, 1, steps=3, stop_below=0.0)
    again = ValueResult.load(value.save(tmp_path / "value.safetensors"))
    for name, mine in vars(value).items():
        theirs = getattr(again, name)
        assert torch.equal(theirs, mine) if isinstance(mine, torch.Tensor) else theirs == mine
    assert torch.equal(again.vector, value.initial + value.delta)
    assert {"settings", "object", "prompts", "essence", "model", "weights_sha256"} <= set(again.record)
    lines = again.plot().get_lines()
    assert [line.get_label() for line in lines] == ["total", "nll", "kl", "decay"]
    torch.testing.assert_close(torch.tensor(lines[0].get_ydata()), value.losses[:, 0], check_dtype=False)


@both_variants
def test_bad_settings_are_refused(every, request_and_essence):
    def call(**settings):
        optimize_value(every.model, request_and_essence[0], 1, essence=request_and_essence[1], **settings)

    cases = [
        (dict(steps=0), "steps=0"),
        (dict(lr=float("nan")), "lr=nan"),
        (dict(kl_factor=-1.0), "kl_factor=-1.0"),
        (dict(essence_at="end"), "essence_at='end' is unknown; it must be one of readout, subject_last"),
        (dict(over_states="some"), "over_states='some' is unknown; it must be one of masked, partial"),
    ]
    assert unrefused(call, cases) == []
    with pytest.raises(TypeError, match="unexpected keyword argument 'weigth_decay'"):
        call(weigth_decay=0.1)


@both_variants
def test_bad_requests(every, request_and_essence):
    model, (queries, essence) = every.model, request_and_essence
    with pytest.raises(ValueError, match="layer=3 is not one of the layers 0 to 2"):
        optimize_value(model, queries, 3, essence=essence)
    with pytest.raises(ValueError, match=r"has no tokenizer to write '\{\} is a' with"):
        optimize_value(model, queries, 1)
    with pytest.raises(ValueError, match="2 essences for 1 requests"):
        optimize_values(model, [queries], 1, essences=[essence, essence])
    with pytest.raises(ValueError, match=r"queries\[0\] has no answer"):
        optimize_value(model, essence, 1, essence=essence)
    other = replace(queries[1], answer_tokens=(31, 32, 99))
    with pytest.raises(ValueError, match=r"in queries\[1\]: either another object, or the tokenizer splits it"):
        optimize_value(model, [queries[0], other], 1, essence=essence)
    if every.kind == "mdm":
        bare = Query(essence.tokens[:-1], (0, 2), (), ())
        with pytest.raises(ValueError, match="the essence has no position to read: end it with a"):
            optimize_value(model, queries, 1, essence=bare)
        shown = replace(queries[1], tokens=queries[1].tokens.index_fill(0, torch.tensor(10), 32))
        with pytest.raises(
            ValueError, match=r"the answer positions \[10\] are not masked on the canvas of queries\[1\]"
        ):
            optimize_value(model, [queries[0], shown], 1, essence=essence)
