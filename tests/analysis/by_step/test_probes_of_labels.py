"""Probes of labels of texts, runs and positions: scikit-learn on cached states, planted labels, control tasks."""

import re
import sys
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from oracles.memory import peak_of_tensors
from sklearn.linear_model import LogisticRegression, Ridge
from torch.testing import assert_close

import diffusion_lens
from diffusion_lens.analysis import LinearProbe, RidgeSettings, probe, probe_time
from diffusion_lens.analysis.over_facts.intervals import mean_interval, share_interval
from diffusion_lens.data import toy_facts
from diffusion_lens.interventions import named
from diffusion_lens.records.results import load_result, save_result

NAME, EARLY = "blocks.1.hook_resid_post", "blocks.0.hook_resid_post"
FACTS = toy_facts.load().facts(trained="both", asked="p2d")[::7]
PENALTY = 1e-2
ONE = RidgeSettings(penalties=(PENALTY,), seed=3)
EXACT = dict(rtol=1e-4, atol=1e-5)
on_mdm = pytest.mark.parametrize("small", ["mdm"], indirect=True)


def denoise(model, n=20):
    settings = {} if model.cfg.is_autoregressive else {"steps": 4}
    prompts = [fact.prompt for fact in FACTS[:n]]
    return model.denoise_with_cache(prompts, names_filter=NAME, max_new_tokens=4, **settings)


def stacked(run, cache, where, labels, ridge=ONE):
    """States, labels and units of the rows of each part, from a cache by step; `where` [step batch pos]."""
    parts, rows = ridge.split(len(run)), {"train": [], "validation": [], "held_out": []}
    states = cache.stack(NAME).double()
    for step, row, pos in where.nonzero().tolist():
        rows[parts[row]].append((states[step, row, pos], labels[row][pos], row))
    return {part: (torch.stack([x for x, *_ in own]), *zip(*((y, u) for _, y, u in own))) for part, own in rows.items()}  # noqa: B905


def lengths(run):
    """A class of each token: whether its id is even."""
    return [["even" if token % 2 == 0 else "odd" for token in row] for row in run.tokens.tolist()]


def without(labels, kept):
    return [
        [own if keep else None for own, keep in zip(*pair, strict=True)]
        for pair in zip(labels, kept.tolist(), strict=True)
    ]


@on_mdm
def test_a_probe_of_classes_is_a_logistic_regression_on_cached_states(small):
    run, cache = denoise(small)
    where = run.is_masked(run.canvases[:-1]) & run.real
    labels = lengths(run)
    found = probe(small, run, without(labels, run.real & ~run.given), NAME, ridge=ONE)
    rows = stacked(run, cache, where, labels)
    x, y = torch.cat([rows["train"][0], rows["validation"][0]]), [*rows["train"][1], *rows["validation"][1]]
    # The relative penalty: that of the mean variance of a feature, times the number of rows.
    sklearn = LogisticRegression(
        C=1 / (PENALTY * x.var(dim=0, correction=0).mean().item() * len(x)), max_iter=5000, tol=1e-6
    )
    sklearn.fit(x.numpy(), np.array(y))
    x_test, y_test, units = rows["held_out"]
    right = sklearn.predict(x_test.numpy()) == np.array(y_test)
    assert found.classes == ["even", "odd"]
    assert found.record["n_rows"] == {part: len(own[1]) for part, own in rows.items()}
    assert found.score.item() == pytest.approx(right.mean(), abs=0.02)
    assert found.score_fitted.item() == pytest.approx(sklearn.score(x.numpy(), y), abs=0.02)
    weights = found.weights[NAME][1] - found.weights[NAME][0]
    assert torch.cosine_similarity(weights.double(), torch.from_numpy(sklearn.coef_[0]), dim=0) > 0.999
    # The predictions are those that were counted.
    guesses = torch.tensor([found.classes.index(own) for own in y_test]) == found.predict(NAME, x_test)
    assert_close(found.score, guesses.float().mean()[None])
    assert found.n_tested.tolist() == [units.count(unit) for unit in sorted(set(units))]
    assert found.right[0].tolist() == [
        sum(ok for ok, own in zip(guesses.tolist(), units, strict=True) if own == unit) for unit in sorted(set(units))
    ]
    low, high = found.interval()
    expected = share_interval(guesses[:, None].double(), list(map(str, units)), 0.95)
    assert_close(torch.cat([low, high]).double(), torch.cat(expected), rtol=1e-5, atol=1e-6)
    frame = found.to_dataframe()
    assert frame.low[0] <= frame.score[0] <= frame.high[0]


