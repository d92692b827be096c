"""Likelihoods against the authors' numbers, against slow versions of themselves, and against what they claim."""

import math
from functools import cache
from itertools import permutations, product

import numpy as np
import pytest
import torch
from numpy.polynomial import Polynomial
from small_networks import small_architecture

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from diffusion_lens.data import toy_facts
from diffusion_lens.evaluation import NLLByOrder, NLLEstimate, chain_rule_nll, monte_carlo_nll, nll_by_order
from diffusion_lens.model.loss import hide

MASK = 11
PROMPT, ANSWER = torch.tensor([3, 1, 4, 1, 5]), torch.tensor([9, 2, 6, 5])

mdm = pytest.mark.parametrize("golden", [("gqa", "mdm"), ("mha", "mdm")], indirect=True, ids="-".join)


@cache
def small(attention_dir="bidirectional", readout="in_place"):
    """A random model whose predictions depend much on what it sees."""
    masked = attention_dir == "bidirectional"
    architecture = small_architecture(
        d_vocab=MASK + masked,
        d_vocab_out=MASK,
        n_ctx=16,
        attention_dir=attention_dir,
        readout=readout,
        mask_token_id=MASK if masked else None,
    )
    model = HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"), seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(generator=generator)
        model.unembed.weight.mul_(0.5)
    return model


def slow_surprisals(model, prompt, canvas, answer, cfg_scale=0.0):
    """-log p of each answer token on one canvas, from the whole logits of one row."""
    n = len(prompt)

    def logits(before):
        rows = model(torch.cat([before, canvas])[None])[0]
        if model.cfg.readout == "shifted":
            rows = torch.cat([rows[:1], rows[:-1]])
        return rows[n:]

    conditional, unconditional = logits(prompt), logits(torch.full_like(prompt, model.cfg.mask_token_id or 0))
    guided = (1 + cfg_scale) * conditional - cfg_scale * unconditional
    return -guided.log_softmax(-1)[torch.arange(len(answer)), answer].detach()


def all_masks(model, prompt, answer, cfg_scale=0.0):
    """The surprisals on each of the 2^L canvases, by the hidden positions."""
    table = {}
    for hidden in product([False, True], repeat=len(answer)):
        canvas = answer.masked_fill(torch.tensor(hidden), model.cfg.mask_token_id)
        table[hidden] = slow_surprisals(model, prompt, canvas, answer, cfg_scale)
    return table


def exact_bound(table, eps):
    """The mean over p in [eps, 1] of the sum over hidden sets of p^k (1-p)^(L-k) · (sum of surprisals)/p, exactly."""
    total = 0.0
    for hidden, surprisals in table.items():
        if k := sum(hidden):
            integrand = Polynomial([0, 1]) ** (k - 1) * Polynomial([1, -1]) ** (len(hidden) - k)
            weight = (integrand.integ()(1) - integrand.integ()(eps)) / (1 - eps)
            total += weight * surprisals[torch.tensor(hidden)].sum().item()
    return total


def exact_standard_error(table, samples, eps=1e-3):
    """Of the mean of draws whose p cover [eps, 1] evenly: only the scatter at given p is left."""
    edges = np.geomspace(eps, 1, 20_001)
    p, share = (edges[1:] + edges[:-1]) / 2, np.diff(edges) / (1 - eps)
    mean, square = np.zeros_like(p), np.zeros_like(p)
    for hidden, surprisals in table.items():
        draw = surprisals[torch.tensor(hidden)].sum().item() / p
        chance = p ** sum(hidden) * (1 - p) ** (len(hidden) - sum(hidden))
        mean, square = mean + chance * draw, square + chance * draw**2
    return math.sqrt(((square - mean**2) * share).sum() / samples)


def nll_in_order(table, order):
    hidden, total = [True] * len(order), 0.0
    for position in order:
        total += table[tuple(hidden)][position].item()
        hidden[position] = False
    return total


