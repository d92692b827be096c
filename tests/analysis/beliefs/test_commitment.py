"""The step from which a run knows what it will write: against loops, whole canvases, and Prophet's released code."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import commitment
from diffusion_lens.denoising.predictions import Predictions
from diffusion_lens.denoising.samplers import ReMDM, llada

GOLDEN = Path(__file__).parents[2] / "golden"
PROPHET = json.loads((GOLDEN / "prophet" / "runs.json").read_text())


@pytest.fixture(scope="module")
def model():
    return HookedDiffusionTransformer.from_pretrained("site-mdm")


@pytest.fixture(scope="module")
def run(model):
    return model.denoise(["Plerrick Baupling is the", "Plerrick Baupling is"], max_new_tokens=6, steps=9, predictions=3)


def run_of(every):
    blocks = {"steps": 11} if every.model.cfg.opens_blocks else {"steps": 4}
    return every.model.denoise(every.tokens[:, :5] % 500, length=11, predictions=2, **blocks)


def test_every_position_against_a_loop(every):
    run = run_of(every)
    found, predictions = commitment(run), run.predictions
    for row, pos in found.predicted.nonzero().tolist():
        places = [i for i in range(len(predictions.steps)) if predictions.masked[i, row, pos]]
        tokens = [int(predictions.tokens[i, row, pos, 0]) for i in places]
        steps, final = [predictions.steps[i] for i in places], int(run.tokens[row, pos])
        agree = [token == final for token in tokens]
        assert found.first_at[row, pos] == (steps[agree.index(True)] if True in agree else -1)
        tails = [step for i, step in enumerate(steps) if all(agree[i:])]
        assert found.committed_at[row, pos] == (tails[0] if tails else -1)
        assert found.flips[row, pos] == sum(a != b for a, b in pairwise(tokens))
        if True in agree:
            later = agree[agree.index(True) + 1 :]
            assert float(found.stability[row, pos]) == pytest.approx(sum(later) / len(later) if later else 1.0)
        else:
            assert found.stability[row, pos].isnan()
        committed, revealed = int(found.committed_at[row, pos]), int(found.revealed_at[row, pos])
        unsaid = [step for step in range(run.n_steps) if committed <= step < revealed]
        if committed >= 0 and revealed >= 0:
            assert found.lead[row, pos] == len(unsaid)
    assert torch.equal(found.predicted, predictions.masked.any(dim=0))


def test_settled_is_what_the_whole_canvas_would_be(several):
    """Every step's canvas with the likeliest tokens written: is it the final one?"""
    run = run_of(several)
    found, predictions = commitment(run), run.predictions
    for place in range(len(predictions.steps)):
        text = torch.where(predictions.masked[place], predictions.likeliest[place], run.canvases[place])
        assert torch.equal(found.settled[place], (text == run.tokens).all(dim=1))
    total = torch.where(predictions.masked, predictions.entropy, 0.0).sum(dim=2)
    torch.testing.assert_close(found.remaining_entropy, total)


@pytest.mark.parametrize("name", PROPHET)
def test_prophet_stops_at_the_same_step_with_the_same_text(name):
    """Their x0 history, confidences, gaps, the step of the early commit, and the text that it writes."""
    case, tensors = PROPHET[name], load_file(GOLDEN / "prophet" / "runs.safetensors")
    theirs = {key.removeprefix(f"{name}/"): x for key, x in tensors.items() if key.startswith(f"{name}/")}
    model = HookedDiffusionTransformer.from_pretrained(GOLDEN / "llada" / "gqa", device="cpu")
    n_given, n_steps = theirs["prompt"].shape[1], case["steps"]
    prompt = torch.full((1, n_given + case["gen_length"]), model.cfg.mask_token_id)
    prompt[:, :n_given] = theirs["prompt"]
    for pos, token in case["constraints"].items():
        prompt[:, n_given + int(pos)] = token
    if case["constraints"]:  # their blocks count positions, ours masks: the same steps by their own hand
        run = _forced(model, prompt, theirs["revealed_at"], theirs["final"], n_steps)
    else:
        sampler = llada(case["block_length"])
        run = model.denoise(prompt, length=prompt.shape[1], steps=n_steps, sampler=sampler, predictions=2).recorded
    masked = run.masked[:, 0]
    assert torch.equal(run.written[0], theirs["final"])
    assert torch.equal(run.likeliest[:, 0][masked], theirs["x0"][masked])
    read = masked & theirs["confidence"].isfinite()  # they set it to -inf behind the block
    torch.testing.assert_close(run.probabilities[:, 0, :, 0][read], theirs["confidence"][read], rtol=0, atol=1e-5)

    start = n_given + case["answer_start"]
    found = commitment(run, answer=range(start, start + case["answer_length"]))
    open_answer = masked[:, start : start + case["answer_length"]].all(dim=1)
    assert int(open_answer.sum()) >= case["block_length"]
    torch.testing.assert_close(found.gap[open_answer, 0], theirs["gap"][open_answer], rtol=0, atol=1e-5)
    early = found.early_commit(case["thresholds"])
    assert early.step.tolist() == [(case["exit_info"]["exit_decision_step"] or 0) - 1]
    assert bool(early.same_text) == torch.equal(theirs["stopped"], theirs["final"])
    last = int(early.step)
    text = torch.where(masked[last], run.likeliest[last, 0], run.written[0]) if last >= 0 else run.written[0]
    assert torch.equal(text, theirs["stopped"])


