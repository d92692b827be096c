"""What a page shows of the predictions of a run: the tables of `Predictions`, of whatever they were made."""

import numpy as np
import pytest
import torch
from page_reader import PageFile, as_selected, ran, unpack

from diffusion_lens.denoising.samplers import ReMDM
from diffusion_lens.explorer import Session
from diffusion_lens.interventions import zero_ablate
from diffusion_lens.pages import write_page

PROMPT = "Gustav Geisser is the"
SETTINGS = dict(length=14, steps=6, seed=4, temperature=0.5)
TOP = 3


@pytest.fixture(scope="module")
def run(tiny):
    return tiny.denoise([PROMPT, "Gustav Geisser the is"], **SETTINGS, predictions=TOP)


def read(page, tmp_path):
    return PageFile(write_page(page, tmp_path / "page.html").read_text(encoding="utf-8"))


def same_tables(predictions, row, entry, arrays, words):
    """The entries of a chunk are those of one row, in the order of steps and positions."""
    places = predictions.masked[:, row].nonzero()
    assert [predictions.steps[i] for i in places[:, 0].tolist()] == arrays["step"].tolist()
    assert places[:, 1].tolist() == arrays["position"].tolist()
    i, pos = places.T
    np.testing.assert_array_equal(arrays["entropy"].astype(np.float32), predictions.entropy[i, row, pos].numpy())
    np.testing.assert_allclose(
        arrays["top_probabilities"], predictions.probabilities[i, row, pos].numpy(), atol=0.51 / 65534
    )
    tokens = predictions.tokens[i, row, pos].tolist()
    assert [[words[x] for x in top] for top in arrays["top_tokens"].tolist()] == [
        [predictions.words[token] for token in top] for top in tokens
    ]
    assert (entry["k"], entry["steps"]) == (predictions.top_k, predictions.steps)
    assert entry["committed"] == [committed(predictions, row, pos) for pos in range(predictions.written.shape[1])]


def committed(predictions, row, pos):
    """From the last step backwards, one by one."""
    since = -1
    for place in reversed(range(len(predictions.steps))):
        if predictions.masked[place, row, pos]:
            if predictions.tokens[place, row, pos, 0] != predictions.written[row, pos]:
                break
            since = predictions.steps[place]
    return since


@pytest.mark.parametrize("row", [0, 1])
def test_recorded_predictions_are_on_the_page(run, row, tmp_path):
    page = read(run.explore(row=row), tmp_path)
    shown = page.run()
    same_tables(run.predictions, row, shown["predictions"], page.read("predictions")[1], shown["words"])
    assert {name for _, name in page.chunks} == {"predictions"}
    assert "predictions" not in shown["missing"]


def test_the_code_gives_the_recorded_numbers(tiny, run, tmp_path):
    code = read(run.explore(row=1), tmp_path).run()["python"]["predictions"]
    step, _, position = run.predictions.masked[:, 1:].nonzero()[-1].tolist()
    again, printed = ran(as_selected(code, step=step, position=position), tiny)
    torch.testing.assert_close(
        again["predictions"].probabilities[:, 0], run.predictions.probabilities[:, 1], equal_nan=True
    )
    assert repr(run.predictions.words[int(run.predictions.likeliest[step, 1, position])]) in printed


def test_those_that_are_given_take_the_place_of_recorded_ones(tiny, run, tmp_path):
    one = run.predictions(tiny, top_k=1)
    page = read(run.explore(predictions=one), tmp_path)
    same_tables(one, 0, page.run()["predictions"], page.read("predictions")[1], page.run()["words"])
    later = run.from_step(2)
    page = read(later.explore(predictions=later.predictions), tmp_path)
    same_tables(later.predictions, 0, page.run()["predictions"], page.read("predictions")[1], page.run()["words"])


def test_predictions_of_another_run_are_refused(tiny, run):
    plain = tiny.denoise(PROMPT, **SETTINGS)
    with pytest.raises(TypeError, match=r"predictions= is no such result. Record them with the run"):
        plain.explore(predictions=plain.predictions)
    with pytest.raises(ValueError, match=r"predictions= has 2 rows .*denoise\(\.\.\., predictions=5\)"):
        plain.explore(predictions=run.predictions)
    other = tiny.denoise("Gustav Geisser the is", **SETTINGS, predictions=TOP)
    with pytest.raises(ValueError, match="predictions= are of another run than row 0"):
        plain.explore(predictions=other.predictions)
    with pytest.raises(ValueError, match=r"have the steps \[0, 1\]"):
        plain.from_step(2).explore(predictions=plain.predictions(tiny))
    changed = plain.predictions(tiny, fwd_hooks=[("blocks.1.hook_attn_out", zero_ablate())])
    with pytest.raises(ValueError, match=r"of another network .*hooks: blocks\.1\.hook_attn_out"):
        plain.explore(predictions=changed)


