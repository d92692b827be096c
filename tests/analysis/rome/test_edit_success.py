"""The report of an edit: wins and probabilities as one reads them off by hand."""

import pytest
import torch

from diffusion_lens import Query
from diffusion_lens.analysis.rome import (
    EditReport,
    Probe,
    RankOneEdit,
    compute_key,
    edit_success,
    optimize_value,
    second_moment,
)
from diffusion_lens.interventions import named

LAYER = 1


def lay_out(model, prompt, answer, subject=(1, 3)):
    """A prompt in tokens and its answer on this model's canvas."""
    mask = model.cfg.mask_token_id
    canvas = answer[:-1] if mask is None else [mask] * len(answer)
    positions = range(len(prompt), len(prompt) + len(answer))
    return Query(torch.tensor(prompt + canvas), subject, tuple(positions), tuple(answer))


def by_hand(model, query):
    """Log-probabilities of the answer's tokens and the model's first choices, one row by itself."""
    rows = model.readout.rows(torch.tensor(query.answer_positions))
    logits = model(query.tokens[None], logits_at=rows).detach()[0]
    return logits.log_softmax(-1)[range(len(rows)), query.answer_tokens], logits.argmax(-1).tolist()


@pytest.fixture(scope="module")
def edit(either):
    query = lay_out(either.model, [51, 20, 21, 11], [31])
    value = optimize_value(either.model, query, LAYER, kl_factor=0.0, steps=40, clamp_norm_factor=20.0)
    return RankOneEdit(either.model, LAYER, compute_key(either.model, query, LAYER), value)


@pytest.fixture(scope="module")
def probes(either):
    model = either.model
    plain = lay_out(model, [51, 20, 21, 11], [31])
    odds = model(plain.tokens[None])[0, -1].softmax(-1)
    old = int(odds.where(odds > 2 * odds[31], 1).argmin())  # the least likely of those well ahead of the new object
    return {
        "efficacy": [Probe(plain, lay_out(model, [51, 20, 21, 11], [old]))],
        "paraphrase": [lay_out(model, [52, 20, 21, 11, 12], [31])],
        "neighbourhood": [
            Probe(lay_out(model, [51, 60, 61, 11], [32, 33]), lay_out(model, [51, 60, 61, 11], [31])),
            Probe(lay_out(model, [51, 70, 71, 11], [31]), lay_out(model, [51, 70, 71, 11], [34, 35, 36])),
        ],
        "reverse": [lay_out(model, [53, 31, 54], [20, 21])],
    }


def test_wins_and_probabilities_by_hand(either, edit, probes):
    model = either.model
    report = edit_success(model, edit, probes, max_batch=3)
    assert not edit.is_applied
    flat = [probe for group in probes.values() for probe in group]
    for state in (0, 1):
        if state:
            edit.apply()
        for i, probe in enumerate(flat):
            query = probe.query if isinstance(probe, Probe) else probe
            log_probs, choices = by_hand(model, query)
            wins = choices == list(query.answer_tokens)
            if isinstance(probe, Probe):
                wins = bool(log_probs.mean() > by_hand(model, probe.rival)[0].mean())
            assert report.wins[state, i] == wins
            assert report.probabilities[state, i].item() == pytest.approx(log_probs.sum().exp().item(), rel=1e-4)
    edit.revert()
    table = report.table()
    assert list(table) == ["efficacy", "paraphrase", "neighbourhood", "reverse"]
    assert [score.count for score in table.values()] == [1, 1, 2, 1]
    assert (table["efficacy"].before, table["efficacy"].after) == (0, 1)
    assert table["efficacy"].probability_after > 3 * table["efficacy"].probability_before
    assert table["neighbourhood"].after == report.wins[1, 2:4].mean()


def test_save_load_and_plot(either, edit, probes, tmp_path):
    report = edit_success(either.model, edit, {name: probes[name] for name in ("reverse", "efficacy")})
    again = EditReport.load(report.save(tmp_path / "report.safetensors"))
    assert torch.equal(again.wins, report.wins)
    assert torch.equal(again.probabilities, report.probabilities)
    assert (again.groups, again.record) == (["reverse", "efficacy"], report.record)
    assert list(again.table()) == ["efficacy", "reverse"]
    ax = again.plot()
    assert [label.get_text() for label in ax.get_xticklabels()] == ["efficacy", "reverse"]
    assert [bar.get_height() for bar in ax.patches] == [0, 0, 1, 0]


def test_bad_probes(either, edit, probes):
    with pytest.raises(ValueError, match="'accuracy' is not a group of probes; the groups are efficacy, paraphrase"):
        edit_success(either.model, edit, {"accuracy": probes["efficacy"]})
    with pytest.raises(ValueError, match="there are no probes"):
        edit_success(either.model, edit, {"efficacy": []})
    with edit, pytest.raises(ValueError, match="the edit is applied already"):
        edit_success(either.model, edit, probes)
    with pytest.raises(ValueError, match="the edit belongs to another model object"):
        edit_success(type(either)("gqa", either.kind).model, edit, probes)


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_mask_is_never_the_first_choice(specimen, configs, name):
    model = specimen(configs[name]).model
    query = lay_out(model, [51, 20, 21, 11], [31])
    rows = model.readout.rows(torch.tensor(query.answer_positions))
    _, cache = model.run_with_cache(query.tokens[None], names_filter="ln_final.hook_normalized")
    likeliest = cache["ln_final.hook_normalized"][0, rows][0].detach()
    with torch.no_grad():  # a head that prefers [MASK], and after it the answer
        model.unembed.weight[model.cfg.mask_token_id] = 100 * likeliest
        model.unembed.weight[31] = 50 * likeliest
    edit = RankOneEdit(
        model, LAYER, compute_key(model, query, LAYER), optimize_value(model, query, LAYER, steps=1, kl_factor=0.0)
    )
    assert model(query.tokens[None])[0, rows].argmax() == model.cfg.mask_token_id
    assert edit_success(model, edit, {"efficacy": [query]}).wins[0].item() == 1
    other = lay_out(model, [51, 20, 21, 11], [32])
    assert edit_success(model, edit, {"efficacy": [other]}).wins[0].item() == 0


def test_the_report_names_the_network_from_which_each_part_was_taken(either, edit, probes):
    """They may be older than the weights that are edited, as in nested edits."""
    model, request = either.model, probes["efficacy"][0].query
    with model.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", named("half", lambda out, hook: out / 2))]):
        key = compute_key(model, request, LAYER)
    value = optimize_value(model, request, LAYER, kl_factor=0.0, steps=2)
    alone = edit_success(model, RankOneEdit(model, LAYER, key, value), {"efficacy": [request]})
    with edit:
        moment = second_moment(model, [torch.arange(5, 15)] * 2, LAYER)
        nested = edit_success(model, RankOneEdit(model, LAYER, key, value, moment), {"efficacy": [request]})
    parts = nested.record["taken_from"]
    assert alone.record["taken_from"] == {**parts, "covariance": None}
    assert parts["key"]["hooks"] == {"blocks.0.hook_mlp_out": ["forward: half"]}
    assert parts["value"]["hooks"] == alone.record["hooks"] == {}
    assert parts["value"]["weights_sha256"] == parts["key"]["weights_sha256"] == alone.record["weights_sha256"]
    assert parts["covariance"]["weights_sha256"] == nested.record["weights_sha256"]
    assert nested.record["weights_sha256"] != alone.record["weights_sha256"]
