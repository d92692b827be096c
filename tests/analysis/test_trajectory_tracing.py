"""A trace at a step is a trace of that step's canvas; forced and free, under guidance, on both models of the pair."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from page_reader import PageFile
from parts_by_hand import told_noise_of

from diffusion_lens import HookedDiffusionTransformer, Query
from diffusion_lens.analysis import TrajectoryTrace, causal_trace, noise_scale, trace_trajectory
from diffusion_lens.analysis.engine.layout import CanvasLayout
from diffusion_lens.analysis.engine.trajectory import TracedTrajectory, loop_prompt
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising.samplers import ReMDM
from diffusion_lens.hooks.names import resid_post
from diffusion_lens.interventions import at_steps, on_branch

FACT = toy_facts.load().facts(trained="p2d", asked="p2d")[0]
# The bundled models: masked diffusion, a causal one, by blocks, and under uniform noise.
every_kind = pytest.mark.parametrize("tiny", ["tiny-mdm", "tiny-ar", "tiny-block", "tiny-uniform"], indirect=True)


@pytest.fixture(scope="module")
def query(tiny):
    return lay_out(tiny)


def lay_out(model):
    return FACT.to_query(
        model, n_masks=None if model.cfg.is_autoregressive else 14 - model.to_tokens(FACT.prompt).shape[1]
    )


@pytest.fixture(scope="module")
def run(tiny, query):
    return denoised(tiny, query)


def denoised(model, query):
    """A clean run: one step a token on the twin, otherwise four or, by blocks, two a block. Under uniform noise it
    begins with noise of its own."""
    if model.cfg.has_mask:
        return model.denoise(query.tokens[None], steps=6 if model.cfg.opens_blocks else 4)
    given = query.tokens[None, : query.answer_positions[0]]
    if model.cfg.is_autoregressive:
        return model.denoise(given, max_new_tokens=len(query.answer_tokens))
    return model.denoise(given, length=len(query.tokens), steps=4)


@pytest.fixture(scope="module")
def guided(tiny, query):
    """A run of the masked diffusion model under guidance."""
    return tiny.denoise(query.tokens[None], steps=4, cfg_scale=0.8)


@pytest.fixture(scope="module")
def noise(tiny, query):
    return dict(noise=noise_scale(tiny, [query]), samples=2, seed=2)


@pytest.fixture(scope="module")
def trace(tiny, query, run, noise):
    """The trace of the clean run at one layer."""
    return trace_trajectory(tiny, query, trajectory=run, **noise, layers=[1])


def drawn_noise(tiny, query, noise):
    shape = noise["samples"], query.subject[1] - query.subject[0], tiny.cfg.d_model
    return torch.from_numpy(noise["noise"] * np.random.RandomState(noise["seed"]).randn(*shape)).float()


def query_at(tiny, query, run, step):
    """The query of a step's canvas by hand: masked tokens only, or all under uniform noise; the twin's canvas is filled
    with the answer, blocks that are not open with [MASK]."""
    canvas = run.canvases[step, 0].clone()
    still_open = [
        i for i, pos in enumerate(query.answer_positions) if run.uniform_noise or run.revealed_at[0, pos] >= step
    ]
    if tiny.cfg.is_autoregressive:
        canvas[canvas == -1] = torch.tensor(query.answer_tokens)[len(query.answer_tokens) - int((canvas == -1).sum()) :]
    elif tiny.cfg.has_mask:
        canvas[canvas == -1] = tiny.cfg.mask_token_id
    positions = tuple(query.answer_positions[i] for i in still_open)
    return still_open, Query(canvas, query.subject, positions, tuple(query.answer_tokens[i] for i in still_open))


@every_kind
def test_by_default_from_the_first_answer_token_revealed_to_the_last(query, run, trace):
    revealed = run.revealed_at[0, list(query.answer_positions)].tolist()
    assert trace.known or run.uniform_noise
    written = range(run.n_steps) if run.uniform_noise else range(min(revealed), max(revealed) + 1)
    assert trace.steps == list(written)
    assert trace.revealed_at == revealed
    assert [revealed[token] for token in trace.order] == sorted(revealed)


@pytest.mark.parametrize(
    ("tiny", "options"),
    [
        ("tiny-mdm", dict()),
        ("tiny-mdm", dict(kind="mlp", window=2)),
        ("tiny-ar", dict(severed="attn")),
        ("tiny-block", dict(kind="attn")),
        ("tiny-uniform", dict()),
    ],
    indirect=["tiny"],
)
def test_each_steps_grid_is_a_causal_trace_of_its_canvas(tiny, query, run, noise, trace, options):
    assert_grids_are_traces(tiny, query, run, trace.steps[::2], dict(options, **noise, layers=[1]))


@pytest.mark.parametrize("family", ["bd3lm", "udlm", "llada2"])
def test_each_steps_grid_with_times_or_experts_is_a_causal_trace(in_words, family):
    model = in_words(family)
    query = lay_out(model)
    run = denoised(model, query)
    query = replace(query, answer_tokens=tuple(run.tokens[0, list(query.answer_positions)].tolist()))
    assert_grids_are_traces(model, query, run, [0, 1, 2], dict(noise=0.5, samples=2))


@pytest.mark.parametrize("tiny", ["tiny-ar", "tiny-block"], indirect=True)
def test_canvases_that_differ_from_the_answer_share_their_beginnings(tiny, query, run, token_layers):
    """The run writes something else than the answer, so that its canvases differ behind what it has written."""
    first, tokens = query.answer_positions[0], query.tokens.clone()
    others = query.answer_tokens[::-1]
    if tiny.cfg.is_autoregressive:
        tokens[first:] = torch.tensor(others[: len(tokens) - first])
    query = replace(query, tokens=tokens, answer_tokens=others)
    settings = dict(noise=0.5, samples=2, layers=[0, 1])
    steps = range(int(run.revealed_at[0, list(query.answer_positions)].max()) + 1)
    assert_grids_are_traces(tiny, query, run, steps, settings)
    with token_layers() as together:
        trace_trajectory(tiny, query, trajectory=run, steps=steps, **settings)
    with token_layers() as alone:
        for step in steps:
            causal_trace(tiny, query_at(tiny, query, run, step)[1], **settings)
    assert together[0] < 0.8 * alone[0]


def assert_grids_are_traces(model, query, run, steps, options):
    trace = trace_trajectory(model, query, trajectory=run, steps=steps, **options)
    for i, step in enumerate(trace.steps):
        still_open, at_step = query_at(model, query, run, step)
        with told_noise_of(model, run.state_at(step)):
            alone = causal_trace(model, at_step, **options)
        reached = (run.canvases[step, 0] != -1).nonzero().flatten().tolist()
        settled = [i for i in range(len(query.answer_tokens)) if i not in still_open]
        right = [float(run.tokens[0, query.answer_positions[i]] == query.answer_tokens[i]) for i in settled]
        written = float(all(right))
        torch.testing.assert_close(trace.scores[i, reached], written * alone.scores[reached], rtol=0, atol=1e-6)
        torch.testing.assert_close(
            trace.token_scores[i, reached][..., still_open], alone.token_scores[reached], rtol=0, atol=1e-6
        )
        assert trace.clean[i] == pytest.approx(written * alone.clean, abs=1e-6)
        assert trace.corrupted[i] == pytest.approx(written * alone.corrupted, abs=1e-6)
        assert trace.scores[i].isnan().all(1).sum() == len(trace.positions) - len(reached)
        assert trace.clean_token_scores[i, settled].tolist() == right
        assert trace.at_step(step).str_tokens == model.words(run.canvases[step, 0].tolist())


@every_kind
def test_chained_is_the_product_over_the_steps_that_commit(tiny, query, run, noise):
    """Sample by sample: with one sample the mean of products is the product."""
    noise = dict(noise, samples=1, layers=[1])
    trace = trace_trajectory(tiny, query, trajectory=run, **noise)
    expected = torch.ones(trace.scores.shape[1:])
    for token, step in enumerate(trace.revealed_at):
        i = trace.steps.index(step)
        expected *= trace.token_scores[i, ..., token].nan_to_num(nan=trace.corrupted_token_scores[i, token].item())
    torch.testing.assert_close(trace.chained, expected, rtol=1e-5, atol=1e-7)
    assert trace_trajectory(tiny, query, trajectory=run, steps=trace.steps[:1], **noise).chained is None


SCALES = [("tiny-mdm", 0.8), ("tiny-ar", 0.0), ("tiny-block", 0.0), ("tiny-uniform", 0.0)]


@pytest.mark.parametrize(("tiny", "cfg_scale"), SCALES, indirect=["tiny"])
def test_free_samples_read_what_they_wrote_themselves(tiny, query, noise, cfg_scale, request):
    """The slow way: each sample's own loop under noise, then one cell at each step by ordinary hooks, read by hand."""
    run = request.getfixturevalue("guided" if cfg_scale else "run")
    layer, position, (start, stop) = 1, query.answer_positions[0] - 1, query.subject
    noise = dict(noise, samples=3)
    drawn = drawn_noise(tiny, query, noise)
    trace = trace_trajectory(
        tiny, query, trajectory=run, canvas="free", **noise, layers=[0, layer], positions=[position]
    )
    expected = torch.ones(len(trace.steps), 3)

    def corrupt(embedding, hook):
        embedding = embedding.clone()
        embedding[:, start:stop] += drawn
        return embedding

    own = run.repeat(3).replay(tiny, canvas="free", fwd_hooks=[("hook_embed", on_branch(corrupt, "conditional"))])
    for i, step in enumerate(trace.steps):
        shown = query_at(tiny, query, run, step)[1].tokens
        _, clean = tiny.run_with_cache(shown[None])
        canvas = torch.where(own.canvases[step] == -1, shown, own.canvases[step])

        def put_back(resid, hook, clean=clean):
            resid = resid.clone()
            resid[:, position] = clean[hook.name][:, position]
            return resid

        logits = tiny.run_with_hooks(canvas, fwd_hooks=[("hook_embed", corrupt), (resid_post(layer), put_back)])
        unprompted = tiny(canvas.masked_fill(run.given[0], tiny.cfg.mask_token_id or 0))
        probabilities = (unprompted + (1 + cfg_scale) * (logits - unprompted)).softmax(-1)
        for sample in range(3):
            for at, token in zip(query.answer_positions, query.answer_tokens, strict=True):
                present, row = own.canvases[step, sample, at].item(), int(tiny.readout.rows(torch.tensor(at)))
                blank = run.uniform_noise or present in (-1, tiny.cfg.mask_token_id)
                expected[i, sample] *= probabilities[sample, row, token].item() if blank else float(present == token)
    torch.testing.assert_close(trace.scores[:, 0, 1], expected.mean(1), rtol=0, atol=1e-5)
    assert trace.chained is None
    assert len(set(own.tokens[-1].tolist()) ^ set(run.tokens[0].tolist())) > 0


