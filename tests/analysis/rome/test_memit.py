"""MEMIT: targets and updates as one writes them out, its limits, weights that return, and edits of the site pair."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch

from diffusion_lens import HookedDiffusionTransformer, Query
from diffusion_lens.analysis import (
    CanvasLayout,
    EditStudy,
    MemitEdit,
    MemitSettings,
    RankOneEdit,
    ValueSettings,
    compute_key,
    edit_success,
    memit,
    memit_study,
    optimize_value,
    second_moment,
)
from diffusion_lens.analysis.rome import EditReport, query_with_prefixes
from diffusion_lens.data import site_facts, toy_facts
from diffusion_lens.data.site_documents import Documents
from diffusion_lens.data.site_edits import edit_requests

mass_edit = import_module("diffusion_lens.analysis.rome.memit")  # its function has the same name

PEOPLE = toy_facts.load()
ASKED = [fact for fact in PEOPLE.facts("both", "p2d") if fact.id.endswith("-held-out-0")]
# Three people with the descriptions of three others.
FACTS = [replace(one, answer=other.answer) for one, other in zip(ASKED[:60:20], ASKED[60:120:20], strict=True)]
SEARCH = ValueSettings(steps=5, lr=0.1, weight_decay=0.3, clamp_norm_factor=0.3, kl_factor=0.0)
TINY = 1e-7  # a λ that leaves the ridge without weight
PROBE = torch.arange(5, 15)[None]
on_one_model = pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)


def laid_out(model, prefixes=("today ",)):
    return [query_with_prefixes(model, fact, prefixes, length=14, first_tokens=2) for fact in FACTS]


@pytest.fixture(scope="module")
def requests(tiny):
    return laid_out(tiny)


@pytest.fixture(scope="module")
def moments(tiny):
    return {layer: second_moment(tiny, PEOPLE.sentences()[::60], layer) for layer in (0, 1)}


def state(model, query, name):
    """One activation at the subject's last token, in float64."""
    _, cache = model.run_with_cache(query.tokens[None], names_filter=name)
    return cache[name][0, query.subject[1] - 1].detach().double()


def keys_by_hand(model, requests, layer):
    """Float[d_mlp request]: each prompt by itself, then the mean."""
    columns = [torch.stack([state(model, q, f"blocks.{layer}.mlp.hook_post") for q in each]) for each in requests]
    return torch.stack([prompts.mean(dim=0) for prompts in columns], dim=1).numpy()


def delta_by_hand(model, queries, layer):
    """The search for one δ as the paper has it, with whole forward passes of one prompt at a time."""
    unit = state(model, queries[0], f"blocks.{layer}.hook_resid_post").norm().float()
    delta = torch.zeros(model.cfg.d_model, requires_grad=True)
    optimizer = torch.optim.Adam([delta], lr=SEARCH.lr)
    for iteration in range(SEARCH.steps):
        losses = []
        for query in queries:

            def add(resid, hook, at=query.subject[1] - 1):
                return torch.cat([resid[:, :at], resid[:, at : at + 1] + delta, resid[:, at + 1 :]], dim=1)

            rows = model.readout.rows(torch.tensor(query.answer_positions))
            logits = model.run_with_hooks(query.tokens[None], fwd_hooks=[(f"blocks.{layer}.hook_resid_post", add)])
            log_probs = logits[0, rows].log_softmax(dim=-1)
            losses.append(-log_probs[range(len(rows)), query.answer_tokens].mean())
        if iteration == SEARCH.steps - 1:
            break
        loss = torch.stack(losses).mean() + SEARCH.weight_decay * delta.norm() / unit**2
        (delta.grad,) = torch.autograd.grad(loss, [delta])
        optimizer.step()
        with torch.no_grad():
            delta.mul_(min(1.0, float(SEARCH.clamp_norm_factor * unit / delta.norm())))
    return delta.detach().double().numpy()


def test_one_layer_is_the_closed_form(tiny, requests, moments):
    weight = 50.0
    edit = memit(tiny, requests, [1], covariances=moments, settings=SEARCH, cov_weight=weight)
    deltas = np.stack([delta_by_hand(tiny, queries, 1) for queries in requests], axis=1)
    np.testing.assert_allclose(edit.factors(1).left.numpy(), deltas, rtol=0, atol=2e-4 * np.abs(deltas).max())
    keys = keys_by_hand(tiny, requests, 1)
    expected = deltas @ keys.T @ np.linalg.inv(weight * moments[1].matrix.numpy() + keys @ keys.T)
    np.testing.assert_allclose(edit.update(1).numpy(), expected, rtol=0, atol=1e-3 * np.abs(expected).max())
    np.testing.assert_allclose(edit.errors[0].numpy(), np.linalg.norm(deltas, axis=0), rtol=1e-3)
    assert edit.record["ridges"] == {"1": 0.0}
    assert edit.layers == edit.record["layers"] == [1]