def test_a_page_that_is_too_large_says_how_predictions_take_less(run, tmp_path):
    with pytest.raises(ValueError, match=r"predictions takes .*trajectory\.predictions\(model, top_k=1\)"):
        run.explore(tmp_path / "page.html", max_bytes=1000)


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_a_position_that_is_masked_again_commits_for_good(tiny):
    run = tiny.denoise(PROMPT, length=14, steps=8, sampler=ReMDM(eta=1.0), seed=1, predictions=2)
    steps = run.explore().runs[0].entry["predictions"]["committed"]
    assert steps == [committed(run.predictions, 0, pos) for pos in range(14)]
    rewritten = (run.predictions.masked[1:] & ~run.predictions.masked[:-1]).any(dim=0)[0]
    assert rewritten.any()


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_steps_that_are_not_all_known_give_no_commitment(tiny):
    from diffusion_lens.analysis import logit_lens

    run = tiny.denoise(PROMPT, **SETTINGS)
    page = run.explore(lens=logit_lens(tiny, run, steps=[1, 3], positions=[9, 6], layers=[-1]))
    entry = page.runs[0].entry["predictions"]
    assert (entry["steps"], entry["committed"]) == ([1, 3], None)
    _, arrays = unpack(page.runs[0].chunks["predictions"])
    whole = run.predictions(tiny, top_k=5)
    for step, position, entropy in zip(arrays["step"], arrays["position"], arrays["entropy"], strict=True):
        assert position in (6, 9)
        assert entropy == pytest.approx(float(whole.entropy[step, 0, position]), rel=1e-4)


def test_a_lens_gives_what_the_run_predicted(several):
    from diffusion_lens.analysis import logit_lens

    run = several.model.denoise(several.tokens[:, :5] % 500, length=11, steps=11)
    page = run.explore(lens=logit_lens(several.model, run, top_k=TOP), row=1)
    expected, (_, arrays) = run.predictions(several.model, top_k=TOP), unpack(page.runs[0].chunks["predictions"])
    steps, positions = expected.masked[:, 1].nonzero().T
    assert (arrays["step"].tolist(), arrays["position"].tolist()) == (steps.tolist(), positions.tolist())
    for name, table in (("top_probabilities", expected.probabilities), ("entropy", expected.entropy)):
        np.testing.assert_allclose(arrays[name], table[steps, 1, positions].numpy(), atol=2e-5)
    assert page.runs[0].entry["predictions"]["committed"] == [committed(expected, 1, pos) for pos in range(11)]


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_a_lens_gives_no_predictions_that_the_run_did_not_make(tiny):
    """Of the prompt alone, of a part of the positions, and of a run whose passes read old keys and values."""
    from diffusion_lens.analysis import logit_lens
    from diffusion_lens.denoising.samplers import threshold

    run = tiny.denoise(PROMPT, **SETTINGS)
    shown = [
        run.explore(lens=logit_lens(tiny, run, positions=where)).runs[0].entry["predictions"]
        for where in ([0, 1], [12, 13], range(3, 14))
    ]
    assert shown[0] is None
    assert shown[1]["committed"] is None
    assert shown[2]["committed"] is not None
    cached = tiny.denoise(PROMPT, length=14, sampler=threshold(0.9, block_length=4, approximate_cache="dual"))
    with pytest.warns(UserWarning, match="approximate cache 'dual'"):
        lens = logit_lens(tiny, cached)
    assert cached.explore(lens=lens).runs[0].entry["predictions"] is None


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_a_row_that_predicts_nothing_commits_to_nothing(tiny):
    rows = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, *[tiny.cfg.blank] * 3]])
    run = tiny.denoise(rows, steps=3, predictions=2)
    assert [run.explore(row=row).runs[0].entry["predictions"]["committed"] is None for row in (0, 1)] == [True, False]


def test_the_explorer_records_them_under_its_interventions(tiny):
    session = Session([tiny])
    spec = dict(prompt=PROMPT, **SETTINGS)
    plain = session.run(spec)
    zero = [dict(what="zero", site="mlp", layer=1)]
    for changes, hooks in (({}, []), ({"interventions": zero}, [("blocks.1.hook_mlp_out", zero_ablate())])):
        shown = session.run({**spec, **changes})
        expected = tiny.denoise(PROMPT, **SETTINGS, fwd_hooks=hooks, predictions=5).predictions
        _, arrays = unpack(session.chunk(shown["id"], "predictions"))
        same_tables(expected, 0, shown["predictions"], arrays, shown["words"])
        again = ran(as_selected(shown["python"]["predictions"], step=1, position=6), tiny)[0]
        torch.testing.assert_close(again["predictions"].entropy, expected.entropy, equal_nan=True)
    assert shown["predictions"] != plain["predictions"] or shown["text"] == plain["text"]