def test_the_chain_rule_is_the_authors(golden):
    expected = golden.tensors("likelihood")
    for case in golden.cases("likelihood"):
        name = f"case{case['case']}"
        prompt, answer = expected[f"{name}.prompt"], expected[f"{name}.answer"]
        for scale in case.get("cfg_scales", [0.0]):
            key = f"{name}.nll" if golden.kind == "ar" else f"{name}.chain_rule_nll.cfg{scale}"
            nll = chain_rule_nll(golden.model, prompt, answer, cfg_scale=scale)
            torch.testing.assert_close(nll, expected[key], rtol=1e-5, atol=0)


@mdm
def test_the_monte_carlo_estimate_is_the_authors_on_their_noise(golden):
    expected = golden.tensors("likelihood")
    for case in golden.cases("likelihood"):
        for scale in case["cfg_scales"]:
            name, guided = f"case{case['case']}", f"cfg{scale}"
            noise = {key: expected[f"{name}.mc.{key}.{guided}"] for key in ("noisy", "p_mask")}
            question = golden.model, expected[f"{name}.prompt"], expected[f"{name}.answer"]
            estimate = monte_carlo_nll(*question, cfg_scale=scale, **noise)
            assert estimate.value == pytest.approx(expected[f"{name}.mc.nll.{guided}"].item(), rel=1e-5)
            assert estimate.samples == 3
            assert (estimate.record["noise"], estimate.record["cfg_scale"]) == ("given", scale)
            alone = [
                monte_carlo_nll(*question, cfg_scale=scale, **{key: rows[i : i + 1] for key, rows in noise.items()})
                for i in range(3)
            ]
            assert all(math.isnan(row.standard_error) for row in alone)
            rows = np.array([row.value for row in alone])
            assert estimate.value == pytest.approx(rows.mean(), rel=1e-6)
            assert estimate.standard_error == pytest.approx(rows.std(ddof=1) / math.sqrt(3), rel=1e-5)


@pytest.mark.parametrize("cfg_scale", [0.0, 0.7])
@pytest.mark.parametrize("readout", ["in_place", "shifted"])
def test_each_token_is_scored_after_those_before_it(readout, cfg_scale):
    model = small(readout=readout)
    expected = nll_in_order(all_masks(model, PROMPT, ANSWER, cfg_scale), range(4))
    assert chain_rule_nll(model, PROMPT, ANSWER, cfg_scale=cfg_scale).item() == pytest.approx(expected, rel=1e-5)


def test_a_causal_model_scores_its_next_tokens():
    model = small("causal", "shifted")
    expected = slow_surprisals(model, PROMPT, ANSWER, ANSWER).sum()
    torch.testing.assert_close(chain_rule_nll(model, PROMPT, ANSWER), expected)
    one_by_one = sum(
        chain_rule_nll(model, torch.cat([PROMPT, ANSWER[:i]]), ANSWER[i : i + 1]) for i in range(len(ANSWER))
    )
    torch.testing.assert_close(one_by_one, expected)


@pytest.mark.parametrize("cfg_scale", [0.0, 0.7])
def test_each_order_scores_a_token_after_those_that_it_reveals_before(cfg_scale):
    model = small()
    table = all_masks(model, PROMPT, ANSWER, cfg_scale)
    given = {tuple(order): torch.tensor(order) for order in permutations(range(4))}
    named = {(0, 1, 2, 3): "left_to_right", (3, 2, 1, 0): "right_to_left"}
    for order, argument in [*given.items(), *named.items()]:
        nll = chain_rule_nll(model, PROMPT, ANSWER, order=argument, cfg_scale=cfg_scale)
        assert nll.item() == pytest.approx(nll_in_order(table, order), rel=1e-5)