@every_kind
def test_without_noise_free_is_forced_and_has_no_effect(tiny, query, run):
    quiet = dict(noise=0.0, samples=2, layers=[2], positions=[1, 4])
    forced = trace_trajectory(tiny, query, trajectory=run, **quiet)
    free = trace_trajectory(tiny, query, trajectory=run, canvas="free", **quiet)
    for trace in (forced, free):
        assert trace.indirect_effect.nan_to_num().abs().max() < 1e-5
        torch.testing.assert_close(trace.clean, trace.corrupted, rtol=0, atol=1e-5)
    torch.testing.assert_close(free.scores, forced.scores, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_under_guidance_scores_are_those_of_the_loop_and_of_its_replay(tiny, query, guided, noise):
    """Each token's probability at its step: the loop's confidence, and that of a replay under the same noise."""
    drawn = drawn_noise(tiny, query, noise)

    def corrupt(embedding, hook):
        embedding = embedding.clone()
        embedding[:, slice(*query.subject)] += drawn
        return embedding

    trace = trace_trajectory(tiny, query, trajectory=guided, **noise, layers=[0], positions=[0])
    replayed = guided.repeat(2).replay(tiny, fwd_hooks=[("hook_embed", on_branch(corrupt, "conditional"))])
    assert trace.known
    for token, (position, step) in enumerate(zip(query.answer_positions, trace.revealed_at, strict=True)):
        i = trace.steps.index(step)
        clean, corrupted = trace.clean_token_scores[i, token].item(), trace.corrupted_token_scores[i, token].item()
        assert clean == pytest.approx(guided.confidence[0, position].item(), abs=1e-5)
        assert corrupted == pytest.approx(replayed.confidence[:, position].mean().item(), abs=1e-5)


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_steps_begin_when_an_answer_token_is_first_unmasked(tiny, query):
    run = tiny.denoise(query.tokens[None], steps=8, sampler=ReMDM(strategy="cap", eta=0.5), seed=1)
    positions = list(query.answer_positions)
    unmasked = [i for i in range(8) if (run.canvases[i + 1, 0, positions] != tiny.cfg.mask_token_id).any()]
    revealed = run.revealed_at[0, positions]
    assert unmasked[0] < revealed.min()
    trace = trace_trajectory(tiny, query, trajectory=run, noise=0.1, samples=1, layers=[0], positions=[0])
    assert trace.steps == list(range(unmasked[0], int(revealed.max()) + 1))


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_a_sampler_that_masks_again_may_leave_no_answer_token_masked(tiny):
    query = FACT.to_query(tiny, n_masks=14 - tiny.to_tokens(FACT.prompt).shape[1], first_tokens=2)
    run = tiny.denoise(query.tokens[None], steps=10, sampler=ReMDM("rescale", eta=0.6), seed=4, temperature=1.0)
    trace = trace_trajectory(tiny, query, trajectory=run, noise=0.5, samples=2, layers=[0, 1])
    canvases = run.canvases[trace.steps][:, 0, list(query.answer_positions)]
    closed = (canvases != tiny.cfg.mask_token_id).all(dim=1)
    assert closed.any()
    assert not closed.all()
    right = (canvases == torch.tensor(query.answer_tokens)).all(dim=1).float()
    assert (trace.scores[closed] == right[closed, None, None]).all()
    assert torch.equal(trace.clean[closed], right[closed])
    assert (trace.indirect_effect[closed] == 0).all()
    assert trace.indirect_effect[~closed].any()
    assert trace.chained is not None


@every_kind
def test_a_branch_is_traced_from_its_own_first_step(tiny, query, run):
    cells = dict(noise=0.1, samples=1, layers=[0], positions=[1, 3])
    whole = trace_trajectory(tiny, query, trajectory=run, **cells)
    start = whole.steps[1]
    branch = trace_trajectory(tiny, query, trajectory=run.from_step(start), **cells)
    later = [i for i, step in enumerate(whole.steps) if step >= start]
    assert branch.steps[0] == start
    assert branch.steps == [whole.steps[i] for i in later]
    torch.testing.assert_close(branch.scores, whole.scores[later], rtol=0, atol=1e-6, equal_nan=True)


def test_a_fact_is_denoised_with_the_default_settings(tiny):
    trace = trace_trajectory(tiny, FACT, steps=[1], noise=0.1, samples=1, layers=[0])
    assert trace.scores.shape[1:] == (len(trace.str_canvases[0]), 1)
    assert trace.record["noise"] == 0.1
    assert trace.record["sampler"]


@every_kind
def test_a_fact_is_laid_out_as_averages_lay_it_out(tiny):
    """At the length that the model was trained on, or at that of a run."""
    options = dict(noise=0.1, samples=1, layers=[0], positions=[1])
    masked = not tiny.cfg.is_autoregressive
    at_length = CanvasLayout(14 if masked else None).query(tiny, FACT)
    assert len(at_length.tokens) == 14 or not masked
    assert torch.equal(causal_trace(tiny, FACT, **options).scores, causal_trace(tiny, at_length, **options).scores)
    assert torch.equal(TracedTrajectory.of(tiny, FACT, None).query.tokens, at_length.tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 17 positions are more than it was trained on
        longer = CanvasLayout(17 if masked else None).query(tiny, FACT)
        given, length = loop_prompt(tiny, longer)
        run = tiny.denoise(given[None], length=length, steps=4)
    assert torch.equal(TracedTrajectory.of(tiny, FACT, run).query.tokens, longer.tokens)


def test_save_and_load(trace, tmp_path):
    again = TrajectoryTrace.load(trace.save(tmp_path / "trace.safetensors"))
    for name, value in vars(trace).items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(getattr(again, name), value, rtol=0, atol=0, equal_nan=True)
        else:
            assert getattr(again, name) == value


@pytest.mark.parametrize("tiny", ["tiny-ar"], indirect=True)
def test_the_page_and_the_pictures_contain_the_scores(trace):
    page = PageFile(trace.page().html())
    assert page.run()["steps"] == trace.steps
    for i, step in enumerate(trace.steps):
        _, arrays = page.read(f"trace/resid/{step}")
        np.testing.assert_array_equal(arrays["scores"].astype(np.float32), trace.scores[i].numpy())
    images = [trace.plot(step).get_images()[0] for step in trace.steps[:2]]
    assert images[0].get_clim() == images[1].get_clim()


def test_bad_settings_are_refused(tiny, query, run, trace, noise):
    def refused(message, trajectory=run, **options):
        with pytest.raises(ValueError, match=message):
            trace_trajectory(tiny, query, trajectory=trajectory, **{**noise, **options})

    refused("canvas='loose'", canvas="loose")
    refused(r"steps=\[5\]", steps=[5])
    refused(r"steps=\[\]", steps=[])
    refused("has 2 rows", trajectory=run.repeat(2))
    changed = query.tokens.clone()
    changed[0] = 7
    with pytest.raises(ValueError, match="another prompt"):
        trace_trajectory(
            tiny, Query(changed, query.subject, query.answer_positions, query.answer_tokens), trajectory=run, **noise
        )
    longer = torch.cat([query.tokens, query.tokens])
    longer[14:] = 5 if tiny.cfg.is_autoregressive else tiny.cfg.mask_token_id
    with pytest.raises(ValueError, match="does not contain the answer positions"):
        trace_trajectory(tiny, Query(longer, query.subject, (14,), (5,)), trajectory=run, **noise)
    refused("contains duplicates", steps=[1, 1])
    size = dict(length=14, steps=1) if tiny.cfg.has_mask else dict(length=9)
    refused("another prompt", trajectory=tiny.denoise(query.tokens[None, :1], **size))
    refused("max_bytes=1 is too small", max_bytes=1, canvas="free")
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.long), query.tokens[None, : query.answer_positions[0]]], dim=1)
    real = torch.arange(padded.shape[1])[None] >= 2
    refused("with padding", trajectory=tiny.denoise(padded, max_new_tokens=5, steps=1, attention_mask=real))
    other = replace(run, record={**run.record, "architecture": {**run.record["architecture"], "d_model": 7}})
    refused("whose architecture differs", trajectory=other)
    with pytest.raises(ValueError, match="has no answer"):
        trace_trajectory(tiny, Query(query.tokens, query.subject, (), ()), **noise)
    with pytest.raises(KeyError, match="step 77 was not traced"):
        trace.at_step(77)


