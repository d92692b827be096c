"""What a run predicted at every step: recorded, replayed and worked out by hand, the same to the bit."""

import pytest
import torch
from recorded_runs import PROMPT, record, same

import diffusion_lens
from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import logit_lens
from diffusion_lens.denoising.predictions import PredictionRecorder, Predictions, likeliest_of
from diffusion_lens.denoising.samplers import ReMDM, threshold

TOP, LENGTH = 4, 11
TABLES = ("tokens", "probabilities", "entropy", "masked")


def equal(a, b):
    for name in TABLES:
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=0, equal_nan=True)


def run_of(every, **options):
    cfg = every.model.cfg
    blocks = {"steps": LENGTH} if cfg.opens_blocks else {"steps": 3}
    return every.model.denoise(every.tokens[:, :5] % 500, length=LENGTH, predictions=TOP, **{**blocks, **options})


@pytest.fixture(scope="module")
def trained():
    return HookedDiffusionTransformer.from_pretrained("site-mdm")


@pytest.fixture(scope="module")
def long_run(trained):
    return trained.denoise("Plerrick Baupling is the", max_new_tokens=6, steps=12, predictions=5)


def test_a_replay_predicts_what_the_run_predicted(several):
    run = run_of(several)
    equal(run.predictions(several.model, TOP), run.predictions)
    assert bool(run.predictions.masked.any())


def test_they_are_the_likeliest_of_all_logits(every):
    """Brute force: the logits of every step by a hook, and a sort of the whole vocabulary."""
    model, seen = every.model, {}
    run = run_of(every)

    def keep(logits, hook):
        step = hook.step
        sigma = step.sigma if isinstance(step.sigma, tuple) else [step.sigma] * len(logits)
        clean = []
        for row, tokens, noise in zip(logits, step.tokens, sigma, strict=True):
            amounts = None if noise is None else torch.full(tokens.shape, noise, dtype=torch.float64)
            clean.append(row if noise is None else model.head.clean_logits(row, tokens, amounts))
        seen[step.index] = torch.stack(clean)

    run.replay(model, fwd_hooks=[("denoise.hook_logits", keep)])
    for place, step in enumerate(run.predictions.steps):
        for row, pos in run.predictions.masked[place].nonzero().tolist():
            logits = seen[step][row, pos]
            order = [i for i in logits.argsort(descending=True).tolist() if i != model.cfg.mask_token_id][:TOP]
            p = logits.softmax(dim=0).float()
            assert run.predictions.tokens[place, row, pos].tolist() == order
            assert torch.equal(run.predictions.probabilities[place, row, pos], p[order])
            torch.testing.assert_close(
                run.predictions.entropy[place, row, pos], torch.distributions.Categorical(probs=p).entropy()
            )


def test_the_likeliest_is_what_a_greedy_step_writes(several):
    """In bfloat16, where logits tie, the loop takes the lowest of the likeliest ids, and so do these."""
    model = several.model
    coarse = lambda logits, hook: (logits * 2).round() / 2  # noqa: E731
    options = dict(length=10, steps=10, fwd_hooks=[("denoise.hook_logits", coarse)])
    run = model.denoise(PROMPT, **options, predictions=3)
    other = model.denoise(PROMPT, **options, predictions=1)
    assert (run.predictions.margin == 0).any()
    assert torch.equal(run.predictions.likeliest, other.predictions.likeliest)
    for row, pos in (run.revealed_at >= 0).nonzero().tolist():
        assert run.predictions.likeliest[run.revealed_at[row, pos], row, pos] == run.tokens[row, pos]


def test_a_forbidden_token_comes_after_all_others_and_before_none_that_cannot_be_written():
    logits = torch.tensor([[0.0, -torch.inf, 2.0, 2.0, 9.0], [-torch.inf, -torch.inf, 1.0, -torch.inf, 9.0]])
    writable = torch.tensor([True, True, True, True, False])
    assert likeliest_of(logits, 4, writable).tolist() == [[2, 3, 0, 1], [2, 0, 1, 3]]


@pytest.mark.parametrize("every", ["sdar", "bd3lm", "nemotron-block", "llada2", "llama", "uniform"], indirect=True)
def test_the_plan_of_memory_is_a_bound(every, monkeypatch):
    planned = []
    make = PredictionRecorder.__init__

    def plan(self, cfg, top_k, steps, n_entries, *others, **more):
        planned.append(n_entries)
        make(self, cfg, top_k, steps, n_entries, *others, **more)

    monkeypatch.setattr(PredictionRecorder, "__init__", plan)
    run = run_of(every)
    assert len(run.predictions.entry_entropy) <= planned[0]


