"""Predictions that other programs recorded: a plain format, Prophet's files and sglang's step maps."""

import json
from pathlib import Path

import pytest
import torch

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import commitment, reveal_order
from diffusion_lens.denoising.predictions import Predictions

PROPHET = Path(__file__).parents[1] / "golden" / "prophet" / "question_0000_steps_016.pt"
RUN = {"written": [7, 2, 9], "steps": [{"pos": [2, 1], "tokens": [[9, 4], [5, 2]]}, {"pos": [1], "tokens": [[2, 5]]}]}


@pytest.fixture(scope="module")
def model():
    return HookedDiffusionTransformer.from_pretrained("site-mdm")


def test_what_is_written_is_read(model, tmp_path):
    """Also of a part of a run, and of rows in which nothing is left to predict at some steps."""
    prompts = ["Plerrick Baupling is the", "Plerrick Baupling is"]
    run = model.denoise(prompts, max_new_tokens=6, steps=9, predictions=3)
    for predictions in (run.recorded, run.from_step(3).recorded, run.recorded.half()):
        read = Predictions.read(predictions.to_jsonl(tmp_path / "runs.jsonl"), model=model)
        assert read.steps == predictions.steps
        assert read.words.items() >= {id: predictions.words[id] for id in predictions.ids.tolist()}.items()
        for name in ("tokens", "probabilities", "entropy", "masked", "written", "revealed_at"):
            wanted, got = getattr(predictions, name), getattr(read, name)
            torch.testing.assert_close(got, wanted.to(got.dtype), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(commitment(read).committed_at, commitment(predictions).committed_at)


def test_the_smallest_run_of_the_format(tmp_path):
    file = tmp_path / "runs.jsonl"
    file.write_text("\n".join([json.dumps(RUN), "", json.dumps({**RUN, "written": [7, 5, 9, 3]})]))
    read = Predictions.read(file)
    assert read.masked.nonzero().tolist() == [[0, 0, 1], [0, 0, 2], [0, 1, 1], [0, 1, 2], [1, 0, 1], [1, 1, 1]]
    assert read.tokens[0, 0, 1:3].tolist() == [[5, 2], [9, 4]]
    assert read.revealed_at.tolist() == [[-1, 1, 0, -1], [-1, 1, 0, -1]]
    assert read.written.tolist() == [[7, 2, 9, -1], [7, 5, 9, 3]]
    assert read.entropy.isnan().all()
    assert read.words[9] == "9"
    assert Predictions.read(RUN).to_dataframe().likeliest.tolist() == ["5", "9", "2"]


def test_rows_of_a_file_keep_their_numbers_of_steps(tmp_path):
    """Prophet's thresholds fall with the progress of a run: a gap of 2.9 nats is clear after two thirds of its own."""
    step = {"pos": [0], "tokens": [[1, 2]], "probabilities": [[0.9, 0.05]], "entropy": [0.3]}
    short, long = ({"written": [1], "steps": [step] * n} for n in (4, 12))
    read = Predictions.read([short, long])
    read.save(tmp_path / "runs.safetensors")
    for both in (
        read,
        Predictions.read(read.to_jsonl(tmp_path / "runs.jsonl")),
        Predictions.load(tmp_path / "runs.safetensors"),
        read.part([1, 0]).half().part([1, 0]),
        read.part([0, 1], first=1),
    ):
        assert commitment(both).n_steps.tolist() == [4, 12]
        assert commitment(both).early_commit().step.tolist() == [2, 8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"written": None}, "line 2: written must be a list of whole numbers"),
        ({"written": [[1, 2]]}, "line 2: written must be a list of whole numbers"),
        ({"steps": []}, "line 2: steps must be a list with an entry for each step"),
        ({"steps": [{"pos": [1]}]}, r"line 2: steps\[0\]\.tokens is missing"),
        (
            {"steps": [{"pos": [1, 1], "tokens": [[2], [3]]}]},
            r"steps\[0\]\.pos must be different positions from 0 to 2",
        ),
        ({"steps": [{"pos": [3], "tokens": [[2]]}]}, r"steps\[0\]\.pos must be different positions from 0 to 2"),
        ({"steps": [{"pos": [1], "tokens": [2]}]}, r"steps\[0\]\.tokens must be 1 lists of whole numbers"),
        ({"steps": [{"pos": [1], "tokens": [[2.5]]}]}, r"steps\[0\]\.tokens must be 1 lists of whole numbers"),
        (
            {"steps": [{"pos": [1, 2], "tokens": [[2], [2, 3]]}]},
            r"tokens must be 2 lists of whole numbers, as many in each",
        ),
        ({"steps": [{"pos": [1], "tokens": []}]}, r"steps\[0\]\.tokens must be 1 lists of whole"),
        ({"steps": [{"pos": [1], "tokens": [[2]], "probabilities": [[2.0]]}]}, "probabilities must be from 0 to 1"),
        (
            {"steps": [{"pos": [1], "tokens": [[2, 3]], "probabilities": [[0.2, 0.4]]}]},
            "probabilities must be from 0 to 1, also their sum, the likeliest token first",
        ),
        ({"steps": [{"pos": [1], "tokens": [[2]], "probs": [[1]]}]}, r"steps\[0\]\.probs is no field of the format"),
        ({"reveal": [1]}, "line 2: reveal is no field of the format"),
        ({"revealed_at": [1]}, "line 2: revealed_at must be a list of 3 whole numbers"),
        ({"words": {"the": 1}}, "line 2: words must map ids to texts"),
        ({"words": {"--1": "the"}}, "line 2: words must map ids to texts"),
        ({"words": {"²": "the"}}, "line 2: words must map ids to texts"),
        ({"words": {"1": ["the"]}}, "line 2: words must map ids to texts"),
        ({"revealed_at": [-1, 2, 0]}, "line 2: revealed_at must be steps up to 1, or -1"),
        ({"revealed_at": [-7, 1, 0]}, "line 2: revealed_at must be steps up to 1, or -1"),
        ({"first_step": -4}, "line 2: first_step is -4, and steps count from 0"),
        ({"model": 3}, "line 2: model must be a name"),
        (
            {"steps": [{"pos": [1], "tokens": [[2, 3]], "probabilities": [[0.9, 0.8]]}]},
            r"steps\[0\]\.probabilities must be from 0 to 1, also their sum, the likeliest token first",
        ),
        ({"steps": [{"pos": [1], "tokens": [[2, 2]]}]}, r"steps\[0\]\.tokens must be different at each position"),
        (
            {"steps": [{"pos": [1], "tokens": [[2, 3]], "entropy": [-3.0]}]},
            r"steps\[0\]\.entropy must be 0 or more",
        ),
        ({"steps": [{"pos": [1], "tokens": [[2]]}]}, "tokens: the number of tokens at a position differs"),
    ],
)
def test_a_bad_line_is_named(change, message, tmp_path):
    file = tmp_path / "runs.jsonl"
    file.write_text(f"{json.dumps(RUN)}\n{json.dumps({**RUN, **change})}\n")
    with pytest.raises(ValueError, match=message):
        Predictions.read(file)