@on_mdm
def test_a_probe_of_numbers_at_positions_is_sklearns_ridge(small):
    run, cache = denoise(small)
    where = (run.real & ~run.given).expand_as(run.canvases[:-1])[:2]
    numbers = torch.randn(run.tokens.shape, generator=torch.Generator().manual_seed(0)).masked_fill(
        ~run.real, torch.nan
    )
    found = probe(small, run, numbers, NAME, positions="all", steps=[0, 1], ridge=ONE)
    where = run.real.expand_as(run.canvases[:2])
    rows = stacked(run, cache, where, numbers.tolist())
    x, y = torch.cat([rows["train"][0], rows["validation"][0]]), [*rows["train"][1], *rows["validation"][1]]
    ridge = Ridge(alpha=PENALTY * x.var(dim=0, correction=0).mean().item() * len(x)).fit(x.numpy(), np.array(y))
    assert found.score.item() == pytest.approx(
        ridge.score(rows["held_out"][0].numpy(), np.array(rows["held_out"][1])), abs=1e-4
    )
    assert_close(found.weights[NAME].double(), torch.from_numpy(ridge.coef_), rtol=1e-3, atol=1e-4)
    assert found.record["steps"] == [0, 1]
    assert found.classes is None


def r2(rows):
    """R² of pairs (labels, predictions), each of one unit."""
    y, guesses = (np.concatenate(each) for each in zip(*rows, strict=True))
    return 1 - ((y - guesses) ** 2).sum() / ((y - y.mean()) ** 2).sum()


def jackknife(rows):
    """The standard error of R² without each unit in turn."""
    without = np.array([r2(rows[:i] + rows[i + 1 :]) for i in range(len(rows))])
    return np.sqrt((len(rows) - 1) / len(rows) * ((r2(rows) - without) ** 2).sum())


@on_mdm
def test_the_interval_of_r2_is_a_bootstrap_of_held_out_runs(small):
    """Percentile-t, with R² computed anew from the rows of each resample."""
    ridge = RidgeSettings(penalties=(PENALTY,), seed=3, held_out=0.4)
    run, cache = denoise(small, 60)
    lengths_of_words = torch.tensor([[float(len(small.words(row[None])[0])) for row in own] for own in run.tokens])
    found = probe(small, run, lengths_of_words.masked_fill(~run.real, torch.nan), NAME, positions="all", ridge=ridge)
    rows = stacked(run, cache, run.real.expand_as(run.canvases[:-1]), lengths_of_words.tolist(), ridge)
    x_test, y_test, units = rows["held_out"]
    guesses = (x_test @ found.weights[NAME].double() + found.bias[0]).numpy()
    y, units = np.array(y_test), np.array(units)
    of_units = [(y[units == unit], guesses[units == unit]) for unit in sorted(set(units))]
    assert found.n_tested.tolist() == [len(own) for own, _ in of_units]
    assert_close(found.residual[0].numpy(), np.array([((own - guess) ** 2).sum() for own, guess in of_units]), **EXACT)
    assert_close(found.squares.numpy(), np.array([((own - y.mean()) ** 2).sum() for own, _ in of_units]), **EXACT)
    centre, error, random = r2(of_units), jackknife(of_units), np.random.default_rng(0)
    ratios = []
    for _ in range(400):
        drawn = [of_units[i] for i in random.integers(len(of_units), size=len(of_units))]
        ratios.append((r2(drawn) - centre) / jackknife(drawn))
    expected = centre - np.quantile(ratios, [0.975, 0.025]) * error
    low, high = (end.item() for end in found.interval())
    assert low < centre < high
    assert [low, high] == pytest.approx(expected, abs=0.15 * (expected[1] - expected[0]))