def test_a_run_with_a_cache_records_them_too(several):
    run, _ = several.model.denoise_with_cache(PROMPT, "blocks.1.hook_resid_post", length=10, steps=6, predictions=3)
    plain = several.model.denoise(PROMPT, length=10, steps=6, predictions=3)
    assert torch.equal(run.predictions.tokens, plain.predictions.tokens)
    torch.testing.assert_close(run.predictions.entropy, plain.predictions.entropy, equal_nan=True)


def test_every_open_position_of_every_step_is_predicted(several):
    run = run_of(several)
    if several.model.cfg.is_autoregressive:
        wanted = torch.stack([run.revealed_at == step for step in run.predictions.steps])
    else:
        wanted = torch.stack([run.state_at(step).masked for step in run.predictions.steps])
    if run.handed is not None:
        wanted &= ~run.handed.finished[..., None]
    assert torch.equal(run.predictions.masked, wanted)


def test_the_run_is_the_one_without_them(several):
    same(record(several, predictions=3), record(several))


def test_they_are_the_last_layer_of_the_lens(long_run, trained):
    lens = logit_lens(trained, long_run, layers=[-1], top_k=5)
    masked = long_run.predictions.masked[:, :, lens.positions]
    assert torch.equal(lens.top_tokens[:, 0][masked], long_run.predictions.tokens[:, :, lens.positions][masked])
    torch.testing.assert_close(lens.entropy[:, 0][masked], long_run.predictions.entropy[:, :, lens.positions][masked])


def test_a_step_that_changes_nothing_costs_no_pass(trained):
    run = trained.denoise("Plerrick Baupling is the", max_new_tokens=3, steps=30, predictions=2)
    distinct = len({tuple(canvas) for canvas in run.canvases[:-1, 0].tolist()})
    assert run.forward_passes == distinct < 30
    equal(run.predictions(trained, 2), run.predictions)


def test_a_hook_changes_them(trained, long_run):
    def forbid(logits, hook):
        logits = logits.clone()
        logits[..., long_run.tokens[0, -2]] = float("-inf")
        return logits

    changed = long_run.predictions(trained, 5, fwd_hooks=[("denoise.hook_logits", forbid)])
    assert not (changed.tokens[changed.masked] == long_run.tokens[0, -2]).any()
    assert changed.entropy[changed.masked].isfinite().all()


def test_masked_again_is_predicted_again(trained):
    run = trained.denoise(
        "Plerrick Baupling is the", max_new_tokens=6, steps=8, sampler=ReMDM(eta=1.0), seed=1, predictions=2
    )
    masked_again = (run.predictions.masked[1:] & ~run.predictions.masked[:-1]).any()
    assert masked_again
    equal(run.predictions(trained, 2), run.predictions)


@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
def test_positions_outside_the_span_of_an_approximate_cache(trained, cache):
    sampler = threshold(0.9, block_length=3, approximate_cache=cache)
    options = dict(max_new_tokens=6, sampler=sampler)
    run = trained.denoise("Plerrick Baupling is the", **options, predictions=3)
    assert torch.equal(run.canvases, trained.denoise("Plerrick Baupling is the", **options).canvases)
    assert int(run.predictions.masked[0].sum()) == 6
    equal(run.predictions(trained, 3), run.predictions)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("readout", ["in_place", "shifted"])
def test_a_span_of_the_first_token_sees_what_it_should(cache, readout, specimen, configs):
    """The same with a hook that reads, because with hooks a pass takes the whole canvas."""
    shape = specimen(configs["twin"]).model.cfg.architecture.to_dict()
    model = specimen({**shape, "family": "diffusion_lens", "readout": readout}).model
    tokens = torch.randint(500, (1, 12), generator=torch.Generator().manual_seed(1))
    tokens[0, [0, 1, 2, 6, 7, 8, 9]] = model.cfg.mask_token_id
    sampler = threshold(0.99, None, 4, approximate_cache=cache)
    alone, hooked = (
        model.denoise(tokens, sampler=sampler, fwd_hooks=hooks)
        for hooks in ([], [("blocks.0.hook_resid_pre", lambda resid, hook: None)])
    )
    assert torch.equal(alone.canvases, hooked.canvases)
    torch.testing.assert_close(alone.confidence, hooked.confidence, equal_nan=True)


