"""Studies of keys, values and edits on models of each kind: blocks, uniform noise, time conditioning, experts."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch

from diffusion_lens.analysis import (
    CanvasLayout,
    EditSettings,
    MemitSettings,
    RankOneEdit,
    ValueSettings,
    compute_key,
    edit_study,
    edit_success,
    key_value_study,
    memit,
    memit_study,
    optimize_value,
    second_moment,
)
from diffusion_lens.analysis.rome import query_with_prefixes
from diffusion_lens.data import EditRequest, toy_facts

KINDS = ["sdar", "bd3lm", "uniform", "udlm", "sedd-uniform", "llada2", "dream", "radd"]
PEOPLE = toy_facts.load()
ASKED = {fact.id: fact for fact in PEOPLE.facts("both")}
LENGTH, PREFIXES = 20, ["Tilda Drusser is the miner. "]
GENTLE = ValueSettings(lr=0.05, steps=3, kl_factor=0.0)  # steps small enough that round-off stays small
ON_CANVAS = dict(length=LENGTH, first_tokens=2)


@pytest.fixture(params=KINDS)
def kind(request, in_words):
    """A model of each kind, at a time if it is conditioned on one."""
    model = in_words(request.param)
    moments_of(model)
    with model.at_time(0.6) if model.cfg.time_conditioning else nullcontext():
        yield model


@cache
def moments_of(model):
    """C of two layers over some sentences, each under noise of its own, so outside `at_time`."""
    return {layer: second_moment(model, PEOPLE.sentences()[::300], layer) for layer in dense_layers(model)[:2]}


def dense_layers(model):
    experts = model.cfg.experts
    return [i for i in range(model.cfg.n_layers - 1) if experts is None or not experts.layers[i]]


def request_about(person, other):
    """A request to write another person's description, with a paraphrase and a neighbour."""
    true, theirs = (ASKED[f"toy1-{number:03d}-p2d-held-out-0"] for number in (person, other))
    again = ASKED[f"toy1-{person:03d}-p2d-held-out-1"]
    return EditRequest(
        true=true,
        new=replace(true, answer=theirs.answer, id=f"person-{person}"),
        paraphrases=(replace(again, answer=theirs.answer),),
        neighbours=(ASKED[f"toy1-{other + 1:03d}-p2d-held-out-1"],),
    )


REQUESTS = [request_about(40, 90), request_about(43, 92)]


def queries_of(model, fact, prefixes=PREFIXES):
    return query_with_prefixes(model, fact, prefixes, **ON_CANVAS)


def test_every_fact_has_the_key_and_value_it_has_alone(kind):
    facts = [request.new for request in REQUESTS]
    study = key_value_study(kind, facts, prefixes=PREFIXES, search=GENTLE, **ON_CANVAS)
    assert study.layers == dense_layers(kind)
    for row, fact in enumerate(facts):
        for column, layer in enumerate(study.layers):
            value = optimize_value(kind, queries_of(kind, fact), layer, **vars(GENTLE))
            key = compute_key(kind, queries_of(kind, fact), layer).vector
            torch.testing.assert_close(study.keys[row, column], key, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(study.values[row, column], value.vector, rtol=1e-3, atol=1e-3)
            assert study.after[row, column].item() == pytest.approx(value.probability_after, rel=1e-2, abs=1e-7)
            assert study.before[row].item() == pytest.approx(value.probability_before, rel=1e-3, abs=1e-7)
    assert study.record.get("time") == (0.6 if kind.cfg.time_conditioning else None)


def test_every_request_is_edited_as_alone(kind):
    """One request at a time, with the functions for one edit."""
    layer = dense_layers(kind)[-1]
    search = replace(GENTLE, lr=0.3)
    settings = EditSettings(layer, search, prefixes=PREFIXES, layout=CanvasLayout(**ON_CANVAS))
    weights = {name: weight.clone() for name, weight in kind.state_dict().items()}
    moment = moments_of(kind)[layer]
    study = edit_study(kind, REQUESTS, settings, covariance=moment)
    assert all(torch.equal(weight, weights[name]) for name, weight in kind.state_dict().items())
    for row, request in enumerate(REQUESTS):
        queries = queries_of(kind, request.new)
        value = optimize_value(kind, queries, layer, **vars(search))
        edit = RankOneEdit(kind, layer, compute_key(kind, queries, layer), value, moment)
        alone = edit_success(kind, edit, request.probes(kind, lambda fact: queries_of(kind, fact, [])[0]))
        own = study.owner == row
        assert [group for group, mine in zip(study.groups, own.tolist(), strict=True) if mine] == alone.groups
        assert torch.equal(study.wins[:, own], alone.wins)
        torch.testing.assert_close(study.probabilities[:, own], alone.probabilities, rtol=1e-2, atol=1e-7)
    assert (study.probabilities[1] / study.probabilities[0]).log().abs().max() > 0.1


@pytest.mark.parametrize("kind", ["sdar", "sedd-uniform", "llada2"], indirect=True)
def test_requests_edited_at_once_are_judged_under_that_edit(kind):
    moments, search = moments_of(kind), replace(GENTLE, lr=0.3)
    layers = list(moments)
    settings = MemitSettings(layers, search, prefixes=PREFIXES, cov_weight=1.0, layout=CanvasLayout(**ON_CANVAS))
    weights = {name: weight.clone() for name, weight in kind.state_dict().items()}
    study = memit_study(kind, REQUESTS, settings, covariances=moments)
    assert all(torch.equal(weight, weights[name]) for name, weight in kind.state_dict().items())
    queries = [queries_of(kind, request.new) for request in REQUESTS]
    edit = memit(kind, queries, layers, covariances=moments, settings=search, cov_weight=1.0)
    for row, request in enumerate(REQUESTS):
        alone = edit_success(kind, edit, request.probes(kind, lambda fact: queries_of(kind, fact, [])[0]))
        own = study.owner == row
        assert torch.equal(study.wins[:, own], alone.wins)
        torch.testing.assert_close(study.probabilities[:, own], alone.probabilities, rtol=1e-4, atol=1e-7)
    assert (study.probabilities[1] / study.probabilities[0]).log().abs().max() > 0.1


@pytest.mark.parametrize("kind", ["llada_moe", "llada2"], indirect=True)
def test_layers_with_experts_have_no_key_and_value(kind):
    layer = next(i for i, has_experts in enumerate(kind.cfg.experts.layers) if has_experts)
    facts, message = [REQUESTS[0].new], rf"layer {layer} of .* experts, and keys and values are those of one MLP"
    for call in (
        lambda: key_value_study(kind, facts, [layer], **ON_CANVAS),
        lambda: edit_study(kind, REQUESTS, EditSettings(layer, GENTLE)),
        lambda: memit_study(kind, REQUESTS, MemitSettings([0, layer], GENTLE)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("name", ["bd3lm", "udlm", "sedd-uniform"])
def test_a_study_needs_the_time_that_its_network_is_told(in_words, name):
    model = in_words(name)
    with pytest.raises(ValueError, match="is conditioned on the time of its canvas: pass time="):
        key_value_study(model, [REQUESTS[0].new], search=GENTLE, **ON_CANVAS)
    with pytest.raises(ValueError, match="is conditioned on the time of its canvas: pass time="):
        edit_study(model, REQUESTS, EditSettings(0, GENTLE, layout=CanvasLayout(**ON_CANVAS)))
    with model.at_time(0.6), pytest.raises(ValueError, match="second_moment noises texts, each with a probability"):
        second_moment(model, PEOPLE.sentences()[::300], 0)