@pytest.mark.parametrize("rows", ["position", "canvas"])
def test_sums_of_squares_of_units_are_those_of_the_score(small, rows, tmp_path):
    run, _ = denoise(small, 25)
    found = probe_time(small, run, [EARLY, NAME], rows=rows, positions="predicting")
    for score, residual, squares in (
        (found.score, found.residual, found.squares),
        (found.score_control, found.residual_control, found.squares_control),
    ):
        assert_close(1 - residual.sum(dim=1) / squares.sum(), score.double(), rtol=1e-5, atol=1e-6)
    assert int(found.n_tested.sum()) == found.record["n_rows"]["held_out"]
    loaded = diffusion_lens.load(found.save(tmp_path / "numbers.safetensors"))
    for name in ("score", "selectivity"):
        low, high = found.interval(name)
        assert (low < getattr(found, name)).all()
        assert (getattr(found, name) < high).all()
        assert torch.equal(torch.stack(loaded.interval(name)), torch.stack((low, high)))
    assert {"low", "high", "selectivity_low", "selectivity_high"} < set(found.to_dataframe())


def test_the_interval_of_selectivity_has_both_errors():
    """To first order, its error is that of the difference of two ratios: the jackknife without each unit in turn."""
    noise = np.random.default_rng(0)
    squares, control = (torch.from_numpy(noise.uniform(5, 6, 60)) for _ in range(2))
    residual, of_control = (torch.from_numpy(noise.uniform(0, 5, (1, 60))) for _ in range(2))
    result = LinearProbe(
        {NAME: torch.zeros(3)}, bias=torch.zeros(1), score=1 - residual.sum(1).float() / squares.sum().float(),
        score_fitted=torch.ones(1), score_control=1 - of_control.sum(1).float() / control.sum().float(),
        penalty=torch.ones(1), score_position=0.5, record={"names": [NAME], "rows": "position"},
        n_tested=torch.full((60,), 5), residual=residual, residual_control=of_control, squares=squares,
        squares_control=control,
    )  # fmt: skip

    def selectivity(kept):
        return float(of_control[0, kept].sum() / control[kept].sum() - residual[0, kept].sum() / squares[kept].sum())

    whole = torch.ones(60, dtype=torch.bool)
    without = [selectivity(whole & (torch.arange(60) != unit)) for unit in range(60)]
    error = np.sqrt(59 / 60 * ((selectivity(whole) - np.array(without)) ** 2).sum())
    low, high = (end.item() for end in result.interval("selectivity"))
    assert selectivity(whole) == pytest.approx(result.selectivity.item(), abs=1e-5)
    assert [low, high] == pytest.approx(selectivity(whole) + 1.98 * error * np.array([-1, 1]), abs=0.3 * error)


@on_mdm
def test_without_memory_for_held_out_rows_there_is_no_interval(small):
    texts = [fact.prompt + fact.answer for fact in FACTS[:20]]
    one = partial(probe_time, small, texts, NAME, samples=8, ridge=ONE)
    with pytest.raises(ValueError, match="the sums of 1 hook points take") as refused:
        one(max_bytes=1)
    least = int(re.findall(r"take ([\d,]+)", str(refused.value))[0].replace(",", ""))
    found = one(max_bytes=least)
    assert "low" not in found.to_dataframe()
    with pytest.raises(
        ValueError, match=r"the held-out rows did not fit in max_bytes .* at least [0-9,]+, or"
    ) as error:
        found.interval()
    budget = int(re.findall(r"at least ([\d,]+),", str(error.value))[0].replace(",", ""))
    assert one(max_bytes=budget - 1).n_tested is None
    results = []
    assert peak_of_tensors(lambda: results.append(one(max_bytes=budget))) <= budget
    assert_close(results[0].score, found.score)
    assert results[0].interval()[0] < found.score < results[0].interval()[1]


