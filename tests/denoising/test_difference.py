"""The difference of two runs, against loops over their canvases as texts."""

from dataclasses import replace

import pytest
import torch
from recorded_runs import PROMPT, RESID, record

from diffusion_lens import load, plots
from diffusion_lens.denoising.difference import RunDifference


def moved(activation, hook):
    return activation.flip(-1) if hook.step.index > 1 else None


def canvases_of(run, row):
    """The texts of each canvas, with `None` where nothing is written."""
    masked = run.is_masked(run.canvases[:, row]).tolist()
    return [
        [None if blank else word for word, blank in zip(*each, strict=True)]
        for each in zip(run.str_canvases(row), masked, strict=True)
    ]


@pytest.fixture(scope="module")
def pair(every):
    """A run, and its free replay under a hook from step 2 on."""
    run = every.model.denoise(PROMPT, length=10, steps=12, seed=3)
    return run, run.replay(every.model, canvas="free", fwd_hooks=[(RESID, moved)])


def test_the_table_has_the_cells_of_a_loop(pair):
    run, other = pair
    cells = {}
    for row in range(len(run)):
        for step, (was, now) in enumerate(zip(canvases_of(run, row), canvases_of(other, row), strict=True), -1):
            for pos, texts in enumerate(zip(was, now, strict=True)):
                if texts[0] != texts[1]:
                    cells[row, pos, step] = tuple("" if text is None else text for text in texts)
    assert cells or run.uniform_noise  # of which one network is too small to hear the hook
    difference = run.diff(other)
    frame = difference.to_dataframe()
    told = {
        (each.batch, each.pos, step): (each.was, each.now)
        for each in frame.itertuples()
        for step in range(each.step, each.until + 1)
    }
    assert told == cells
    assert difference.first_step == min((step for _, _, step in cells), default=None)
    for each in frame.itertuples():
        assert each.first_step == min(step for row, pos, step in cells if (row, pos) == (each.batch, each.pos))
        assert each.final_differs == ((each.batch, each.pos, run.n_steps - 1) in cells)
        assert each.confidence_was == run.confidence[each.batch, each.pos]
        assert each.confidence_now == other.confidence[each.batch, each.pos]


def test_sentences_name_the_tokens_that_differ_in_the_end_and_since_when(pair):
    run, other = pair
    difference = run.diff(other)
    assert bool(difference.tokens.any()) == any(difference.sentences(row) for row in range(len(run)))
    for row in range(len(run)):
        was, now = canvases_of(run, row), canvases_of(other, row)
        expected, before = [], False
        for pos, texts in enumerate(zip(was[-1], now[-1], strict=True)):
            differs = texts[0] != texts[1]
            if differs:
                since = run.n_steps
                while since > 0 and was[since - 1][pos] != now[since - 1][pos]:
                    since -= 1
                if not before:
                    expected.append([[], [], since])
                expected[-1][0].append(texts[0])
                expected[-1][1].append(texts[1])
                expected[-1][2] = min(expected[-1][2], since)
            before = differs
        sentences = difference.sentences(row)
        assert len(sentences) == len(expected)
        for sentence, (old, new, since) in zip(sentences, expected, strict=True):
            said, when = sentence.rsplit(", from ", 1)
            assert when == (f"step {since - 1}" if since else "the start")
            for side, words in zip(said.split(" → "), (old, new), strict=True):
                assert all(word is None or plots.readable(word) in side for word in words)


def test_a_run_does_not_differ_from_itself(pair):
    run, _ = pair
    none = run.diff(run)
    assert none.first_step is None
    assert not none.differs.any()
    assert len(none.to_dataframe()) == 0
    assert none.sentences() == []
    assert repr(none).endswith("no difference; 0 of 2 rows differ)")


def test_the_other_way_round_was_and_now_are_swapped(pair, tmp_path):
    run, other = pair
    there, back = run.diff(other), load(other.diff(run).save(tmp_path / "back.safetensors"))
    assert isinstance(back, RunDifference)
    names = {"was": "now", "now": "was", "confidence_was": "confidence_now", "confidence_now": "confidence_was"}
    frame = there.to_dataframe()
    assert back.to_dataframe().rename(columns=names)[frame.columns].equals(frame)
    assert torch.equal(back.confidence, -there.confidence)
    for row in range(len(run)):
        swapped = [" → ".join(each.split(", from ")[0].split(" → ")[::-1]) for each in back.sentences(row)]
        assert [each.split(", from ")[0] for each in there.sentences(row)] == swapped