def test_other_bad_files(model, tmp_path):
    file = tmp_path / "runs.jsonl"
    file.write_text('{"written": [1,')
    with pytest.raises(ValueError, match="line 1: this is no JSON"):
        Predictions.read(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match="contains no run"):
        Predictions.read(file)
    file.write_text("3\n")
    with pytest.raises(ValueError, match="line 1: a run is a mapping of its fields, and this is an int"):
        Predictions.read(file)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        Predictions.read(tmp_path / "missing.jsonl")
    with pytest.raises(ValueError, match="the runs contain the id 100000000, and 'site-mdm' has ids below"):
        Predictions.read({**RUN, "written": [7, 2, 10**8]}, model=model)
    with pytest.raises(ValueError, match="the runs are of different models"):
        Predictions.read([{**RUN, "model": "a"}, {**RUN, "model": "b"}])
    with pytest.raises(ValueError, match="block_length= belongs to step maps"):
        Predictions.read(RUN, block_length=4)


def test_a_file_of_prophet():
    data = torch.load(PROPHET, weights_only=True)
    read, x0, n_given = Predictions.read(PROPHET), torch.cat(data["x0_history"]), data["prompt_token_len"]
    assert read.written[0, n_given:].tolist() == data["gen_ids"]
    assert (read.written[0, :n_given] == -1).all()
    constrained = n_given + 10
    written: set[int] = set()
    for step, indices in enumerate(step for block in data["true_indices_history"] for step in block):
        left = [pos for pos in range(n_given, x0.shape[1]) if pos not in written and pos != constrained]
        assert read.masked[step, 0].nonzero()[:, 0].tolist() == left
        assert torch.equal(read.likeliest[step, 0, left], x0[step, left])
        written |= set(indices[:, 1].tolist())
        for pos in indices[:, 1].tolist():
            assert read.revealed_at[0, pos] == step
    assert read.revealed_at[0, constrained] == -1
    assert read.probabilities[read.masked].isnan().all()
    # From which step on is each position of the answer the predicted one, until it is written?
    answer = range(data["ans_posidx"], data["ans_posidx"] + len(data["pred_token_id"]))
    wrong = [
        step
        for step in range(len(x0))
        for pos, token in zip(answer, data["pred_token_id"], strict=True)
        if read.masked[step, 0, pos] and x0[step, pos] != token
    ]
    assert commitment(read, answer=answer).answer_committed_at.tolist() == [max(wrong) + 1]
    with pytest.raises(ValueError, match="x0_history must have a tensor"):
        Predictions.read({**data, "x0_history": [3]})
    with pytest.raises(ValueError, match=r"true_indices_history must have a tensor \[index, 2\] for each of the 16"):
        Predictions.read({**data, "true_indices_history": data["true_indices_history"][:1]})
    with pytest.raises(ValueError, match="prompt_token_len is missing"):
        Predictions.read({key: value for key, value in data.items() if key != "prompt_token_len"})