def test_the_spread_is_over_random_orders(tmp_path):
    model = small()
    table = all_masks(model, PROMPT, ANSWER)
    found = nll_by_order(model, PROMPT, ANSWER, n_orders=64, seed=5, max_batch=3)
    slow = [nll_in_order(table, order) for order in found.orders.tolist()]
    np.testing.assert_allclose(found.nll, slow, rtol=1e-5)
    assert found.mean == pytest.approx(np.mean(slow), rel=1e-5)
    assert found.standard_deviation == pytest.approx(np.std(slow, ddof=1), rel=1e-4)
    assert len({*map(tuple, found.orders.tolist())}) > 15
    first, second = found.orders[0, :2].tolist()
    hidden = tuple(place != first for place in range(4))
    assert found.surprisal[0, second].item() == pytest.approx(table[hidden][second].item(), rel=1e-5)

    again = nll_by_order(model, PROMPT, ANSWER, n_orders=64, seed=torch.Generator().manual_seed(5))
    assert not torch.equal(again.orders, found.orders)
    assert torch.equal(nll_by_order(model, PROMPT, ANSWER, n_orders=64, seed=again.record["seed"]).orders, again.orders)
    one = chain_rule_nll(model, PROMPT, ANSWER, order="random", seed=5)
    torch.testing.assert_close(one, found.nll[0])
    assert math.isnan(nll_by_order(model, PROMPT, ANSWER, n_orders=1).standard_deviation)

    kept = NLLByOrder.load(found.save(tmp_path / "orders.safetensors"))
    assert torch.equal(kept.nll, found.nll)
    assert kept.record["seed"] == 5
    frame = found.to_dataframe()
    np.testing.assert_allclose(frame.groupby("order")["surprisal"].sum(), found.nll, rtol=1e-6)
    assert frame["rank"][:4].tolist() == [found.orders[0].tolist().index(place) for place in range(4)]


def test_a_canvas_that_orders_share_is_read_once():
    model = small()
    rows = []
    with model.hooks([("hook_embed", lambda resid, hook: rows.append(len(resid)))]):
        nll_by_order(model, PROMPT, ANSWER, n_orders=200, max_batch=4)
        assert sum(rows) == 2**4 - 1  # every set of hidden tokens but the empty one
    assert rows == [4, 4, 4, 3]


def test_one_token_has_one_likelihood_in_every_order():
    for model in (small(), small("causal", "shifted")):
        nlls = [chain_rule_nll(model, PROMPT, ANSWER[:1], order=order) for order in ("left_to_right", "random")]
        found = nll_by_order(model, PROMPT, ANSWER[:1], n_orders=3)
        torch.testing.assert_close(torch.stack(nlls), found.nll[:2])
        assert found.standard_deviation == pytest.approx(0, abs=1e-5)


def test_orders_that_do_not_exist_are_refused():
    causal = small("causal", "shifted")
    for order in ("right_to_left", "random", torch.tensor([1, 0, 2, 3])):
        with pytest.raises(ValueError, match=r"'small' is causal .* it has one likelihood, from left to right"):
            chain_rule_nll(causal, PROMPT, ANSWER, order=order)
    with pytest.raises(ValueError, match="'small' is causal"):
        nll_by_order(causal, PROMPT, ANSWER)
    chain_rule_nll(causal, PROMPT, ANSWER, order=torch.arange(4))
    with pytest.raises(ValueError, match=r"order=\[0, 1, 1, 3\] is no order of the answer's 4 tokens: give each pos"):
        chain_rule_nll(small(), PROMPT, ANSWER, order=torch.tensor([0, 1, 1, 3]))
    with pytest.raises(ValueError, match="order has 3 positions, and the answer has 4 tokens"):
        chain_rule_nll(small(), PROMPT, ANSWER, order=torch.arange(3))
    with pytest.raises(ValueError, match="n_orders=0; it must be at least 1"):
        nll_by_order(small(), PROMPT, ANSWER, n_orders=0)


@pytest.mark.parametrize(("readout", "cfg_scale"), [("in_place", 0.7), ("shifted", 0.0)])
def test_the_monte_carlo_estimate_converges_to_the_integral(readout, cfg_scale):
    model = small(readout=readout)
    exact = exact_bound(all_masks(model, PROMPT, ANSWER, cfg_scale), eps=1e-3)
    estimate = monte_carlo_nll(model, PROMPT, ANSWER, samples=4096, cfg_scale=cfg_scale, seed=1, max_batch=512)
    assert abs(estimate.value - exact) < 4 * estimate.standard_error
    assert estimate.standard_error < 0.03 * exact