@on_mdm
def test_a_control_task_of_one_label_says_nothing(small):
    """All labels are those of one token, which has one random label in the control task."""
    tokens = torch.randint(3, 200, (20, 6), generator=torch.Generator().manual_seed(0))
    tokens[:, 2] = 7
    for labels in (torch.arange(20) % 2, torch.randn(20, generator=torch.Generator().manual_seed(0))):
        of_token = labels.new_full((20, 6), -1 if labels.dtype == torch.long else torch.nan)
        of_token[:, 2] = labels
        found = probe(small, tokens, of_token, NAME, positions="all", ridge=ONE)
        assert found.score.isfinite().all()
        assert found.score_control.isnan().all()
        assert torch.stack(found.interval("selectivity")).isnan().all()
        assert torch.stack(found.interval()).isfinite().all()


@on_mdm
def test_labels_of_padded_tokens_stand_in_their_columns(small):
    """Padding on the left moves the labels with the tokens, and does not change what is read."""
    noise = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(3, 200, (20, 6), generator=noise), torch.randn(20, 6, generator=noise)
    labels[:, 3] = torch.nan
    plain = probe(small, tokens, labels, NAME, positions="all", ridge=ONE)
    pad, none = torch.full((20, 2), small.padding.id), torch.full((20, 2), torch.nan)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]]).expand(20, -1)
    padded = probe(
        small, torch.cat([pad, tokens], 1), torch.cat([none, labels], 1), NAME, positions="all", ridge=ONE,
        attention_mask=mask,
    )  # fmt: skip
    assert torch.equal(padded.score, plain.score)
    with pytest.raises(ValueError, match="text or row 0 has 8 labels and 6 positions"):
        probe(small, torch.cat([pad, tokens], 1), torch.ones(20, 8) * 0.5, NAME, attention_mask=mask)


@on_mdm
def test_facts_that_are_set_aside_take_their_labels_with_them(small):
    from diffusion_lens.facts.fact import Fact

    facts, labels = FACTS[:15], list(range(15))
    unusable = Fact("Ada is the " * 100, "Ada is the " * 100, " brave")
    own = [float(label) for label in labels]
    plain, found = (
        probe(small, each, of_each, NAME, ridge=ONE)
        for each, of_each in ((facts, own), ([*facts[:5], unusable, *facts[5:]], [*own[:5], 99.0, *own[5:]]))
    )
    assert torch.equal(found.score, plain.score)


@on_mdm
def test_whole_numbers_are_classes_and_real_numbers_are_not(small):
    tokens = torch.randint(3, 200, (20, 6), generator=torch.Generator().manual_seed(0))
    one = partial(probe, small, tokens, names_filter=NAME, positions="all", ridge=ONE)
    assert one([0, 1] * 10).classes == [0, 1]
    assert one([0.0, 1.0] * 10).classes is None
    assert one(np.array([0, 1] * 10)).classes == [0, 1]
    assert one([[np.bool_(True), np.bool_(False)] * 3] * 20).classes == [False, True]
    with pytest.raises(ValueError, match="some labels are real numbers, and some the whole number -1, which means"):
        one([-1, 0.5] * 10)