def test_step_maps_of_sglang():
    """A prompt of 6 tokens and blocks of 4: two tokens end the block in which the prompt ends."""
    response = {
        "text": "...",
        "output_ids": [11, 12, 13, 14, 15, 16, 17],
        "meta_info": {"prompt_tokens": 6, "step_maps": [2, 1, 1, 1, 3, 2, 1]},
    }
    read = Predictions.read([response], block_length=4)
    assert read.revealed_at.tolist() == [[1, 0, 2, 2, 4, 3, 5]]
    assert read.masked[:, 0].int().tolist() == [
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]
    whole = {**response, "meta_info": {"prompt_tokens": 0, "step_maps": [2, 1, 1, 1, 3, 2, 1]}}
    assert Predictions.read(whole, block_length=7).revealed_at.tolist() == [[1, 0, 0, 0, 2, 1, 0]]
    assert reveal_order(read).left_to_right.shape == (1,)
    assert len(read.to_dataframe()) == int(read.masked.sum())
    with pytest.raises(ValueError, match="only which step wrote each token, as step maps"):
        commitment(read)
    with pytest.raises(ValueError, match="pass block_length="):
        Predictions.read(response)
    for change, message in [
        ({"step_maps": [1]}, "meta_info: step_maps must be a list of 7 whole numbers"),
        ({"step_maps": [0] * 7}, "step_maps must have a step, from 1"),
        ({"prompt_tokens": None}, "prompt_tokens must be a whole number"),
    ]:
        with pytest.raises(ValueError, match=message):
            Predictions.read({**response, "meta_info": {**response["meta_info"], **change}}, block_length=4)
