"""Edits and studies that are refused before anything is computed or written, and updates that are written in whole."""

from dataclasses import replace

import pytest
import torch

from diffusion_lens.analysis import (
    CanvasLayout,
    EditSettings,
    EditStudy,
    MemitEdit,
    MemitSettings,
    ValueSettings,
    edit_study,
    edit_success,
    memit,
    memit_study,
    second_moment,
)
from diffusion_lens.analysis.rome import query_with_prefixes
from diffusion_lens.data import EditRequest, toy_facts
from diffusion_lens.facts.fact import Probe

pytestmark = pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)

PEOPLE = toy_facts.load()
ASKED = [fact for fact in PEOPLE.facts("both", "p2d") if fact.id.endswith("-held-out-0")]
SEARCH = ValueSettings(steps=2, lr=0.1, kl_factor=0.0)
LAYOUT = CanvasLayout(14, first_tokens=2)
ONE = EditSettings(1, SEARCH, layout=LAYOUT)
MANY = MemitSettings([0, 1], SEARCH, cov_weight=1, layout=LAYOUT)


def request_about(true, other):
    new = replace(true, answer=other.answer, id=f"{true.id}-new")
    return EditRequest(true, new, paraphrases=(), neighbours=(ASKED[9],))


REQUESTS = [request_about(*ASKED[i : i + 2]) for i in (0, 2, 4)]


@pytest.fixture(scope="module")
def moments(tiny):
    return {layer: second_moment(tiny, PEOPLE.sentences()[::60], layer) for layer in (0, 1)}


def test_a_refused_covariance_leaves_no_folder(tiny, moments, tmp_path):
    """So the same folder serves the corrected call."""
    with pytest.raises(ValueError, match="the covariance was taken at layer 0"):
        edit_study(tiny, REQUESTS, ONE, covariance=moments[0], out=tmp_path / "one")
    with pytest.raises(ValueError, match=r"the covariance of layer 1 is \[3, 3\], and its MLP has 352 units"):
        edit_study(tiny, REQUESTS, ONE, covariance=torch.eye(3), out=tmp_path / "one")
    with pytest.raises(ValueError, match=r"no covariance of layer 0; covariances has those of \[1\]"):
        memit_study(tiny, REQUESTS, MANY, covariances={1: moments[1]}, out=tmp_path / "many")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_weights_of_the_corpus_that_are_refused(tiny, weight):
    with pytest.raises(ValueError, match=r"cov_weight=\S+; it must be a finite number above 0"):
        replace(MANY, cov_weight=weight)
    with pytest.raises(ValueError, match=r"cov_weight=\S+; it must be a finite number above 0"):
        memit(tiny, [ASKED[0].to_query(tiny)], [1], cov_weight=weight)


def test_covariances_of_other_layers_do_not_belong_to_a_study(tiny, moments, tmp_path):
    settings = replace(MANY, layers=[1])
    study = memit_study(tiny, REQUESTS, settings, covariances={1: moments[1]}, out=tmp_path)
    assert list(study.record["covariances"]) == ["1"]
    assert memit_study(tiny, REQUESTS, settings, covariances=moments, out=tmp_path).record == study.record


def test_the_record_of_a_mass_edit_names_its_covariances(tiny, moments):
    request = [query_with_prefixes(tiny, REQUESTS[0].new, [], length=14, first_tokens=2)]
    given = memit(tiny, request, [1], covariances=moments, settings=SEARCH).record["covariances"]
    assert given["1"]["key"] == moments[1].record["key"]
    assert memit(tiny, request, [1], settings=SEARCH).record["covariances"] == {"1": None}


def test_an_answer_cannot_compete_with_itself(tiny):
    """Its mean log-probability is never above its own, so that such a probe would always count as lost."""
    query = ASKED[0].to_query(tiny, first_tokens=2)
    with pytest.raises(ValueError, match="the answer and its rival have the same tokens"):
        Probe(query, ASKED[0].to_query(tiny, first_tokens=2))
    same = request_about(ASKED[0], replace(ASKED[1], answer=ASKED[0].answer))
    study = edit_study(tiny, [same, REQUESTS[1]], ONE)
    assert study.ids == [REQUESTS[1].id]
    assert "have the same tokens" in study.set_aside[same.id]


def test_a_result_with_nan_can_be_merged(tiny):
    """The probabilities of an edit after which the network overflows."""
    study = edit_study(tiny, REQUESTS[:1], ONE)
    overflowed = replace(study, probabilities=study.probabilities * torch.nan)
    merged = EditStudy.merge([overflowed, overflowed])
    assert merged.probabilities.isnan().all()
    with pytest.raises(ValueError, match="has another result"):
        EditStudy.merge([overflowed, study])


def test_c_is_factored_once_for_a_study(tiny, moments, monkeypatch):
    factored = []
    cholesky = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda c: factored.append(len(c)) or cholesky(c))
    settings = replace(ONE, batch_size=2)
    study = edit_study(tiny, REQUESTS, settings, covariance=moments[1])
    assert factored == [352]
    # A bare matrix is C too, and every request has the edit that it has alone.
    again = edit_study(tiny, REQUESTS, settings, covariance=moments[1].matrix)
    assert factored == [352] * 2
    assert torch.equal(again.probabilities, study.probabilities)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_update_is_written_in_every_layer_or_in_none(tiny, monkeypatch, failing):
    """An interruption while the weights are written, for example by the keyboard or for lack of memory."""
    request = [query_with_prefixes(tiny, REQUESTS[0].new, [], length=14, first_tokens=2)]
    edit = memit(tiny, request, [0, 1], settings=SEARCH, cov_weight=1)
    weights = {name: weight.clone() for name, weight in tiny.state_dict().items()}
    copy, copied = torch.Tensor.copy_, []

    def interrupted(self, source):
        copied.append(1)
        if len(copied) == failing + 1:
            raise KeyboardInterrupt
        return copy(self, source)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            edit.apply()
    assert not edit.is_applied
    assert all(torch.equal(weight, weights[name]) for name, weight in tiny.state_dict().items())


def test_the_report_of_a_single_layers_update_names_that_layer(tiny):
    """An edit made of the updates of another one has no record of its own."""
    request = query_with_prefixes(tiny, REQUESTS[0].new, [], length=14, first_tokens=2)
    whole = memit(tiny, [request], [0, 1], settings=SEARCH, cov_weight=1)
    part = MemitEdit(tiny, {layer: whole.factors(layer) for layer in (1, 0)})
    assert part.layers == [0, 1]
    report = edit_success(tiny, part, {"efficacy": request})
    assert report.plot().get_title() == "Edit of layers 0 and 1"