def test_a_row_of_two_positions_has_the_label_of_the_second(specimen, configs):
    """A shifted model reads the first token in its own row, which also predicts the next."""
    from diffusion_lens.analysis.engine.inputs import ForwardPass
    from diffusion_lens.analysis.probes.linear import _of_predicted

    model = specimen(configs["dream"]).model
    tokens = torch.full((2, 4), model.cfg.blank)
    tokens[1, 1] = 5
    canvas = ForwardPass(model, tokens, torch.ones_like(tokens, dtype=torch.bool))
    moved = _of_predicted(canvas, torch.arange(4.0).expand(2, 2, 4).mT)[..., 0]
    nan = torch.nan
    assert_close(moved, torch.tensor([[1, 2, 3, nan], [0, 2, 3, nan]]), equal_nan=True)


@on_mdm
def test_control_tasks_and_selectivity(small):
    """The embedding of a token tells it, so that a probe learns random labels of tokens there: nothing is selective.
    Random labels of positions are told nowhere, and those of the control task no worse."""
    texts = [fact.prompt + fact.answer for fact in FACTS[:30]]
    tokens = [small.to_tokens(text)[0].tolist() for text in texts]
    even = [[token % 2 == 0 for token in row] for row in tokens]
    found = probe(small, texts, even, ["hook_embed", NAME], positions="unmasked", samples=4)
    assert found.classes == [False, True]
    assert found.score[0] > 0.75
    assert found.score_control[0] > 0.75
    assert_close(found.selectivity, found.score - found.score_control)
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randint(2, (len(row),), generator=generator).tolist() for row in tokens]
    random = probe(small, texts, noise, ["hook_embed", NAME], positions="unmasked", samples=4)
    assert (random.score < 0.7).all()
    assert random.score_control[0] > 0.75
    low, high = random.interval("selectivity")
    assert (low <= random.selectivity).all()
    assert (random.selectivity <= high).all()
    assert high[0] < 0


@on_mdm
def test_each_token_has_one_label_of_the_control_task(small):
    from diffusion_lens.analysis.engine.inputs import CleanTexts
    from diffusion_lens.analysis.probes.rows import Labels

    texts = [fact.prompt + fact.answer for fact in FACTS[:30]]
    given = CleanTexts.of(small, texts)
    words = [["a" if i % 3 else None for i in range(len(row))] for row in given.tokens]
    words[0][1:3] = ["b", "c"]
    labels = Labels.of(words, given, "masked")
    of_token = {}
    for row, own, control in zip(given.tokens, labels.of_units, labels.control([], 0), strict=True):
        assert torch.equal(own.isnan(), control.isnan())
        for token, value in zip(row.tolist(), control.tolist(), strict=True):
            if value == value:
                assert of_token.setdefault(token, value) == value
    assert set(of_token.values()) <= {0.0, 1.0, 2.0}
    assert labels.control([], 0)[0].nan_to_num().tolist() == labels.control([], 0)[0].nan_to_num().tolist()


@on_mdm
def test_classes_of_runs_are_found_where_they_were_planted(small):
    directions = torch.randn(3, small.cfg.d_model, generator=torch.Generator().manual_seed(0))
    classes = torch.arange(30) % 3
    plant = named("plants the class", lambda x, hook: x + 8 * directions[classes][:, None])
    with small.hooks(fwd_hooks=[(EARLY, plant)]):
        run = denoise(small, 30)[0]
        names = ["ABC"[i] for i in classes.tolist()]
        found = probe(small, run, names, ["hook_embed", EARLY], positions="predicting")
        of_canvas = probe(small, run, names, EARLY, positions="all", rows="canvas")
        assert of_canvas.score.item() > 0.95
        assert sum(of_canvas.record["n_rows"].values()) == 30 * run.n_steps
        assert np.isnan(of_canvas.score_position)
    before, after = found.score.tolist()
    assert after > 0.95
    assert before < 0.7
    assert (found.score_control < 0.7).all()
    assert found.plot().get_title() == "Linear probe of the label"
    assert "accuracy of 3 classes" in repr(found)