def test_the_integral_is_the_mean_over_all_orders():
    table = all_masks(small(), PROMPT, ANSWER)
    nlls = [nll_in_order(table, order) for order in permutations(range(4))]
    assert np.std(nlls) > 0.05 * np.mean(nlls)  # the orders do not agree, so the mean says something
    assert exact_bound(table, eps=0.0) == pytest.approx(np.mean(nlls), rel=1e-6)
    assert exact_bound(table, eps=1e-3) == pytest.approx(np.mean(nlls), rel=2e-3)


@pytest.mark.parametrize(("samples", "n_seeds"), [(256, 24), (1024, 6)])
def test_the_standard_error_is_the_scatter_and_falls_with_the_root_of_n(samples, n_seeds):
    model = small()
    estimates = [
        monte_carlo_nll(model, PROMPT, ANSWER, samples=samples, seed=seed, max_batch=512) for seed in range(n_seeds)
    ]
    claimed = math.sqrt(np.mean([estimate.standard_error**2 for estimate in estimates]))
    exact = exact_standard_error(all_masks(model, PROMPT, ANSWER), samples)
    assert claimed == pytest.approx(exact, rel=0.25)
    assert np.std([estimate.value for estimate in estimates], ddof=1) == pytest.approx(exact, rel=0.5)


def test_batches_are_the_independent_units_whatever_their_size():
    model = small()
    generator = torch.Generator().manual_seed(3)
    table = all_masks(model, PROMPT, ANSWER)
    batches = []
    for size in (8, 8, 4):
        noisy, p_mask = hide(ANSWER.repeat(size, 1), MASK, generator=generator)
        rows = [tuple(row) for row in (noisy == MASK).tolist()]
        batches.append(
            [float(table[row][torch.tensor(row)].sum() / p) for row, p in zip(rows, p_mask[:, 0], strict=True)]
        )
    value = np.mean(np.concatenate(batches))
    shares = [len(batch) / 20 * (np.mean(batch) - value) for batch in batches]
    estimate = monte_carlo_nll(model, PROMPT, ANSWER, samples=20, batch_size=8, seed=3)
    assert (estimate.samples, estimate.record["batch_size"]) == (20, 8)
    assert estimate.value == pytest.approx(value, rel=1e-5)
    assert estimate.standard_error == pytest.approx(math.sqrt(3 / 2 * np.sum(np.square(shares))), rel=1e-4)
    assert math.isnan(monte_carlo_nll(model, PROMPT, ANSWER, samples=8, batch_size=8).standard_error)
    assert monte_carlo_nll(model, PROMPT, ANSWER, samples=1).samples == 1


