"""The difference of two runs, against loops over their canvases as texts."""

from dataclasses import replace

import pytest
import torch
from recorded_runs import PROMPT, RESID, record

from diffusion_lens import load, plots
from diffusion_lens.denoising.difference import RunDifference
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.model.text import END_TEXTS


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
    for row in range(len(run)):
        canvases = [canvases_of(each, row) for each in (run, other)]
        ends = [
            min(
                (pos for pos, at in enumerate(each.revealed_at[row].tolist()) if at >= 0 and is_end(texts[-1][pos])),
                default=99,
            )
            for each, texts in zip((run, other), canvases, strict=True)
        ]
        expected, before = [], None
        for pos, (old, new) in enumerate(zip(*(texts[-1] for texts in canvases), strict=True)):
            key = None
            if old != new and pos <= max(ends):
                steps = range(run.n_steps + 1)
                seen = [tuple(texts[step][pos] for texts in canvases) for step in steps]
                both = None not in (old, new)
                apart = [was != now and (not both or None not in (was, now)) for was, now in seen]
                key = next(step for step in steps if all(apart[step:]))
                if key != before:
                    expected.append(([], [], key))
                for texts, word, end in zip(expected[-1], (old, new), ends, strict=False):
                    texts.extend([word] if pos <= end and word is not None else [])
            before = key
        sentences = difference.sentences(row)
        assert len(sentences) == len(expected)
        for sentence, (old, new, since) in zip(sentences, expected, strict=True):
            said, when = sentence.rsplit(", from ", 1)
            assert when == (f"step {since - 1}" if since else "the start")
            for side, words in zip(said.split(" → "), (old, new), strict=True):
                assert all(plots.readable(word) in side for word in words)
                assert words or side in ("(ended)", "(unwritten)")


def is_end(text):
    return text is not None and text.strip() in END_TEXTS


@pytest.fixture
def run_of():
    """A run with these canvases: letters, "_" for [MASK] and "." for the end token."""
    words = {**dict(enumerate("abcdef")), 6: "_", 7: "<eos>", -1: ""}
    ids = {**{text: token for token, text in words.items()}, ".": 7}

    def made(*canvases, first_step=0, confidence=0.5):
        tokens = torch.tensor([[ids[char] for char in canvas] for canvas in canvases])[:, None]
        given = tokens[0] != 6
        steps = torch.arange(len(tokens) - 1)[:, None]
        last = steps.where(tokens[1:, 0] != tokens[:-1, 0], -1).amax(dim=0)
        record = {"model": "toy", "blank": 6, "first_step": first_step, "forward_passes": 1, "seeds": [1]}
        return Trajectory(
            tokens=tokens[-1],
            canvases=tokens,
            prompt=tokens[0],
            revealed_at=(last + first_step * (last >= 0))[None],
            revealed_before=torch.full_like(given, -1, dtype=torch.long),
            confidence=torch.full(given.shape, confidence),
            given=given,
            real=torch.ones_like(given),
            text=[""],
            completion=[""],
            words=words,
            record=record,
        )

    return made


def test_every_sentence_holds_for_all_its_positions(run_of):
    one = run_of("a____", "ab___", "abc__", "abcd_", "abcde")
    # Position 1 differs since step 1 at last, after it was the same; 2 since step 2; 3 is the same; 4 is written later.
    other = run_of("a____", "ac___", "ab__e", "acd_f", "acddf")
    assert one.diff(other).sentences() == ["b c → c d, from step 2", "e → f, from step 3"]
    assert one.diff(run_of("a____", "ac___", "ac___", "acdd_", "acddf")).sentences() == [
        "b → c, from step 0",
        "c → d, from step 2",
        "e → f, from step 3",
    ]


def test_text_after_the_end_token_is_not_compared(run_of):
    one, other = run_of("a____", "ab.__", "ab.cd"), run_of("a____", "ab.__", "ab.de")
    assert one.diff(other).sentences() == []
    longer = run_of("a____", "abc__", "abc.f")
    assert one.diff(longer).sentences() == ["<eos> → c, from step 0", "(ended) → <eos>, from step 1"]


def test_a_comparison_that_begins_later_does_not_say_from_the_start(run_of):
    whole = run_of("a__", "ab_", "abc")
    rest = replace(whole.from_step(1), canvases=run_of("ac_", "acc").canvases, tokens=run_of("ac_", "acc").tokens)
    assert whole.diff(rest).sentences() == ["b → c, from before step 1"]


def test_the_same_text_with_other_confidences_is_said(run_of):
    one, other = run_of("a_", "ab"), run_of("a_", "ab", confidence=0.03)
    assert repr(one.diff(other)) == "RunDifference(toy, the same text; confidences differ by up to 0.47)"
    assert one.diff(other).plot().get_title().replace("\n", " ") == "the same text; confidences differ by up to 0.47"
    assert repr(one.diff(one)) == "RunDifference(toy, no difference)"


def test_runs_of_two_devices_are_compared_on_the_cpu(run_of):
    """On "meta" no number can be read, so that nothing but the move is left to fail."""
    one = run_of("a_", "ab")
    with pytest.raises((NotImplementedError, RuntimeError), match="meta tensor"):
        one.diff(replace(one, real=one.real.to("meta")))


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


@pytest.mark.parametrize("every", ["dream", "bd3lm", "uniform"], indirect=True)
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