@every_kind
def test_hooks_by_step_and_the_trace_agree(tiny, query, run):
    """Restoring the row that is read after the last block, by `at_steps` in a forced replay: the clean probability."""
    position = query.answer_positions[0]
    step = int(run.revealed_at[0, position])
    row = int(tiny.readout.rows(torch.tensor(position)))
    trace = trace_trajectory(
        tiny, query, trajectory=run, noise=0.4, samples=1, steps=[step], positions=[row], layers=[-1]
    )
    drawn = torch.from_numpy(
        0.4 * np.random.RandomState(1).randn(1, query.subject[1] - query.subject[0], tiny.cfg.d_model)
    )
    _, cache = tiny.run_with_cache(run.canvases[step].clamp(min=0))

    def corrupt(embedding, hook):
        embedding = embedding.clone()
        embedding[:, slice(*query.subject)] += drawn.float()
        return embedding

    def put_back(resid, hook):
        resid = resid.clone()
        resid[:, row] = cache[hook.name][:, row]
        return resid

    def read(logits, hook):
        # Under uniform noise later steps may write the position again, so that its confidence is theirs.
        said.append(logits[0, position].softmax(-1)[query.answer_tokens[0]].item())

    said, last = [], resid_post(tiny.cfg.n_layers - 1)
    in_loop = [("hook_embed", corrupt), (last, at_steps(put_back, step)), ("denoise.hook_logits", at_steps(read, step))]
    replayed = run.replay(tiny, fwd_hooks=in_loop)
    assert said == [pytest.approx(trace.token_scores[0, 0, 0, 0].item(), abs=1e-5)]
    if not run.uniform_noise:
        assert replayed.confidence[0, position].item() == pytest.approx(said[0], abs=1e-5)


def test_steps_that_show_the_network_the_same_tokens_share_one_trace(token_layers):
    """On a causal model that writes the answer, all steps together cost what one of them costs."""
    model = HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu")
    loop = model.denoise(FACT.prompt, length=len(FACT.to_query(model).tokens) + 1)
    settings = dict(trajectory=loop, noise=0.5, samples=2)
    with token_layers() as of_all:
        trace = trace_trajectory(model, FACT, **settings)
    with token_layers() as of_last:
        last = trace_trajectory(model, FACT, steps=[trace.steps[-1]], **settings)
    assert trace.known
    assert len(trace.steps) > 1
    assert of_all == of_last
    torch.testing.assert_close(trace.token_scores[-1], last.token_scores[0], equal_nan=True)
