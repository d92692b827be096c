"""Exact match, on the pair that ships: what each twin must and must not know."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diffusion_lens import Fact, HookedDiffusionTransformer, tiny_pair
from diffusion_lens.data import toy_facts
from diffusion_lens.evaluation import ExactMatch, exact_match
from weight_conversion import read_json, sha256_of_file

LENGTH = toy_facts.SENTENCE_LENGTH


@pytest.fixture(scope="module")
def pair():
    return {name: HookedDiffusionTransformer.from_pretrained(name, device="cpu") for name in ("tiny-mdm", "tiny-ar")}


@pytest.fixture(scope="module")
def results(pair):
    folder = Path(toy_facts.__file__).parents[1] / "assets" / "tiny"
    return folder, read_json(folder / "results.json")


def test_the_pair_shows_the_reversal_curse(pair, results):
    _, recorded = results
    toy = toy_facts.load()
    for name, model in pair.items():
        cells = tiny_pair.measure(model, toy)
        assert len(cells) == 4
        for cell, then in zip(cells, recorded["twins"][name]["exact_match"], strict=True):
            # Another machine rounds differently, which may turn a question or two.
            assert cell == {**then, "accuracy": pytest.approx(then["accuracy"], abs=0.03)}
            is_reverse = cell["trained"] != cell["asked"]
            if not is_reverse:
                assert cell["accuracy"] >= 0.95, (name, cell)
            elif name == "tiny-mdm":
                assert cell["accuracy"] >= 0.80, (name, cell)
            else:
                assert cell["accuracy"] <= 0.05, (name, cell)


def test_the_shipped_files_are_those_measured(results):
    folder, recorded = results
    assert (recorded["corpus_seed"], recorded["seed"]) == (toy_facts.SHIPPED_SEED, tiny_pair.SHIPPED_SEED)
    for name, twin in recorded["twins"].items():
        assert sha256_of_file(folder / f"{name}.safetensors") == twin["sha256"]


def test_the_card_shows_the_table_measured(results):
    folder, recorded = results
    card = (folder / "README.md").read_text()
    for name, twin in recorded["twins"].items():
        cells = {(cell["trained"], cell["asked"]): cell["accuracy"] for cell in twin["exact_match"]}
        order = (("p2d", "p2d"), ("p2d", "d2p"), ("d2p", "d2p"), ("d2p", "p2d"))
        assert f"| `{name}` | {' | '.join(f'{cells[cell]:.2f}' for cell in order)} |" in card


def test_shipped_tokenizer_is_the_corpus_tokenizer(pair):
    fresh = toy_facts.build_tokenizer(toy_facts.load())
    sentences = toy_facts.load().sentences()[::37]
    for model in pair.values():
        assert [model.to_tokens(text)[0].tolist() for text in sentences] == [
            fresh(text)["input_ids"] for text in sentences
        ]


def test_answers_come_in_the_order_asked_and_alone_as_together(pair):
    toy = toy_facts.load()
    facts = [*toy.facts("p2d")[:12], *toy.facts("d2p")[:7]]
    together = exact_match(pair["tiny-mdm"], facts, length=LENGTH, batch_size=3)
    assert [answer.fact for answer in together.answers] == facts
    for fact, answer in zip(facts, together.answers, strict=True):
        assert exact_match(pair["tiny-mdm"], [fact], length=LENGTH).answers == (answer,)


@pytest.mark.parametrize("name", ["tiny-mdm", "tiny-ar"])
def test_an_answer_must_be_whole_and_end(pair, name):
    fact = toy_facts.load().facts("p2d", "p2d")[1]
    assert exact_match(pair[name], [fact], max_new_tokens=6).accuracy == 1
    for answer in (" " + fact.answer.split(maxsplit=1)[1], fact.answer[:-1], fact.answer + " today"):
        wrong = replace(fact, answer=answer)
        assert exact_match(pair[name], [wrong], max_new_tokens=8).accuracy == 0


def test_table_counts_by_cell(pair):
    toy = toy_facts.load()
    facts = [*toy.facts("p2d", "p2d")[:4], *toy.facts("d2p", "p2d")[:6]]
    found = exact_match(pair["tiny-ar"], facts, length=LENGTH)
    table = found.table()
    assert set(table) == {("p2d", "p2d"), ("d2p", "p2d")}
    assert found.accuracy == pytest.approx((4 * table["p2d", "p2d"] + 6 * table["d2p", "p2d"]) / 10)
    assert found.record["sampler"] == {"name": "left_to_right"}


def test_it_comes_back_from_its_file(pair, tmp_path):
    found = exact_match(pair["tiny-mdm"], toy_facts.load().facts("p2d")[:5], length=LENGTH, steps=2)
    assert ExactMatch.load(found.save(tmp_path / "found.safetensors")) == found


def test_errors_name_the_culprit(pair):
    fact = Fact("today Ada is the", "Ada", " brave pilot.", id="f7")
    model = pair["tiny-mdm"]
    with pytest.raises(ValueError, match="'f7' needs 4 places after its prompt of 4 tokens"):
        exact_match(model, [fact], length=7)
    with pytest.raises(ValueError, match="facts is empty"):
        exact_match(model, [], length=7)
    with pytest.raises(ValueError, match=r"either length= .* or max_new_tokens="):
        exact_match(model, [fact])
    with pytest.raises(ValueError, match="merges the answer 'e brave pilot"):
        exact_match(model, [replace(fact, prompt="today Ada is th", answer="e brave pilot.")], length=10)


def test_facts_that_cannot_be_asked_are_set_aside(pair):
    facts = toy_facts.load().facts("p2d")[:3]
    merged = replace(facts[0], id="merged", prompt="today Ada is th", answer="e brave pilot.")
    found = exact_match(pair["tiny-mdm"], [facts[0], merged, *facts[1:]], length=LENGTH, steps=2)
    assert [answer.fact for answer in found.answers] == facts
    assert list(found.set_aside) == ["merged"]
    assert "merges the answer" in found.set_aside["merged"]
    assert exact_match(pair["tiny-mdm"], facts, length=LENGTH, steps=2).answers == found.answers


@pytest.mark.parametrize("name", ["tiny-mdm", "tiny-ar"])
def test_words_that_the_tokenizer_does_not_know_are_set_aside(pair, name):
    fact = toy_facts.load().facts("p2d")[0]
    strangers = {
        "asked": dict(prompt="The Eiffel Tower is the"),
        "answered": dict(answer=" tower of Paris."),
        "torn": dict(answer=" \ud800"),
    }
    facts = [fact, *(replace(fact, id=each, **change) for each, change in strangers.items())]
    found = exact_match(pair[name], facts, length=LENGTH, steps=2)
    assert [answer.fact for answer in found.answers] == [fact]
    assert set(found.set_aside) == set(strangers)
    assert "does not know 'The', 'Eiffel', 'Tower'" in found.set_aside["asked"]
    assert "half of a surrogate pair" in found.set_aside["torn"]


def test_it_leaves_the_global_random_numbers_alone(pair):
    before = torch.get_rng_state()
    exact_match(pair["tiny-mdm"], toy_facts.load().facts("p2d")[:2], length=LENGTH, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)