def test_layers_share_what_is_missing_and_each_sees_the_layers_before_it(tiny, requests, moments):
    weight, name = 20.0, "blocks.1.hook_resid_post"
    edit = memit(tiny, requests, [1, -4], covariances=moments, settings=SEARCH, cov_weight=weight)
    assert edit.layers == [0, 1]
    before = torch.stack([state(tiny, queries[0], name) for queries in requests])
    alone = memit(tiny, requests, [1], covariances=moments, settings=SEARCH, cov_weight=weight)
    targets = before + alone.factors(1).left.T  # the targets belong to the last layer
    weights = {layer: tiny.blocks[layer].mlp.down.weight for layer in (0, 1)}
    kept = {layer: weight.detach().clone() for layer, weight in weights.items()}
    try:
        for left, layer in ((2, 0), (1, 1)):
            reached = torch.stack([state(tiny, queries[0], name) for queries in requests])
            missing = ((targets - reached) / left).T.numpy()
            keys = keys_by_hand(tiny, requests, layer)
            expected = missing @ keys.T @ np.linalg.inv(weight * moments[layer].matrix.numpy() + keys @ keys.T)
            np.testing.assert_allclose(edit.update(layer), expected, rtol=0, atol=1e-3 * np.abs(expected).max())
            np.testing.assert_allclose(edit.errors[1 - left + 1], np.linalg.norm(missing * left, axis=0), rtol=1e-3)
            with torch.no_grad():
                weights[layer].add_(torch.from_numpy(expected).float())
        last = torch.stack([state(tiny, queries[0], name) for queries in requests])
        np.testing.assert_allclose(edit.errors[2], (targets - last).norm(dim=1), rtol=1e-3)
    finally:
        with torch.no_grad():
            for layer, weight in weights.items():
                weight.copy_(kept[layer])


@pytest.mark.parametrize("layers", [[1], [0, 1]])
def test_without_the_weight_of_the_corpus_the_targets_are_reached(tiny, layers):
    """The keys of the plain prompts alone: λ C is negligible, so W k_i + b moves to its target, and h_L to z."""
    requests = laid_out(tiny, [])
    edit = memit(tiny, requests, layers, settings=SEARCH, cov_weight=TINY)
    assert edit.errors[-1].max() < 1e-4 * edit.errors[0].min()
    with edit:
        inside = {layer: keys_by_hand(tiny, requests, layer) for layer in layers}
    for layer in layers:
        left = edit.factors(layer).left.numpy()
        np.testing.assert_allclose(
            edit.update(layer).numpy() @ inside[layer], left, rtol=0, atol=2e-4 * np.abs(left).max()
        )


def test_in_every_family(summed):
    model, tokens, layer = summed.model, summed.tokens[:2, :9] % 500, summed.dense_layers[-2]
    if model.cfg.has_mask:
        tokens[:, 8] = model.cfg.blank
    requests = [
        Query(row, (2, 5), (9 if model.cfg.is_autoregressive else 8,), (31 + i,)) for i, row in enumerate(tokens)
    ]
    logits = model(tokens)
    edit = memit(model, requests, [layer], settings=replace(SEARCH, clamp_norm_factor=4.0), cov_weight=TINY)
    resid_post = f"blocks.{layer}.hook_resid_post"
    before = [state(model, query, resid_post) for query in requests]
    with edit:
        for i, query in enumerate(requests):
            target = before[i] + edit.factors(layer).left[:, i] * model.time.gates(layer)[1]
            torch.testing.assert_close(state(model, query, resid_post), target, rtol=1e-4, atol=1e-4)
        assert not torch.equal(model(tokens), logits)
    assert torch.equal(model(tokens), logits)


