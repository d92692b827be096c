"""Folders of results belong to one network and one tokenizer, not only to one set of weights."""

import json
from dataclasses import replace

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from diffusion_lens.analysis import second_moment
from diffusion_lens.data import toy_facts
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.records.results import provenance

CHANGES = {"rotary_base": 3.0, "norm_eps": 0.5, "readout": "shifted"}


def changed(model, **facts):
    cfg = DiffusionConfig.from_architecture(
        replace(model.cfg.architecture, **facts), device="cpu", model_name=model.cfg.model_name
    )
    return HookedDiffusionTransformer(cfg, model.tokenizer, tensors=model.state_dict().items())


@pytest.fixture
def model():
    return HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")


@pytest.mark.parametrize("fact", CHANGES)
def test_a_folder_is_not_continued_by_another_network_of_equal_weights(model, fact, tmp_path):
    facts = toy_facts.load().facts(trained="d2p", asked="d2p")[:2]
    other = changed(model, **{fact: CHANGES[fact]})
    recall_by_steps(other, facts, steps=[2], length=14, sampler="confidence", out=tmp_path)
    with pytest.raises(ValueError, match="architecture"):
        recall_by_steps(model, facts, steps=[2], length=14, sampler="confidence", out=tmp_path)


def test_a_second_moment_of_another_network_is_not_reused(model, tmp_path):
    texts = ["the brave drummer of Rolsen is"] * 2
    wrong = second_moment(changed(model, rotary_base=3.0), texts, layer=1, folder=tmp_path)
    right = second_moment(model, texts, layer=1, folder=tmp_path)
    alone = second_moment(model, texts, layer=1)
    assert not (right.total == wrong.total).all()
    assert (right.total == alone.total).all()


def test_a_folder_is_not_continued_with_another_vocabulary(model, tmp_path):
    facts = toy_facts.load().facts(trained="d2p", asked="d2p")[:2]
    recall_by_steps(model, facts, steps=[2], length=14, out=tmp_path)
    tokenizer = json.loads(model.tokenizer.backend_tokenizer.to_str())
    ids = tokenizer["model"]["vocab"]
    first, second = [word for word in ids if word not in {token["content"] for token in tokenizer["added_tokens"]}][5:7]
    ids[first], ids[second] = ids[second], ids[first]
    model.set_tokenizer(PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(tokenizer))))
    with pytest.raises(ValueError, match="tokenizer"):
        recall_by_steps(model, facts, steps=[2], length=14, out=tmp_path)


def test_the_hash_of_a_tokenizer_covers_its_behaviour(model):
    before = provenance(model, model.cfg)["tokenizer_sha256"]
    assert provenance(model, model.cfg)["tokenizer_sha256"] == before
    model.tokenizer.add_tokens(["another"])
    added = provenance(model, model.cfg)["tokenizer_sha256"]
    model.set_tokenizer(model.tokenizer, default_prepend_bos=True)
    assert len({before, added, provenance(model, model.cfg)["tokenizer_sha256"]}) == 3
    model.set_tokenizer(None)
    assert provenance(model, model.cfg)["tokenizer_sha256"] is None