@pytest.mark.parametrize("several", ["dream"], indirect=True)
def test_runs_of_other_lengths_in_steps_keep_their_final_canvas(several):
    short, long = record(several), record(several, steps=9)
    assert long.n_steps > short.n_steps
    for was, now in ((short, long), (long, short), (short, long.from_step(4))):
        difference = was.diff(now)
        start = max(was.first_step, now.first_step)
        for place, step in enumerate(range(start, 10)):
            expected = [
                run.canvases[min(step - run.first_step, run.n_steps)].masked_fill(
                    run.is_masked(run.canvases[min(step - run.first_step, run.n_steps)]), -1
                )
                for run in (was, now)
            ]
            assert torch.equal(difference.canvases[:, place], torch.stack(expected))
        assert torch.equal(difference.tokens, was.tokens != now.tokens)


def test_two_models_of_a_vocabulary_are_compared(site_pair_runs):
    mdm, ar = site_pair_runs
    difference = mdm.diff(ar)
    written = ~(mdm.is_masked(mdm.tokens) | ar.is_masked(ar.tokens))
    assert torch.equal(difference.tokens[written], (mdm.tokens != ar.tokens)[written])
    assert difference.differs[0].sum() == 0
    assert repr(difference).startswith("RunDifference(tiny-mdm and tiny-ar, ")


@pytest.fixture(scope="module")
def site_pair_runs():
    from diffusion_lens import load_pair

    return [model.denoise("Gustav Geisser is the", length=14) for model in load_pair("tiny-mdm", device="cpu")]


def test_runs_that_cannot_be_compared_are_refused(several):
    run = record(several)
    with pytest.raises(
        ValueError, match=r"different shape .* \[2, 10\] and \[2, 12\] \[batch pos\]\. Denoise the same"
    ):
        run.diff(record(several, length=12))
    with pytest.raises(ValueError, match=r"different shape .*run.row\(index\) is one row"):
        run.diff(run.row(0))
    with pytest.raises(ValueError, match=r"different prompts: .* in row 0"):
        run.diff(several.model.denoise(PROMPT.flip(0), length=10, steps=6))
    words = {**run.words, int(run.tokens[0, 0]): "another"}
    with pytest.raises(ValueError, match=r": the id 5 is .* and 'another' in the second\. Compare"):
        run.diff(replace(run, words=words))
    shifted = replace(
        run,
        tokens=run.tokens + 1000,
        canvases=(run.canvases + 1000).where(run.canvases != run.blank, run.blank),
        prompt=(run.prompt + 1000).where(run.given, run.blank),
        words={run.blank: "", **{token + 1000: word for token, word in run.words.items()}},
    )
    with pytest.raises(ValueError, match="different vocabularies: other ids for"):
        run.diff(shifted)


def test_the_picture_marks_what_differs(pair):
    run, other = pair
    difference = run.diff(other)
    for row in range(len(run)):
        was, now = canvases_of(run, row), canvases_of(other, row)
        ax = difference.plot(row)
        n_rows = sum(i == 0 or (was[i], now[i]) != (was[i - 1], now[i - 1]) for i in range(len(was)))
        labels = [label.get_text() for label in ax.get_yticklabels()]
        assert sum(not label.endswith("…") for label in labels) == n_rows
        everything = [label.get_text() for label in difference.plot(row, folded=False).get_yticklabels()]
        assert everything == ["start", *(f"step {step}" for step in range(run.n_steps))]
        # The last row has both texts where they differ, and one where they do not.
        row_of = {i: text.get_position()[1] for i, text in enumerate(ax.texts)}
        final = [text for i, text in enumerate(ax.texts) if row_of[i] > max(row_of.values()) - 0.8]
        for pos, (old, new) in enumerate(zip(was[-1], now[-1], strict=True)):
            told = [text.get_text() for text in final if text.get_position()[0] == pos]
            assert len(told) == 1 + (old != new)
            assert told[-1] == plots.readable(new) if new is not None else told[-1] in ("not yet", "·")
