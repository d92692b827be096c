"""Entities that are masked as wholes: all of one or none of it, with the probability of a single token."""

import json

import pytest
import torch
from typer.testing import CliRunner

from diffusion_lens import Fact, HookedDiffusionTransformer
from diffusion_lens.data import toy_facts
from diffusion_lens.model.loss import hide, masked_batch
from diffusion_lens.model.noise import schedule_of
from diffusion_lens.training import TrainingConfig, TrainingRows, finetune, train
from diffusion_lens.training.finetune import Completion, encode_completions, entity_spans, read_completions

CONFIG = TrainingConfig(steps=2, batch_size=2, warmup=1)
# Positions 1 to 3 and 5, 6 are entities.
FIRST = torch.tensor([[0, 1, 1, 1, 4, 5, 5, 7]])
ENTITIES = ((0,), (1, 2, 3), (4,), (5, 6), (7,))
GUSTAV = Fact("Gustav Geisser is the", "Gustav Geisser", " famous pilot of Gulstad.")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("schedule", [None, schedule_of(None)])
def test_every_sample_masks_all_or_none_of_an_entity(schedule):
    tokens, n = torch.full((4000, 8), 7), 4000
    noisy, p = hide(tokens, -1, generator=generator(), entities=FIRST.expand(n, 8), schedule=schedule)
    usual, same_p = hide(tokens, -1, generator=generator(), schedule=schedule)
    masked = noisy == -1
    assert torch.equal(p, same_p)
    for entity in ENTITIES:
        whole = masked[:, entity]
        assert (whole.all(dim=1) == whole.any(dim=1)).all()
        # One draw decides, that of the first token, so that p is what it is for a single token.
        assert torch.equal(whole[:, 0], (usual == -1)[:, entity[0]])
    for pos in range(8):  # by rate, which is spread evenly from 0 to 1
        assert masked[:, pos].float().mean().item() == pytest.approx(0.5, abs=0.03)
        low = p[:, 0] < 0.25
        assert masked[low, pos].float().mean().item() == pytest.approx(0.125, abs=0.04)


def test_entities_of_one_token_leave_the_noise_as_it_is(every):
    model, tokens = every.model, every.tokens % 50
    if not model.cfg.has_mask or model.cfg.self_conditioning:
        return
    alone = torch.arange(tokens.shape[1]).expand_as(tokens)
    plain = masked_batch(model, tokens, generator=generator(3))
    with_entities = masked_batch(model, tokens, generator=generator(3), entities=alone)
    for name in ("tokens", "targets", "weights", "predicted"):
        assert torch.equal(getattr(plain, name), getattr(with_entities, name))
    joined = alone.clone()
    joined[:, 2:6] = 2
    whole = masked_batch(model, tokens, generator=generator(3), entities=joined).predicted[:, 2:6]
    assert torch.equal(whole, plain.predicted[:, 2:3].expand(-1, 4))


def test_the_weighted_sum_is_right_on_average(either):
    """With 1/p as weight, each position counts 1/n on average, whatever the entity."""
    if either.model.cfg.is_autoregressive:
        return
    tokens = either.tokens[:1, :8].repeat(64, 1) % 50
    total = torch.zeros(8)
    for seed in range(60):
        batch = masked_batch(either.model, tokens, generator=generator(seed), eps=0.05, entities=FIRST.expand(64, 8))
        weights = torch.zeros(64, 8).masked_scatter(batch.predicted, batch.weights)
        total += weights.sum(dim=0) / 60
    torch.testing.assert_close(total, torch.full((8,), 1 / 8), rtol=0.12, atol=0)


@pytest.fixture(scope="module")
def tiny_mdm():
    return HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")


def words_of(model, rows, i):
    """The entities of a row, in words, by the tokens that share a first position."""
    first, words = rows.entities[i], model.to_str_tokens(rows.tokens[i])
    return [
        [words[pos] for pos in range(len(words)) if first[pos] == start]
        for start in first.unique().tolist()
        if (first == start).sum() > 1
    ]


def encode(model, data, **settings):
    return encode_completions(model, read_completions(data), mask_entities=True, **settings)


def test_which_tokens_are_an_entity(tiny_mdm, tmp_path):
    text = {"prompt": "Gustav Geisser is the", "completion": " famous pilot of Gulstad."}
    rows = [
        {**text, "entities": ["Gustav Geisser", "pilot of Gulstad"]},
        {**text, "entities": [[0, 14], [29, 44]]},
        {**text, "entities": [[0, 14], [3, 18], [22, 34]]},  # the first two share a token
        {**text, "entities": []},
    ]
    encoded = encode(tiny_mdm, rows)
    named = [["Gustav", "Geisser"], ["pilot", "of", "Gulstad"]]

    def plain(entities):
        return [[word.strip(" ▁Ġ") for word in words] for words in entities]

    assert plain(words_of(tiny_mdm, encoded, 0)) == plain(words_of(tiny_mdm, encoded, 1)) == named
    assert plain(words_of(tiny_mdm, encoded, 2)) == [["Gustav", "Geisser", "is"], ["famous", "pilot"]]
    assert words_of(tiny_mdm, encoded, 3) == []
    of_fact = encode(tiny_mdm, [GUSTAV])
    assert plain(words_of(tiny_mdm, of_fact, 0)) == [["Gustav", "Geisser"], ["famous", "pilot", "of", "Gulstad"]]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert encode(tiny_mdm, tmp_path / "rows.jsonl").sha256() == encoded.sha256()
    unmasked = encode_completions(tiny_mdm, read_completions(rows))
    assert unmasked.entities is None
    assert unmasked.sha256() != encoded.sha256()
    assert torch.equal(unmasked.tokens, encoded.tokens)


