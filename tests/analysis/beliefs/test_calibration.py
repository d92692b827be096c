"""Does a run know when it is right: against scikit-learn and NumPy, and laws of the AUROC."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from oracles.memory import peak_of_tensors
from scipy.stats import rankdata
from sklearn.calibration import calibration_curve
from sklearn.metrics import roc_auc_score

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import calibration
from diffusion_lens.analysis.beliefs.calibration import COURSES, MEASURES, auroc
from diffusion_lens.denoising.predictions import Predictions

N_ROWS, N_POS, N_STEPS = 40, 6, 5


@pytest.fixture(scope="module")
def predictions():
    """Random numbers, in which confidence says something about what is right."""
    generator = torch.Generator().manual_seed(0)
    revealed_at = torch.randint(N_STEPS, (N_ROWS, N_POS), generator=generator)
    masked = torch.stack([revealed_at >= step for step in range(N_STEPS)])
    n = int(masked.sum())
    p = torch.rand(n, 2, generator=generator).sort(dim=1, descending=True).values * 0.5
    tokens = torch.randint(4, (n, 2), generator=generator)
    return Predictions.of(
        tokens,
        p,
        torch.rand(n, generator=generator).mul(5).round(),  # with ties
        masked,
        steps=list(range(N_STEPS)),
        written=torch.randint(4, (N_ROWS, N_POS), generator=generator),
        revealed_at=revealed_at,
        words=dict.fromkeys(range(4), "word"),
        record={"model": "toy"},
    )


@pytest.fixture(scope="module")
def right(predictions):
    noise = torch.rand(N_ROWS, N_POS, generator=torch.Generator().manual_seed(1))
    return predictions.probabilities[0, ..., 0].nan_to_num(0.3) + 0.3 * noise > 0.45


def measured(predictions):
    return [predictions.probabilities[..., 0], predictions.entropy, predictions.margin]


def test_every_step_is_as_in_scikit_learn(predictions, right):
    found = calibration(predictions, right, bins=7)
    for step in range(N_STEPS):
        where = predictions.masked[step]
        truth = right[where].numpy()
        assert int(found.n[step]) == len(truth)
        assert int(found.n_right[step]) == truth.sum()
        for i, table in enumerate(measured(predictions)):
            assert float(found.auroc[i, step]) == pytest.approx(
                roc_auc_score(truth, table[step][where].numpy()), abs=1e-6
            )
        confidence = predictions.probabilities[step, ..., 0][where].numpy()
        share, mean = calibration_curve(truth, confidence, n_bins=7)
        filled = found.bin_counts[step] > 0
        np.testing.assert_allclose(found.bin_right[step, filled].numpy(), share, atol=1e-6)
        np.testing.assert_allclose(found.bin_confidence[step, filled].numpy(), mean, atol=1e-6)
        weights = found.bin_counts[step, filled].numpy() / len(truth)
        assert float(found.ece[step]) == pytest.approx((weights * abs(share - mean)).sum(), abs=1e-6)


def test_the_course_is_that_of_each_position(predictions, right):
    found = calibration(predictions, right)
    for i, table in enumerate(measured(predictions)):
        courses = {name: [] for name in COURSES}
        for row in range(N_ROWS):
            for pos in range(N_POS):
                steps = predictions.masked[:, row, pos].nonzero()[:, 0].numpy()
                values = table[steps, row, pos].double().numpy()
                slope = np.polyfit(steps, values, 1)[0] if len(steps) > 1 else np.nan
                for name, value in zip(
                    COURSES, (values[0], values[-1], values.mean(), slope, values.var()), strict=True
                ):
                    courses[name].append(round(value, 5))
        for name, values in courses.items():
            known = ~np.isnan(values)
            wanted = roc_auc_score(right.reshape(-1).numpy()[known], np.array(values)[known])
            assert float(found.auroc[i, found.readings.index(name)]) == pytest.approx(wanted, abs=2e-3)
    assert found.ece[found.readings.index("slope")].isnan()


def test_a_constant_measure_has_no_course():
    """Its slope and variance are 0 in all examples, whatever rounding leaves of them."""
    generator = torch.Generator().manual_seed(0)
    n, n_steps = 400, 7
    p = torch.rand(n, generator=generator) * 0.5 + 0.5
    entries = torch.stack([p, 1 - p], dim=1).repeat(n_steps, 1)
    constant = Predictions.of(
        torch.tensor([[0, 1]]).repeat(n_steps * n, 1),
        entries,
        entries[:, 1].clone(),
        torch.ones(n_steps, n, 1, dtype=torch.bool),
        steps=list(range(n_steps)),
        written=torch.zeros(n, 1, dtype=torch.long),
        revealed_at=torch.full((n, 1), n_steps - 1),
        words={0: "a", 1: "b"},
        record={"model": "toy"},
    )
    found = calibration(constant, torch.rand(n, generator=generator) < p)
    assert (found.auroc[:, -2:] == 0.5).all()
    assert found.auroc[0, -3] > 0.6


@pytest.mark.parametrize("of_rows", [False, True])
def test_the_peak_is_within_the_budget(predictions, right, of_rows):
    many = predictions.part(list(range(N_ROWS)) * 50)
    many.masked, many.probabilities, many.entropy  # noqa: B018  the tables of the run itself
    labels = (right.sum(dim=1) > 2 if of_rows else right).repeat(50, *[1] * (not of_rows))
    with pytest.raises(ValueError, match="bytes") as error:
        calibration(many, labels, max_bytes=1)
    least = int(re.search(r"take up to ([\d,]+) bytes", str(error.value))[1].replace(",", ""))
    assert peak_of_tensors(partial(calibration, many, labels, max_bytes=least)) <= least


def test_rows_are_means_over_their_positions(predictions, right):
    of_rows = right.sum(dim=1) > 2
    found = calibration(predictions, of_rows)
    for i, table in enumerate(measured(predictions)):
        mean = table[1].nanmean(dim=1)
        known = ~mean.isnan()
        assert float(found.auroc[i, 1]) == pytest.approx(roc_auc_score(of_rows[known], mean[known]), abs=1e-6)
    assert found.record["examples"] == "rows"
    assert int(found.n[0]) == N_ROWS


def test_laws_of_the_auroc():
    generator = torch.Generator().manual_seed(2)
    scores, right = torch.rand(50, generator=generator), torch.rand(50, generator=generator) > 0.4
    assert auroc(right.float(), right) == 1
    assert auroc(torch.ones(50), right) == 0.5
    torch.testing.assert_close(auroc(-scores, right), 1 - auroc(scores, right))
    torch.testing.assert_close(auroc(scores.exp(), right), auroc(scores, right))
    assert auroc(scores, torch.ones(50, dtype=torch.bool)).isnan()


def test_labels_in_every_form_are_the_same(predictions, right):
    """A tensor over all rows, a function of each run, and canvases that are right at the same positions."""
    halves = [predictions.part(range(25)), predictions.part(range(25, N_ROWS))]
    reference = torch.where(right, predictions.written, 9)
    labels = {id(half): part for half, part in zip(halves, right.split([25, 15]), strict=True)}
    whole = calibration(predictions, right)
    for found in (
        calibration(halves, right),
        calibration(iter(halves), lambda half: labels[id(half)]),
        calibration(halves, reference=reference),
    ):
        torch.testing.assert_close(found.auroc, whole.auroc)
        assert torch.equal(found.bin_counts, whole.bin_counts)


def test_rows_are_the_units_of_intervals(predictions, right):
    """Against resamples by hand; positions that say the same twice do not make an interval shorter, but rows do."""
    found, generator = calibration(predictions, right, bins=4), np.random.default_rng(3)
    auroc_of, ece_of = [], []
    for _ in range(1500):
        rows = generator.integers(N_ROWS, size=N_ROWS)
        p, truth = predictions.probabilities[0, rows, :, 0].reshape(-1).numpy(), right[rows].reshape(-1).numpy()
        known = ~np.isnan(p)
        p, truth = p[known], truth[known]
        of_right = rankdata(p)[truth].sum() - truth.sum() * (truth.sum() + 1) / 2
        auroc_of.append(of_right / (truth.sum() * (~truth).sum()))
        bins = np.digitize(p, [0.25, 0.5, 0.75])
        ece_of.append(sum(abs((truth[bins == b] - p[bins == b]).sum()) for b in range(4)) / len(p))
    tails = [0.0203, 1 - 0.0203]  # of Student's law with 39 degrees of freedom, times the root of 40 / 39
    assert found.interval(reading=0) == pytest.approx(np.quantile(auroc_of, tails), abs=0.01)
    assert found.interval("ece", reading=0) == pytest.approx(
        2 * float(found.ece[0]) - np.quantile(ece_of, tails[::-1]), abs=0.01
    )
    assert found.interval(seed=1) != found.interval() == found.interval()
    # Each position twice in its row, and each row twice
    wide, entries = predictions.masked.repeat(1, 1, 2), (predictions.tokens, predictions.probabilities)
    twice = Predictions.of(
        *(each.repeat(1, 1, 2, 1)[wide] for each in entries),
        predictions.entropy.repeat(1, 1, 2)[wide],
        wide,
        steps=predictions.steps,
        written=predictions.written.repeat(1, 2),
        revealed_at=predictions.revealed_at.repeat(1, 2),
        words=predictions.words,
        record=predictions.record,
    )
    for of in ("auroc", "ece"):
        low, high = found.interval(of)
        assert calibration(twice, right.repeat(1, 2), bins=4).interval(of) == pytest.approx((low, high), abs=1e-6)
        shorter = calibration([predictions, predictions], right.repeat(2, 1), bins=4).interval(of)
        assert shorter[1] - shorter[0] == pytest.approx((high - low) / 2**0.5, rel=0.1)
    few = calibration(predictions.part(range(9)), right[:9])
    assert all(np.isnan(few.interval()))
    assert all(np.isnan(calibration(predictions.part(range(12)), right[:12]).interval("ece")))


def test_some_positions_are_the_run_with_only_these(predictions, right):
    found = calibration(predictions, right, answer=[0, 3])
    assert int(found.n[-1]) == 2 * N_ROWS
    truth, where = right[:, [0, 3]], predictions.masked[2][:, [0, 3]]
    confidence = predictions.probabilities[2, :, [0, 3], 0]
    assert float(found.auroc[0, 2]) == pytest.approx(roc_auc_score(truth[where], confidence[where]), abs=1e-6)


def test_a_run_knows_when_it_is_right():
    model = HookedDiffusionTransformer.from_pretrained("site-mdm")
    run = model.denoise(["Plerrick Baupling is the", "Plerrick Baupling is"], max_new_tokens=6, steps=6, predictions=2)
    labels = run.given.clone()
    labels[0, -2:] = True
    found = calibration(run, labels)
    assert found.readings == [*map(str, range(6)), *COURSES]
    frame = found.to_dataframe()
    assert len(frame) == len(MEASURES) * len(found.readings)
    assert frame[frame.measure == "entropy"].ece.isna().all()
    assert len(found.plot().get_lines()) == 3
    assert len(found.plot("reliability", reading="2").collections) == 1
    one = calibration(run.predictions(model, 1), labels)
    assert one.auroc[2].isnan().all()
    torch.testing.assert_close(one.auroc[:2], found.auroc[:2], equal_nan=True)


def test_what_cannot_be_asked_is_said(predictions, right):
    for options, message in [
        ({}, "say what is right, once"),
        ({"right": right, "reference": predictions.written}, "say what is right, once"),
        ({"right": torch.ones(N_ROWS, dtype=torch.bool)}, "all 40 examples are right, and the AUROC compares"),
        ({"right": torch.zeros(N_ROWS, N_POS, dtype=torch.bool)}, "all 240 examples are wrong"),
        ({"right": right[:3]}, r"right is of shape \[3, 6\], but the runs have 40 rows or more"),
        ({"reference": predictions.written[:, :2]}, r"reference is of shape \[40, 2\]"),
        ({"right": right.repeat(2, 1)}, r"right is of shape \[80, 6\], but the runs need \[40, 6\]"),
        (
            {"right": right, "answer": torch.ones(40, 7, dtype=torch.bool)},
            r"answer is of shape \[40, 7\], but the runs",
        ),
        ({"right": lambda run: run.written}, "right is of torch.int64; it must be true or false"),
        ({"right": lambda run: 3}, "right is an int; it must be a tensor"),
        ({"right": right, "bins": 0}, "bins=0"),
        ({"right": right, "max_bytes": 100}, "bytes, and 100 are allowed"),
        ({"right": right, "answer": [77]}, r"answer=\[77\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            calibration(predictions, **options)
    found = calibration(predictions, right)
    for options, message in [
        ({"of": "mean"}, "of='mean'"),
        ({"of": "ece", "measure": "entropy"}, "measure='entropy'"),
        ({"of": "ece", "reading": "slope"}, "reading='slope'"),
        ({"reading": 77}, "reading='77'"),
        ({"level": 1.0}, "level=1.0; it must be between 0 and 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            found.interval(**options)
    unknown = Predictions.read({"written": [1, 2], "steps": [{"pos": [0, 1], "tokens": [[1], [2]]}]})
    with pytest.raises(ValueError, match="the runs have no probabilities"):
        calibration(unknown, torch.tensor([[True, False]]))