@pytest.mark.parametrize("weight", [0.5, 300.0])
def test_a_single_request_gets_the_direction_of_the_rank_one_edit(tiny, requests, moments, weight):
    update = memit(tiny, requests[:1], [1], covariances=moments, settings=SEARCH, cov_weight=weight)
    key = compute_key(tiny, requests[0], 1)
    value = optimize_value(tiny, requests[0], 1, steps=1, kl_factor=0.0)
    # The output for k* is the m of this value, and the δ of MEMIT its δ.
    k, weight_before = key.vector.double(), tiny.blocks[1].mlp.down.weight.detach().double()
    output = (weight_before @ k + tiny.blocks[1].mlp.b_out.double()).float()
    delta = update.factors(1).left[:, 0].float()
    rank_one = RankOneEdit(tiny, 1, key, replace(value, key=key.vector, initial=output, delta=delta), moments[1])
    size = k @ torch.linalg.solve(moments[1].matrix, k)
    expected = rank_one.update() * size / (weight + size)
    torch.testing.assert_close(update.update(1), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_the_order_of_requests_does_not_matter(tiny, requests, moments):
    one = memit(tiny, requests, [0, 1], covariances=moments, settings=SEARCH, cov_weight=10)
    other = memit(tiny, requests[::-1], [0, 1], covariances=moments, settings=SEARCH, cov_weight=10)
    for layer in (0, 1):
        scale = float(one.update(layer).abs().max())
        torch.testing.assert_close(one.update(layer), other.update(layer), rtol=0, atol=1e-3 * scale)
    assert one.searched == pytest.approx(other.searched[::-1], rel=1e-3)


def test_weights_return_bit_for_bit(tiny, requests):
    weights = {name: weight.clone() for name, weight in tiny.state_dict().items()}
    edit = memit(tiny, requests, [0, 1], settings=SEARCH, cov_weight=1)

    def unchanged():
        return all(torch.equal(weight, weights[name]) for name, weight in tiny.state_dict().items())

    assert unchanged()
    with edit:
        assert edit.is_applied
        changed = {name for name, weight in tiny.state_dict().items() if not torch.equal(weight, weights[name])}
        assert changed == {f"blocks.{layer}.mlp.down.weight" for layer in (0, 1)}
        with pytest.raises(ValueError, match="this edit of layers 0 and 1 is applied already"):
            edit.apply()
    assert unchanged()
    with pytest.raises(ValueError, match="token id 999 is not among"), edit:
        tiny(torch.tensor([[999]]))
    assert unchanged()
    edit.apply()
    edit.revert()
    assert unchanged()
    with pytest.raises(ValueError, match="layers 0 and 1 is not applied"):
        edit.revert()


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_edits_of_both_kinds_nest(tiny, requests):
    edit = memit(tiny, requests, [0, 1], settings=SEARCH, cov_weight=1)
    value = optimize_value(tiny, requests[0], 1, **vars(SEARCH))
    logits, inner = tiny(PROBE), RankOneEdit(tiny, 1, compute_key(tiny, requests[0], 1), value)
    with edit:
        once = tiny(PROBE)
        with inner, pytest.raises(ValueError, match="the weight of layer 1 has changed since this edit was applied"):
            edit.revert()
        assert torch.equal(tiny(PROBE), once)
    assert torch.equal(tiny(PROBE), logits)
    with inner, edit:
        assert not torch.equal(tiny(PROBE), once)
    assert torch.equal(tiny(PROBE), logits)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
@on_one_model
def test_an_exception_between_two_layers_leaves_no_trace(tiny, requests, monkeypatch):
    logits, layers = tiny(PROBE), []

    def failing(model, given, layer, *args, **settings):
        layers.append(layer)
        if layer == 1:
            assert not torch.equal(tiny(PROBE), logits)
            raise KeyError("keys")
        return mass_edit_keys(model, given, layer, *args, **settings)

    mass_edit_keys = mass_edit.compute_keys
    monkeypatch.setattr(mass_edit, "compute_keys", failing)
    with pytest.raises(KeyError, match="keys"):
        memit(tiny, requests, [0, 1], settings=SEARCH)
    assert layers == [0, 1]
    assert torch.equal(tiny(PROBE), logits)


def test_success_of_an_edit_of_several_facts(tiny, requests, tmp_path):
    edit = memit(tiny, requests, [0, 1], settings=SEARCH, cov_weight=TINY)
    others = [ASKED[i].to_query(tiny, n_masks=6 if tiny.cfg.has_mask else None) for i in (5, 6)]
    report = edit_success(tiny, edit, {"efficacy": [each[0] for each in requests], "neighbourhood": others})
    table = report.table()
    assert (table["efficacy"].count, table["neighbourhood"].count) == (3, 2)
    assert table["efficacy"].probability_after > table["efficacy"].probability_before
    again = EditReport.load(report.save(tmp_path / "report.safetensors"))
    assert again.record == report.record
    assert again.record["layers"] == [0, 1]
    assert again.record["taken_from"]["weights_sha256"] == report.record["weights_sha256"]
    assert again.plot().get_title() == "Edit of layers 0 and 1"


@on_one_model
def test_bad_requests(tiny, requests, moments):
    for given, message in (
        (dict(requests=[]), "there are no requests"),
        (dict(layers=[4]), r"layers=\[4\]; give numbers from 0 to 3"),
        (dict(layers=[1, -3]), "contains duplicates"),
        (dict(cov_weight=0), "cov_weight=0.0; it must be a finite number above 0"),
        (dict(layers=[2], covariances=moments), r"no covariance of layer 2; covariances has those of \[0, 1\]"),
        (dict(covariances={1: moments[0]}), "of layer 1, but the covariance was taken at layer 0"),
        (dict(covariances={1: torch.eye(3)}), r"the covariance of layer 1 is \[3, 3\], and its MLP has 352 units"),
        (dict(requests=[[]]), "there is no query"),
    ):
        with pytest.raises(ValueError, match=message):
            memit(tiny, **(dict(requests=requests, layers=[1], settings=SEARCH) | given))
    foreign = replace(moments[1], record={**moments[1].record, "model": "another"})
    with pytest.raises(ValueError, match="the covariance was taken from another model"):
        memit(tiny, requests, [1], covariances={1: foreign}, settings=SEARCH)


@pytest.fixture(scope="module", params=["site-mdm", "site-ar"])
def site(request):
    return HookedDiffusionTransformer.from_pretrained(request.param, device="cpu")


def test_edits_at_once_succeed_and_spare_the_neighbours(site, tmp_path, monkeypatch):
    """Attributes of three people, with C of documents; the settings are those of one search for both variants."""
    world = site_facts.load()
    tokens = [token for text in Documents(world, 0.4, 0.1, 0.6).sample(400) for token in site.encode(text)]
    corpus = torch.tensor(tokens[: len(tokens) // 32 * 32]).reshape(-1, 32)[:100]
    covariances = {layer: second_moment(site, list(corpus), layer) for layer in (0, 1)}
    requests = edit_requests(world, world.facts("attribute")[7::709][:6:2])
    search = ValueSettings(steps=40, lr=0.2, clamp_norm_factor=1.0, kl_factor=0.0, stop_below=0.2)
    settings = MemitSettings([0, 1], search, cov_weight=100, layout=CanvasLayout(16))
    study = memit_study(site, requests, settings, covariances=covariances, out=tmp_path / "edits")
    table = study.table()
    assert table["efficacy"].before == 0
    assert table["efficacy"].after >= 0.9
    assert table["paraphrase"].after >= 0.9
    assert table["neighbourhood"].after >= 0.9
    assert table["shared_name"].after >= 0.9
    assert (table["efficacy"].requests, len(study.ids)) == (3, 3)
    assert study.plot().get_title() == f"{site.cfg.model_name}: 3 edits of layers 0 and 1"

    # The study is finished, so that the same call reads it, and another λ is another study.
    monkeypatch.setattr(mass_edit, "edit_together", lambda *args, **more: pytest.fail("it is computed again"))
    again = memit_study(site, requests, settings, covariances=covariances, out=tmp_path / "edits")
    assert torch.equal(again.probabilities, study.probabilities)
    saved = EditStudy.load(study.save(tmp_path / "study.safetensors"))
    assert (saved.record, saved.table()) == (study.record, table)
    with pytest.raises(ValueError, match=r"was made with other settings.* \(cov_weight: 100.0 there, 200.0 here\)"):
        memit_study(site, requests, replace(settings, cov_weight=200), covariances=covariances, out=tmp_path / "edits")


@on_one_model
def test_a_partial_edit_is_an_edit(tiny, requests):
    """The updates of one layer alone can be applied too."""
    edit = memit(tiny, requests, [0, 1], settings=SEARCH, cov_weight=1)
    before = tiny.blocks[0].mlp.down.weight.detach().double()
    with MemitEdit(tiny, {0: edit.factors(0)}):
        expected = (before + edit.update(0)).float()
        assert torch.equal(tiny.blocks[0].mlp.down.weight, expected)
