"""Other objectives of the AR network: the rows that each makes of a sentence, and how it is asked."""

import math

import pytest
import torch

from diffusion_lens.training import train
from one_layer import Cell, one_layer_study
from one_layer.objectives import FIRST, IS, MASK, MID, N_FACTS, NOTHING, OBJECTIVES, PRE, REV, SECOND, SUF, THIRD
from one_layer.study import build, recipe
from one_layer.toy import INFILL, infill_accuracy, measure, sentences, taught_pairs

A, B = 5, 5 + N_FACTS
SENTENCE = [A, IS, B]


def rows_of(name, n=400):
    """All rows that an objective makes of one sentence, by how often it does."""
    drawn = torch.rand((n, 4), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [OBJECTIVES[name].row(SENTENCE, u) for u in drawn]
    return {tuple(row.tokens): sum(each.tokens == row.tokens for each in rows) / n for row in rows}, rows


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ar-reversed", {(A, IS, B): 1 / 2, (B, IS, A): 1 / 2}),
        (
            "ar-segments",
            {(A, IS, B): 5 / 8, (IS, B, REV, A): 1 / 8, (B, REV, A, IS): 1 / 8, (B, REV, IS, REV, A): 1 / 8},
        ),
        (
            "ar-permuted",
            {
                (FIRST, A, SECOND, IS, THIRD, B): 1 / 6,
                (FIRST, A, THIRD, B, SECOND, IS): 1 / 6,
                (SECOND, IS, FIRST, A, THIRD, B): 1 / 6,
                (SECOND, IS, THIRD, B, FIRST, A): 1 / 6,
                (THIRD, B, FIRST, A, SECOND, IS): 1 / 6,
                (THIRD, B, SECOND, IS, FIRST, A): 1 / 6,
            },
        ),
    ],
)
def test_the_rows_of_a_sentence(name, expected):
    found, _ = rows_of(name)
    assert set(found) == set(expected)
    for tokens, share in expected.items():
        assert found[tokens] == pytest.approx(share, abs=0.08)


def test_filling_in_moves_every_part_to_the_end():
    found, _ = rows_of("ar-fill")
    assert found.pop((A, IS, B)) == pytest.approx(1 / 2, abs=0.06)
    for tokens in found:
        assert tokens[0] == PRE
        assert len(tokens) == 6
        before, rest = tokens[1 : tokens.index(SUF)], tokens[tokens.index(SUF) + 1 :]
        after, middle = rest[: rest.index(MID)], rest[rest.index(MID) + 1 :]
        assert [*before, *middle, *after] == SENTENCE
    parts = {tokens[tokens.index(MID) + 1 :] for tokens in found}
    assert parts == {(), (A,), (IS,), (B,), (A, IS), (IS, B), (A, IS, B)}


def test_masked_input_hides_what_is_read_and_not_what_is_predicted():
    found, rows = rows_of("ar-masked")
    assert len(found) == 8
    assert all(row.targets == [IS, B, NOTHING] for row in rows)
    for i, token in enumerate(SENTENCE):
        assert {row.tokens[i] for row in rows} == {token, MASK}
        assert sum(row.tokens[i] == MASK for row in rows) / len(rows) == pytest.approx(0.5, abs=0.08)


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "ar-masked"])
def test_every_token_but_a_mark_is_predicted_from_those_before_it(name):
    _, rows = rows_of(name)
    for tokens, targets in rows:
        assert targets == [NOTHING if token > MASK else token for token in tokens[1:]] + [NOTHING]


def test_the_loss_is_the_mean_over_the_targets_of_single_rows():
    objective, told = OBJECTIVES["ar-fill"], sentences("one-way")[:6]
    model = build(Cell("rotary", "ar-fill", "one-way", 1, 0))
    drawn = torch.rand((6, 4), generator=torch.Generator().manual_seed(3)).tolist()
    terms = []
    with torch.no_grad():
        for sentence, u in zip(told.tolist(), drawn, strict=True):
            tokens, targets = objective.row(sentence, u)
            log_probs = model(torch.tensor([tokens]))[0].log_softmax(-1)
            terms += [-log_probs[i, token].item() for i, token in enumerate(targets) if token != NOTHING]
        loss = objective.loss(model, told, torch.Generator().manual_seed(3))
    assert loss.item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_network_is_asked_in_the_form_of_its_rows(name):
    found, _ = rows_of(name)
    pair = taught_pairs(name, "one-way")[A - 1]
    forward, reverse = pair.forward.tokens.tolist(), pair.reverse.tokens.tolist()
    if name == "ar-masked":
        assert forward == SENTENCE
    else:
        assert tuple(forward) in found, "it is trained to answer the question as trained"
    assert reverse == [{A: B, B: A}.get(token, token) for token in forward]
    assert (pair.forward.answer_token, pair.reverse.answer_token) == (B, A)
    for canvas, source in ((pair.forward, B), (pair.reverse, B)):
        assert canvas.tokens[canvas.row + 1] == canvas.answer_token
        assert canvas.tokens[canvas.source] == source
    infill = OBJECTIVES[name].infill
    assert (infill is None) == (name == "ar-masked")
    if infill is not None:
        assert any(tokens[: len(infill(B)) + 1] == (*infill(B), A) for tokens in found), "A is trained behind it"


def test_a_network_that_fills_in_learns_it_and_is_measured():
    cell = Cell("rotary", "ar-reversed", "one-way", 1, 0)
    model = build(cell)
    assert infill_accuracy(model, cell.variant, cell.data) < 0.1
    loss = OBJECTIVES[cell.variant].loss
    train(model, sentences(cell.data), recipe(60, 0), objective=loss, progress=False)
    assert (
        infill_accuracy(model, cell.variant, cell.data) == measure(model, cell.variant, cell.data)["reverse_accuracy"]
    )
    assert infill_accuracy(model, cell.variant, cell.data) > 0.9
    mdm = build(Cell("rotary", "mdm", "one-way", 1, 0))
    assert infill_accuracy(mdm, "mdm", "one-way") == measure(mdm, "mdm", "one-way")["same_accuracy"]
    assert math.isnan(infill_accuracy(model, "ar", "one-way"))


def test_a_study_with_objectives_measures_one_thing_more():
    settings = dict(positions=["none"], data=["one-way"], depths=[1], seeds=1, steps=2)
    study = one_layer_study(**settings, variants=["ar-permuted", "ar"])
    assert [cell.variant for cell in study.cells] == ["ar", "ar-permuted"]
    plain = one_layer_study(**settings)
    assert study.record["measures"] == [*plain.record["measures"], INFILL]
    # The AR network is that of the study without the others, to the bit.
    assert torch.equal(study.values[0, :, :-1].view(torch.int32), plain.values[1].view(torch.int32))
    assert INFILL in study.curve_rows()[1]
    assert INFILL not in plain.curve_rows()[0]
    assert "AR, permuted" in study.to_text()
    with pytest.raises(ValueError, match="variants='ar-filled'; it must be one of mdm, ar, ar-masked"):
        one_layer_study(**settings, variants=["ar-filled"])