def test_mentions_are_entities_each(tiny_mdm):
    fact = Fact("Gustav Geisser met Gustav Geisser at the", "Gustav Geisser", " ...", subject_start=19)
    source = {"prompt": fact.prompt, "completion": " pilot.", "entities": ["Gustav Geisser"]}
    assert entity_spans(Completion(source["prompt"], source["completion"], "row 0", source)) == [(0, 14), (19, 33)]
    assert entity_spans(Completion(fact.prompt, fact.answer, "row 0", fact)) == [(19, 33)]


def test_rows_that_do_not_say_are_refused(tiny_mdm, tmp_path):
    text = {"prompt": "Gustav Geisser is the", "completion": " pilot."}
    cases = [
        (text, "row 0 has 'prompt', 'completion' and no list of its entities, which mask_entities needs"),
        ({**text, "entities": "Gustav"}, "no list of its entities"),
        ({**text, "entities": ["Tilda"]}, "row 0: the entity 'Tilda' is neither a text in 'Gustav Geisser is the"),
        ({**text, "entities": [[3, 99]]}, r"the entity \[3, 99\] is neither .* in its 28 characters"),
        (Fact("Gustav Geisser is the", "Tilda", " pilot."), "the subject 'Tilda' is not in the prompt"),
    ]
    for row, message in cases:
        with pytest.raises(ValueError, match=message):
            finetune(tiny_mdm, [row], CONFIG, tmp_path / "out", mask_entities=True, progress=False)
    across = {"prompt": "Gustav Geisser is the pilot", "completion": " of Gulstad.", "entities": ["pilot of Gulstad"]}
    encode(tiny_mdm, [across])
    with pytest.raises(ValueError, match="row 0: an entity begins in the prompt and ends in the completion"):
        encode(tiny_mdm, [across], answer_only=True)
    causal = HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu")
    with pytest.raises(ValueError, match="'tiny-ar' is an autoregressive model, which masks nothing: train it without"):
        finetune(causal, [GUSTAV], CONFIG, tmp_path / "out", mask_entities=True, progress=False)
    rows = TrainingRows(torch.full((2, 3), 7), entities=torch.tensor([[0, 0, 2], [0, 1, 1]]))
    with pytest.raises(ValueError, match="'tiny-ar' is an autoregressive model, which masks nothing"):
        train(causal, rows, CONFIG, progress=False)
    assert not (tmp_path / "out").exists()
    not_first = [[2, 1, 2], [0, 1, 2]]  # a batch that is cut to two positions lacks position 2
    for wrong in ([[0, 0, 1], [0, 1, 2]], [[0, 0, 3], [0, 1, 2]], [[-1, 0, 2], [0, 1, 2]], not_first):
        with pytest.raises(ValueError, match="entities has, for each position of tokens, the first position of its"):
            TrainingRows(torch.full((2, 3), 7), entities=torch.tensor(wrong))


def test_a_training_masks_entities_as_wholes(tiny_mdm, tmp_path, monkeypatch):
    """In every batch, whichever row comes where, and cut to its longest row."""
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    facts = [fact for fact in toy_facts.load().facts(held_out=False) if fact.trained == fact.asked == "p2d"][::200]
    canvases = []
    model.embed.register_forward_pre_hook(lambda _, inputs: canvases.append(inputs[0].clone()))
    finetune(model, facts, CONFIG, tmp_path / "out", mask_entities=True, answer_only=True, progress=False)
    rows = encode(model, facts)
    checked = 0
    for canvas in (row for batch in canvases for row in batch):
        masked = canvas == model.cfg.mask_token_id
        known = rows.tokens[:, : len(masked)]
        i = next(i for i, row in enumerate(known) if torch.equal(row[~masked], canvas[~masked]))
        for start in rows.entities[i].unique().tolist():
            entity = masked[(rows.entities[i] == start)[: len(masked)]]
            assert entity.all() or not entity.any()
            checked += len(entity) > 1 and bool(entity.any())
    assert checked


def test_the_command_has_the_option(tiny_mdm, tmp_path):
    from diffusion_lens.cli import app

    rows = [{"prompt": "Gustav Geisser is the", "completion": " pilot.", "entities": ["Gustav Geisser"]}] * 4
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = ["finetune", "tiny-mdm", "--data", str(tmp_path / "rows.jsonl"), "--epochs", "1", "--batch-size", "4"]
    for name, more in (("whole", ["--mask-entities"]), ("plain", [])):
        result = CliRunner().invoke(app, [*asked, *more, "--out", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        run = json.loads((tmp_path / name / "training" / "run.json").read_text())
        encoded = encode_completions(tiny_mdm, read_completions(rows), mask_entities=name == "whole")
        assert run["data_sha256"] == encoded.sha256()