def test_the_seed_decides_the_estimate_and_the_global_random_numbers_stay():
    model = small()
    before = torch.get_rng_state()
    first, again, other = (monte_carlo_nll(model, PROMPT, ANSWER, samples=32, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert first.value != other.value
    drawn = [
        monte_carlo_nll(model, PROMPT, ANSWER, samples=32, seed=torch.Generator().manual_seed(seed)) for seed in (5, 5)
    ]
    assert drawn[0] == drawn[1]
    assert monte_carlo_nll(model, PROMPT, ANSWER, samples=32, seed=drawn[0].record["seed"]) == drawn[0]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("cfg_scale", [0.0, 1.1])
def test_chunks_change_nothing(cfg_scale):
    model = small()
    whole, chunked = (chain_rule_nll(model, PROMPT, ANSWER, cfg_scale=cfg_scale, max_batch=n) for n in (32, 3))
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=0)
    whole, chunked = (
        monte_carlo_nll(model, PROMPT, ANSWER, samples=48, cfg_scale=cfg_scale, max_batch=n) for n in (64, 5)
    )
    assert chunked.value == pytest.approx(whole.value, rel=1e-6)
    assert chunked.standard_error == pytest.approx(whole.standard_error, rel=1e-5)


def test_guidance_by_a_prompt_that_says_nothing_is_no_guidance():
    model = small()
    for prompt in (torch.tensor([MASK, MASK]), torch.zeros(0, dtype=torch.long), torch.tensor([])):
        plain, guided = (chain_rule_nll(model, prompt, ANSWER, cfg_scale=scale) for scale in (0.0, 3.0))
        torch.testing.assert_close(guided, plain)
        assert math.isfinite(monte_carlo_nll(model, prompt, ANSWER, samples=32).value)


def test_text_is_its_tokens(tiny):
    fact = toy_facts.load().facts()[0]
    prompt, answer = fact.prompt, fact.answer
    whole = tiny.to_tokens(prompt + answer)
    cut = tiny.to_tokens(prompt).shape[1]
    expected = chain_rule_nll(tiny, whole[:, :cut], whole[:, cut:])
    assert chain_rule_nll(tiny, prompt, answer) == expected
    assert chain_rule_nll(tiny, whole[0, :cut], whole[0, cut:].int()) == expected
    if tiny.cfg.has_mask:
        of_text = monte_carlo_nll(tiny, prompt, answer, samples=32)
        assert of_text == monte_carlo_nll(tiny, whole[0, :cut], whole[0, cut:], samples=32)
        assert of_text.record["answer"] == whole[0, cut:].tolist()


def test_hooks_see_the_canvases_and_are_felt():
    model = small()
    seen = []
    plain = chain_rule_nll(model, PROMPT, ANSWER, cfg_scale=0.5)
    with model.hooks([("hook_embed", lambda resid, hook: seen.append((resid.shape[0], hook.step)))]):
        assert chain_rule_nll(model, PROMPT, ANSWER, cfg_scale=0.5) == plain
    assert seen == [(4, None), (4, None)]
    with model.hooks([("blocks.0.hook_mlp_out", lambda out, hook: 0 * out)]):
        assert chain_rule_nll(model, PROMPT, ANSWER, cfg_scale=0.5) != plain
    assert chain_rule_nll(model, PROMPT, ANSWER, cfg_scale=0.5) == plain
    assert not model.list_hooks()


def test_no_graph_is_kept_and_the_grad_mode_stays(either):
    prompt, answer = torch.arange(4), torch.arange(3)
    assert not chain_rule_nll(either.model, prompt, answer).requires_grad
    assert torch.is_grad_enabled()


def test_an_estimate_survives_the_disk(tmp_path):
    model = small()
    estimate = monte_carlo_nll(model, PROMPT, ANSWER, samples=32, cfg_scale=0.5, seed=7)
    assert NLLEstimate.load(estimate.save(tmp_path / "estimate.safetensors")) == estimate
    assert {"seed": 7, "noise": "sampled", "cfg_scale": 0.5, "model": "small"}.items() <= estimate.record.items()
    assert {"weights_sha256", "versions", "prompt", "answer"} <= estimate.record.keys()
    alone = monte_carlo_nll(model, PROMPT, ANSWER, samples=1)
    assert math.isnan(NLLEstimate.load(alone.save(tmp_path / "alone.safetensors")).standard_error)


def test_progress_is_shown_when_requested(capsys):
    monte_carlo_nll(small(), PROMPT, ANSWER, samples=4)
    assert capsys.readouterr().err == ""
    monte_carlo_nll(small(), PROMPT, ANSWER, samples=4, progress=True)
    assert "likelihood" in capsys.readouterr().err


@pytest.mark.parametrize("nll", [chain_rule_nll, monte_carlo_nll])
@pytest.mark.parametrize(
    ("prompt", "answer", "settings", "message"),
    [
        (PROMPT, ANSWER[:0], {}, "the answer is empty"),
        (PROMPT, torch.tensor([2, MASK]), {}, r"answer\[1\] is \[MASK\]: 'small' never writes it"),
        (PROMPT, torch.tensor([2, 12]), {}, "token id 12 is not among the 12 tokens of 'small'"),
        (PROMPT, ANSWER.repeat(3), {}, "17 positions do not fit into the context of 'small', n_ctx=16"),
        (PROMPT.repeat(2, 1), ANSWER, {}, r"prompt has shape \[2, 5\].*one row"),
        (PROMPT, ANSWER.repeat(2, 1), {}, r"answer has shape \[2, 4\].*one row"),
        (PROMPT, ANSWER, {"cfg_scale": -0.1}, "cfg_scale=-0.1; it must be a finite number"),
        (PROMPT, ANSWER, {"cfg_scale": math.nan}, "cfg_scale=nan; it must be a finite number"),
        (PROMPT, ANSWER, {"cfg_scale": math.inf}, "cfg_scale=inf; it must be a finite number"),
        (PROMPT, ANSWER, {"max_batch": 0}, "max_batch=0; it must be at least 1"),
    ],
)
def test_errors_name_the_culprit(nll, prompt, answer, settings, message):
    with pytest.raises(ValueError, match=message):
        nll(small(), prompt, answer, **settings)


def test_text_and_tokens_do_not_mix():
    with pytest.raises(TypeError, match="the prompt is str, the answer Tensor; give both as text, or both as tokens"):
        chain_rule_nll(small(), "Ada is", ANSWER)
    with pytest.raises(TypeError, match=r"tokens are torch\.float32; they must be integers"):
        chain_rule_nll(small(), PROMPT, ANSWER.float())


def test_text_that_does_not_split_into_prompt_and_answer_is_an_error(tiny):
    with pytest.raises(ValueError, match="has no answer"):
        chain_rule_nll(tiny, "the brave drummer of Rolsen is", "")
    with pytest.raises(ValueError, match="the tokenizer merges the answer"):
        chain_rule_nll(tiny, "the brave drum", "mer")


def test_what_a_causal_model_cannot_be_queried_for():
    model = small("causal", "shifted")
    with pytest.raises(ValueError, match=r"cfg_scale=0.5 compares with a masked prompt.*'small' has no \[MASK\]"):
        chain_rule_nll(model, PROMPT, ANSWER, cfg_scale=0.5)
    with pytest.raises(ValueError, match=r"the prompt is empty.*BOS"):
        chain_rule_nll(model, PROMPT[:0], ANSWER)
    with pytest.raises(ValueError, match=r"'small' has no \[MASK\].*chain_rule_nll"):
        monte_carlo_nll(model, PROMPT, ANSWER)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 0}, "samples=0; it must be at least 1"),
        ({"batch_size": -1}, "batch_size=-1; it must be at least 1"),
        ({"noisy": torch.full((1, 9), MASK)}, "noisy and p_mask go together"),
        ({"p_mask": torch.ones(1, 9)}, "noisy and p_mask go together"),
        (
            {"noisy": torch.full((1, 4), MASK), "p_mask": torch.ones(1, 4)},
            r"noisy has shape \[1, 4\] and p_mask \[1, 4\].*pos=9",
        ),
        (
            {"noisy": torch.full((2, 9), MASK), "p_mask": torch.ones(2, 9)},
            r"noisy\[0, 0\] is 11 and not 3; noise may only mask positions of the answer \(5 to 8\)",
        ),
        (
            {"noisy": torch.tensor([[3, 1, 4, 1, 5, MASK, 2, 7, 5]]), "p_mask": torch.ones(1, 9)},
            r"noisy\[0, 7\] is 7 and not 6",
        ),
        (
            {"noisy": torch.tensor([[3, 1, 4, 1, 5, MASK, 2, 6, 5]]), "p_mask": torch.zeros(1, 9)},
            "p_mask must be above 0",
        ),
        (
            {"noisy": torch.tensor([[3, 1, 4, 1, 5, MASK, 2, 6, 5]]), "p_mask": torch.full((1, 9), math.nan)},
            "p_mask must be above 0",
        ),
    ],
)
def test_noise_that_does_not_fit_is_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        monte_carlo_nll(small(), PROMPT, ANSWER, **settings)


@pytest.mark.parametrize("nll", [chain_rule_nll, monte_carlo_nll])
def test_logits_that_are_no_numbers_have_no_likelihood(either, nll):
    if either.kind == "ar" and nll is monte_carlo_nll:
        return
    spoilt = [("ln_final.hook_normalized", lambda a, hook: a * float("nan"))]
    with either.model.hooks(fwd_hooks=spoilt), pytest.raises(FloatingPointError, match=r"at row 0, position \d+"):
        nll(either.model, PROMPT, ANSWER)