# Both readouts, and blocks: with a first position read one earlier, with times, and of a network with an encoder.
@pytest.mark.parametrize(
    "every", ["llada_moe-options", "dream", "fast_dllm", "nemotron-block", "bd3lm", "diffusion_gemma"], indirect=True
)
def test_a_row_has_the_label_of_the_position_that_it_predicts(every):
    """Numbers of positions, planted in the rows that predict these: one before them with the shifted readout."""
    model = every.model
    tokens = torch.randint(3, 500, (12, 4), generator=torch.Generator().manual_seed(0))
    length = dict(max_new_tokens=6 if model.cfg.self_conditioning else 8)
    run = model.denoise(tokens, seed=0, **length)
    numbers = torch.randn(run.tokens.shape, generator=torch.Generator().manual_seed(1))
    direction = torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(2))

    def plant(x, hook):
        planted, block = x.clone(), hook.step.block
        for row, position in hook.step.masked.nonzero().tolist():
            first = block is not None and block.first_shifted and position == int(block.start[row])
            at = position - 1 if model.cfg.readout == "shifted" or first else position
            planted[row, at] = 100 * numbers[row, position] * direction + x[row, at]
        return planted

    name = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    labels = numbers.masked_fill(run.given | ~run.real, torch.nan)
    with warnings.catch_warnings(), model.hooks(fwd_hooks=[(name, named("plants", plant))]):
        warnings.filterwarnings("ignore", "the trajectory was written by another network")
        found = probe(model, run, labels, name, positions="predicting")
    assert found.score.item() > 0.95
    assert found.score_control.item() < 0.6