def test_saved_alone_and_with_the_run(long_run, tmp_path):
    alone = diffusion_lens.load(long_run.predictions.save(tmp_path / "predictions.safetensors"))
    within = diffusion_lens.load(long_run.save(tmp_path / "run.safetensors")).predictions
    for read in (alone, within):
        equal(read, long_run.predictions)
        assert read.words == long_run.predictions.words


def test_rows_and_later_steps_are_parts(several):
    run = record(several, predictions=3)
    for row in range(len(run)):
        for name in TABLES:
            whole, part = getattr(run.predictions, name), getattr(run.row(row).predictions, name)
            torch.testing.assert_close(part, whole[:, [row]], rtol=0, atol=0, equal_nan=True)
    later = run.from_step(2).predictions
    assert later.steps == run.predictions.steps[2:]
    torch.testing.assert_close(later.tokens, run.predictions.tokens[2:])
    doubled = run.repeat(2).predictions
    torch.testing.assert_close(doubled.tokens, run.predictions.tokens.repeat(1, 2, 1, 1))


def test_ten_thousand_runs_take_less_than_two_gigabytes(tmp_path):
    """A file of 100 runs of 256 positions in 64 steps, of which each writes four; 20,000 tokens occur."""
    n_rows, n_pos, n_steps, generator = 100, 256, 64, torch.Generator().manual_seed(0)
    revealed_at = torch.stack([torch.randperm(n_pos, generator=generator) // 4 for _ in range(n_rows)])
    masked = torch.stack([revealed_at >= step for step in range(n_steps)])
    n = int(masked.sum())
    tokens = 100_000 + torch.randint(20_000, (n, 5), generator=generator)
    predictions = Predictions.of(
        *(tokens, torch.rand(n, 5), torch.rand(n), masked),
        steps=list(range(n_steps)),
        written=tokens[:n_pos, :1].T.repeat(n_rows, 1),
        revealed_at=revealed_at,
        words=dict.fromkeys(tokens.unique().tolist(), "word"),
        record={},
    )
    assert torch.equal(predictions.tokens[masked], tokens)
    size = predictions.half().save(tmp_path / "0.safetensors").stat().st_size
    assert 10_000 / n_rows * size < 2e9


def test_batches_are_read_one_after_the_other(trained, tmp_path):
    for i in range(2):
        run = trained.denoise("Plerrick Baupling is the", max_new_tokens=3 + i, predictions=2)
        run.predictions.half().save(tmp_path / f"{i}.safetensors")
    read = list(Predictions.stream(tmp_path))
    assert [each.entropy.dtype for each in read] == [torch.float16] * 2
    assert torch.equal(read[1].likeliest, run.predictions.likeliest)


def test_what_cannot_be_recorded_is_said(trained, long_run, tmp_path):
    with pytest.raises(ValueError, match=r"predictions=999999, but 'site-mdm' can write \d+ tokens"):
        trained.denoise("Plerrick Baupling is the", max_new_tokens=2, predictions=999_999)
    with pytest.raises(ValueError, match="denoise fewer rows at once"):
        long_run.predictions(trained, 5, max_bytes=100)
    plain = trained.denoise("Plerrick Baupling is the", max_new_tokens=2)
    with pytest.raises(AttributeError, match=r"trajectory\.predictions\(model, top_k=5\)"):
        plain.predictions.tokens  # noqa: B018
    assert not plain.predictions
    assert isinstance(long_run.predictions, Predictions)
    assert len(long_run.predictions) == 1
    with pytest.raises(ValueError, match="top_k=0"):
        plain.predictions(trained, 0)
    with pytest.raises(ValueError, match="the two likeliest tokens"):
        plain.predictions(trained, 1).margin  # noqa: B018
    with pytest.raises(ValueError, match=r"contains no \.safetensors file"):
        Predictions.stream(tmp_path)
    other = HookedDiffusionTransformer.from_pretrained("site-ar")
    with pytest.raises(ValueError, match="was written by 'site-mdm'"):
        plain.predictions(other)


def test_the_table_and_the_picture(long_run):
    frame = long_run.predictions.to_dataframe()
    assert len(frame) == int(long_run.predictions.masked.sum())
    last = frame[(frame.pos == 5) & (frame.step == frame[frame.pos == 5].step.max())].iloc[0]
    assert last.likeliest == last.written
    assert bool(last.right)
    ax = long_run.predictions.plot(show="margin")
    assert len(ax.get_yticklabels()) == 6