def _forced(model, prompt, revealed_at, final, n_steps):
    """The predictions on canvases on which each position is revealed at a given step."""

    def reveal(_, hook):
        return (revealed_at == hook.step.index)[None]

    hooks = [("denoise.hook_reveal", reveal)]
    run = model.denoise(prompt, length=prompt.shape[1], steps=n_steps, predictions=2, fwd_hooks=hooks)
    assert torch.equal(run.tokens[0], final)
    return run.recorded


def test_runs_are_read_one_after_the_other(model, run, tmp_path):
    """Runs of other lengths and numbers of steps: each row is what it is alone."""
    other = model.denoise("Plerrick Baupling is", max_new_tokens=9, steps=5, predictions=3)
    for i, each in enumerate((run, other)):
        each.predictions.save(tmp_path / f"{i}.safetensors")
    both = commitment(Predictions.stream(tmp_path))
    assert both.record["runs"] == 2
    for alone, rows in ((commitment(run), slice(0, 2)), (commitment(other.predictions), slice(2, 3))):
        n_pos, n_steps = alone.written.shape[1], len(alone.steps)
        for name in ("committed_at", "first_at", "flips", "revealed_at", "predicted", "written"):
            assert torch.equal(getattr(both, name)[rows, :n_pos], getattr(alone, name))
        for name in ("settled", "gap", "remaining_entropy"):
            torch.testing.assert_close(getattr(both, name)[:n_steps, rows], getattr(alone, name), equal_nan=True)
        for a, b in zip(both.early_commit((1, 1, 1)), alone.early_commit((1, 1, 1)), strict=True):
            assert torch.equal(a[rows], b)
    assert (both.written[0:2, run.tokens.shape[1] :] == -1).all()
    assert both.settled[5:, 2].all()
    assert (both.remaining_entropy[5:, 2] == 0).all()


def test_the_answer_of_a_row(run):
    pos = run.tokens.shape[1] - 3
    mask = torch.zeros_like(run.given)
    mask[:, pos] = True
    found, masked = commitment(run, answer=[pos]), commitment(run, answer=mask)
    assert torch.equal(found.answer_settled, masked.answer_settled)
    assert torch.equal(found.answer_committed_at, found.committed_at[:, pos])
    assert torch.equal(found.answer_first_at, found.first_at[:, pos])
    assert bool((found.answer_committed_at <= found.revealed_at[:, pos]).all())


def test_a_token_that_is_masked_again_is_not_settled(model):
    run = model.denoise(
        "Plerrick Baupling is the", max_new_tokens=6, steps=8, sampler=ReMDM(eta=1.0), seed=1, predictions=2
    )
    masked = run.predictions.masked[:, 0]
    assert (masked[1:] & ~masked[:-1]).any()
    found = commitment(run)
    for step in range(7):
        if (~masked[step] & masked[step + 1 :].any(dim=0)).any():
            assert not found.settled[step, 0]


def test_what_cannot_be_asked_is_said(model, run):
    with pytest.raises(ValueError, match="run 0 recorded no predictions"):
        commitment(model.denoise("Plerrick", max_new_tokens=2))
    with pytest.raises(ValueError, match="there is no run"):
        commitment([])
    with pytest.raises(
        ValueError, match="answer contains position 1 of row 0, where nothing was predicted: it was given"
    ):
        commitment(run, answer=[1])
    with pytest.raises(ValueError, match=r"answer=\[99\]"):
        commitment(run, answer=[99])
    with pytest.raises(ValueError, match=r"answer is of shape \[1, 2\]"):
        commitment(run, answer=torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="row 1 has no position of the answer"):
        commitment(run, answer=~run.given & torch.tensor([[True], [False]]))
    other = replace(run.recorded, record={**run.record, "weights_sha256": "0"})
    with pytest.raises(ValueError, match="run 1 was written by another network than run 0: weights_sha256 differ"):
        commitment([run, other])
    with pytest.raises(ValueError, match="give three, of the first, second and last third"):
        commitment(run).early_commit((1.0,))
    with pytest.raises(ValueError, match="the gap needs the probabilities of two tokens"):
        commitment(run.predictions(model, 1)).early_commit()
    with pytest.raises(TypeError, match="run 1 is an int"):
        commitment(iter([run, 3]))


def test_the_table_and_the_pictures(run):
    found = commitment(run)
    frame = found.to_dataframe()
    assert len(frame) == 12
    assert (frame.lead == frame.revealed_at - frame.committed_at).all()
    written, committed = (found.plot().get_lines()[i].get_ydata() for i in (1, 0))
    assert all(a <= b for a, b in zip(written, committed, strict=True))
    assert written[-1] == 1
    assert found.plot("entropy").get_lines()[0].get_ydata()[0] == pytest.approx(
        float(found.remaining_entropy[0].mean())
    )