@on_mdm
def test_correctness_is_probed_step_by_step(small):
    """Whether tokens will be right is planted from step 2 on, and read there only: one call for each step."""
    run, truth = denoise(small, 60)[0], denoise(small, 60)[0].tokens.clone()
    wrong = torch.rand(truth.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    truth[wrong] = truth[wrong] + 1
    direction = torch.randn(small.cfg.d_model, generator=torch.Generator().manual_seed(1))
    right = (run.tokens == truth).int().masked_fill(run.given | ~run.real, -1)

    def plant(x, hook):
        return x + 10 * (hook.step.index > 1) * ~wrong[..., None] * direction

    with small.hooks(fwd_hooks=[(NAME, named("plants what is right", plant))]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the trajectory was written by another network")
        course = [probe(small, run, right, NAME, steps=step) for step in range(run.n_steps)]
    assert all(found.classes == [0, 1] for found in course)
    assert torch.cat([found.score for found in course[:2]]).max() < 0.7
    assert torch.cat([found.score for found in course[2:]]).min() > 0.95
    for found in course[2:]:
        assert found.interval("selectivity")[0].item() > 0.1
    with pytest.raises(ValueError, match=r"the label .* is of position 0 of row 0, which the prompt gives"):
        probe(small, run, run.tokens == truth, NAME)


@on_mdm
def test_tokens_of_some_part_only_are_left_out(small):
    run, _ = denoise(small, 40)
    found = probe(small, run, "token", NAME)
    masked = run.is_masked(run.canvases[:-1]) & run.real
    parts = RidgeSettings().split(len(run))
    in_part = [
        {
            token
            for step, row, pos in masked.nonzero().tolist()
            if parts[row] == part
            for token in [int(run.tokens[row, pos])]
        }
        for part in ("train", "validation", "held_out")
    ]
    assert found.classes == sorted(set.intersection(*in_part))
    assert 1 < len(found.classes) < len(set.union(*in_part))
    assert found.record["label"] == "token"


@on_mdm
def test_probes_of_classes_are_read_back_and_so_are_those_of_earlier_versions(small, tmp_path):
    run, _ = denoise(small)
    found = probe(small, run, ["x", "y"] * 10, [NAME, "blocks.0.attn.hook_z"], positions="all")
    loaded = diffusion_lens.load(found.save(tmp_path / "classes.safetensors"))
    assert repr(loaded) == repr(found)
    assert torch.equal(loaded.right_control, found.right_control)
    assert loaded.predict("blocks.0.attn.hook_z", torch.randn(2, 5, 4, 8)).shape == (2, 5)
    now = probe_time(small, run, NAME)
    tensors, record = load_result(now.save(tmp_path / "new.safetensors"), "linear probe")
    sums = ("n_tested", "residual", "residual_control", "squares", "squares_control")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in sums}
    del record["record"]["interval_bytes"]
    record = {name: value for name, value in record.items() if name not in sums} | {"n_tested": None}
    without = save_result(tmp_path / "without.safetensors", "linear probe", tensors, record)
    old = dict(score="r2", score_fitted="r2_fitted", score_control="r2_shuffled")
    tensors = {old.get(name, name): tensor for name, tensor in tensors.items()}
    record = {name: value for name, value in record.items() if name not in ("n_tested", "right", "right_control")}
    record["r2_position"] = record.pop("score_position")
    for name in ("classes", "by_position", "steps"):
        del record["record"][name]
    path = save_result(tmp_path / "old.safetensors", "time probe", tensors, record)
    for again in (diffusion_lens.load(path), LinearProbe.load(path), LinearProbe.load(without)):
        assert torch.equal(again.score, now.score)
        with pytest.raises(ValueError, match="written by an earlier version, without an interval: probe again"):
            again.interval()
        assert again.score_position == now.score_position
        assert again.plot().get_title() == "Linear probe of the denoising time"
    with pytest.warns(DeprecationWarning, match="r2_shuffled of a probe will be removed; use score_control"):
        assert torch.equal(now.r2_shuffled, now.score_control)
    with pytest.warns(DeprecationWarning, match="TimeProbe will be removed; use LinearProbe"):
        assert diffusion_lens.analysis.TimeProbe is LinearProbe


@on_mdm
def test_labels_that_do_not_fit_are_refused(small):
    run, _ = denoise(small, 6)
    n_pos = run.tokens.shape[1]
    texts = ["Gustav is the", "Tilda was the", "Ada is the", "Ada was the"]
    for inputs, labels, settings, message in (
        (run, ["a", "b"], {}, "2 labels for 6 texts or rows of trajectories; give each its own"),
        (run, "tokens", {}, "labels='tokens'.* time, token"),
        (run, ["a"] * 6, {}, "all labels are 'a': a probe of classes needs at least two"),
        (run, [None] * 6, {}, "no text, row or position has a label"),
        (run, ["a", 1] * 3, {}, "the labels are int and str; give all as strings"),
        (run, [0.5, torch.inf] * 3, {}, "a label is infinite"),
        (run, [["a"] * n_pos] * 5 + ["b"], {}, "some labels are lists"),
        (run, [["a", "b"] * n_pos] * 6, {"positions": "all"}, rf"text or row 0 has {2 * n_pos} labels and {n_pos} pos"),
        (run, [["a"]] * 6, {}, f"text or row 0 has 1 labels and {n_pos} positions"),
        (
            run,
            [["a"] * n_pos] * 6,
            {},
            "the label 'a' is of position 0 of row 0, which the prompt gives.* give None there, or positions='all'",
        ),
        (
            run,
            run.tokens,
            {"positions": "predicting"},
            "of row 0, which the prompt gives.* positions='predicting' would never read it",
        ),
        (run, "token", {"rows": "canvas"}, "the labels are those of positions"),
        (
            texts,
            ["a", "a", "a", "b"],
            {"positions": "all"},
            "part of the split has no row of 1 of the 2 classes: '.'. Give",
        ),
        (texts, [1.0, 2.0, 3.0, 4.0], {"steps": 0}, "steps= requires trajectories"),
        (texts, [[0, 1, 2]] * 4, {"max_bytes": 1000}, r"the rows of 3 hook points take \d+,\d+ bytes"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            probe(small, inputs, labels, **settings)


@on_mdm
@pytest.mark.parametrize("labels", [[0.5, 1.5, 2.5, 0.5] * 5, [0, 1, 1, 0] * 5])
def test_states_that_are_not_finite_are_refused(small, labels):
    tokens = torch.randint(3, 200, (20, 6), generator=torch.Generator().manual_seed(0))
    spoil = named("spoils", lambda x, hook: x.masked_fill(torch.arange(x.shape[1])[:, None] == 2, torch.inf))
    with small.hooks(fwd_hooks=[(NAME, spoil)]), pytest.raises(ValueError, match="contain inf or NaN"):
        probe(small, tokens, labels, NAME, positions="all")


@on_mdm
def test_one_label_of_the_held_out_part_has_no_r2(small):
    parts, noise = ONE.split(20), np.random.default_rng(0)
    labels = [0.3 if part == "held_out" else noise.normal() for part in parts]
    tokens = torch.randint(3, 200, (20, 6), generator=torch.Generator().manual_seed(0))
    found = probe(small, tokens, labels, NAME, positions="all", ridge=ONE)
    assert found.score.isnan().all()
    assert torch.stack(found.interval()).isnan().all()
    assert np.isnan(found.score_position)
    assert found.score_fitted.isfinite().all()


@on_mdm
def test_without_sklearn_the_error_says_how_to_install_it(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(ImportError, match=r"pip install 'diffusion-lens\[probes\]'"):
        probe(small, ["Gustav is", "Tilda is", "Ada is"], ["a", "b", "a"], NAME)


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_rows_of_classes_take_at_most_the_budget(tiny):
    texts = [" ".join(["Gustav is the brave"] * 8), " ".join(["Tilda was the young"] * 8)] * 3
    labels = [[True, False] * 16] * 6
    one = partial(
        probe, tiny, texts, labels, "blocks.0.hook_resid_pre", positions="all", samples=12, ridge=RidgeSettings(seed=4)
    )
    with pytest.raises(ValueError, match="the rows of 1 hook points take") as refused:
        one(max_bytes=1)
    least, results = int(re.findall(r"take ([\d,]+)", str(refused.value))[0].replace(",", "")), []
    for budget in (least, 2 * least):
        assert 0.2 * budget < peak_of_tensors(lambda: results.append(one(max_bytes=budget))) <= budget  # noqa: B023
    assert_close(results[0].score, results[1].score)


def test_intervals_cluster_rows_by_their_unit():
    """40 rows of which units agree are as wide as 8 rows; both ends of selectivity come from the clusters."""
    counts, right = torch.full((8,), 5), torch.tensor([[5, 0, 5, 5, 0, 5, 5, 5]])
    record = {"names": [NAME], "rows": "position", "classes": ["a", "b"]}
    numbers = dict(bias=torch.zeros(1, 2), score=torch.ones(1), score_fitted=torch.ones(1), score_control=torch.ones(1))
    result = LinearProbe(
        {NAME: torch.zeros(2, 3)}, **numbers, penalty=torch.ones(1), score_position=0.5, record=record,
        n_tested=counts, right=right, right_control=torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]]),
    )  # fmt: skip
    rows = torch.cat([torch.tensor([1.0] * int(own) + [0.0] * (5 - int(own))) for own in right[0]])
    clusters = [str(unit) for unit in range(8) for _ in range(5)]
    assert_close(result.interval()[0].double(), share_interval(rows[:, None].double(), clusters, 0.95)[0])
    control = torch.cat([torch.tensor([1.0] * own + [0.0] * (5 - own)) for own in [1, 2, 3, 1, 2, 3, 1, 2]])
    expected = mean_interval((rows - control)[:, None].double(), clusters, 0.9, 2, (-1.0, 1.0))
    assert_close(
        torch.stack(result.interval("selectivity", 0.9, 2)).double(), torch.stack(expected), rtol=1e-5, atol=1e-6
    )
