"""The laws of the loop on one small model a family, and that only the readout knows of a shift."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from diffusion_lens import HookedDiffusionTransformer, Query
from diffusion_lens.analysis import causal_trace
from diffusion_lens.analysis.rome import compute_key, optimize_value
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.model.noise import HeadAt

RUNS = [
    dict(steps=4, sampler="confidence", cfg_scale=0.8, temperature=0.0, seed=1),
    dict(steps=5, sampler="ancestral", cfg_scale=0.0, temperature=0.7, seed=2),
]
PROMPT, LENGTH = 5, 11
# Of each readout and direction one; the lit-gpt pair is under the same laws in test_loop_laws.py, over more settings.
others = pytest.mark.parametrize(
    "every",
    ["llada", "dream", "llama", "a2d-qwen3", "sdar", "fast_dllm", "llada_moe", "llada2", "diffullama", "radd"],
    indirect=True,
)
DREAM = {
    "model_type": "Dream",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 513,
    "max_position_embeddings": 64,
    "rope_theta": 1e6,
    "mask_token_id": 512,
}


# Readouts in place and shifted, guided and not, the causal model at a temperature; uniform noise, blocks, with a first
# token that the row before predicts too, networks with time conditioning, and experts.
others_and_runs = pytest.mark.parametrize(
    ("every", "run"),
    [
        *(("llada", 1), ("dream", 0), ("dream", 1), ("llama", 1), ("a2d-qwen3", 0), ("diffullama", 0), ("radd", 1)),
        *(("uniform", 0), ("udlm", 1), ("sedd-uniform", 1), ("sedd", 1), ("llada_moe", 1)),
        *(("sdar", 0), ("fast_dllm", 1), ("nemotron-block", 1), ("nemotron-prompt", 1), ("bd3lm", 1), ("llada2", 0)),
    ],
    indirect=True,
)

of_each_noise = pytest.mark.parametrize(
    "every",
    ["sdar", "fast_dllm", "nemotron-block", "bd3lm", "llada2", "mdlm", "sedd", "uniform", "udlm"],
    indirect=True,
)


def prompt_of(every):
    return every.tokens[:, :PROMPT] % 500


def steps_of(cfg, steps):
    """Of a run: by blocks the default number, unless the network is given the time, where it is 32 for each block."""
    return steps if not cfg.opens_blocks else 8 if cfg.time_conditioning else None


@pytest.fixture(scope="module")
def run(request, every):
    """A prompt of three rows, settings that the model understands, and the run."""
    cfg = every.model.cfg
    # Without [MASK] the default sampler of the noise, and no guidance; by blocks the default sampler and its steps.
    plain = {} if cfg.has_mask else {"sampler": None, "cfg_scale": 0.0}
    by_blocks = {"sampler": None, "steps": steps_of(cfg, 0)} if cfg.opens_blocks else {}
    prompt, options = prompt_of(every), {**RUNS[request.param], "length": LENGTH, **plain, **by_blocks}
    return prompt, options, every.model.denoise(prompt, **options)


@others_and_runs
def test_a_run_fills_the_blanks_and_nothing_else(every, run):
    prompt, _, trajectory = run
    cfg = every.model.cfg
    assert (trajectory.canvases[:, :, :PROMPT] == prompt).all()
    assert torch.equal(trajectory.canvases[-1], trajectory.tokens)
    assert ((trajectory.tokens >= 0) & (trajectory.tokens < 512)).all()
    if cfg.uniform_noise:  # every step may write every position; the first canvas is noise
        noise = trajectory.canvases[0, :, PROMPT:]
        assert ((noise >= 0) & (noise < 512)).all()
        assert noise.unique().numel() > 10
        changed = trajectory.canvases[1:] != trajectory.canvases[:-1]
        last = torch.stack([row * step for step, row in enumerate(changed.int())]).amax(dim=0)
        assert torch.equal(trajectory.revealed_at[:, PROMPT:], last[:, PROMPT:])
        assert (trajectory.revealed_at[:, :PROMPT] == -1).all()
        return
    blanks = torch.tensor([-1] if cfg.is_autoregressive else [-1, cfg.blank] if cfg.opens_blocks else [cfg.blank])
    assert torch.isin(trajectory.canvases[0, :, PROMPT:], blanks).all()
    for step, (before, after) in enumerate(pairwise(trajectory.canvases)):
        was_blank, is_blank = torch.isin(before, blanks), torch.isin(after, blanks)
        assert torch.equal(after[~was_blank], before[~was_blank])
        assert torch.equal(trajectory.revealed_at == step, was_blank & ~is_blank)


@others_and_runs
def test_a_row_runs_as_it_runs_alone(every, run):
    prompt, options, together = run
    alone = every.model.denoise(prompt[1:2], **{**options, "seed": [together.record["seeds"][1]]})
    assert_runs_as_alone(together.canvases[:, 1], alone)
    torch.testing.assert_close(together.confidence[1], alone.confidence[0], rtol=1e-4, atol=1e-6, equal_nan=True)


def assert_runs_as_alone(canvases, alone):
    """The canvases of a row of a batch, which may take more steps by blocks than the row takes alone."""
    n = len(alone.canvases)
    assert torch.equal(alone.canvases[:, 0], canvases[:n])
    assert (canvases[n:] == alone.tokens[0]).all()


@others_and_runs
def test_hooks_that_return_none_change_nothing(every, run):
    prompt, options, plain = run
    looked = every.model.denoise(prompt, **options, fwd_hooks=[(lambda name: True, lambda a, hook: None)])
    assert torch.equal(plain.canvases, looked.canvases)
    torch.testing.assert_close(plain.confidence, looked.confidence, rtol=1e-4, atol=1e-5)


@others_and_runs
def test_padded_prompts_give_what_they_give_alone(every, run):
    prompt, options, _ = run
    real = torch.ones_like(prompt)
    real[0, :3] = 0
    together = every.model.denoise(prompt, attention_mask=real, **options)
    alone = every.model.denoise(prompt[:1, 3:], **{**options, "length": LENGTH - 3})
    assert_runs_as_alone(together.canvases[:, 0, 3:], alone)


@of_each_noise
def test_seeds_decide_the_run_row_by_row_and_vanish_with_the_temperature(every):
    prompt, steps = every.tokens[:1, :2] % 500, steps_of(every.model.cfg, 5)

    def tokens(rows=1, **options):
        return every.model.denoise(prompt.expand(rows, -1), length=9, steps=steps, **options).tokens

    assert torch.equal(tokens(temperature=0.7, seed=2**40), tokens(temperature=0.7, seed=2**40))
    drawn = {tuple(row) for seed in (0, 100) for row in tokens(rows=4, temperature=3.0, seed=seed).tolist()}
    assert len(drawn) == 8
    assert torch.equal(tokens(temperature=2.0, seed=[8])[0], tokens(rows=2, temperature=2.0, seed=[3, 8])[1])
    assert torch.equal(tokens(temperature=1e-9), tokens())


@pytest.mark.parametrize(
    "every", ["sdar", "fast_dllm", "nemotron-block", "bd3lm", "llada2", "mdlm", "sedd", "diffullama"], indirect=True
)
def test_masks_inside_a_prompt_are_filled_and_nothing_else(every):
    mask = every.model.cfg.blank
    given = torch.tensor([[mask, mask, 7, mask, 9, mask]])
    run = every.model.denoise(given, length=12, steps=steps_of(every.model.cfg, 5))
    assert run.tokens[0, [2, 4]].tolist() == [7, 9]
    assert ((run.tokens >= 0) & (run.tokens != mask)).all()


@others_and_runs
def test_a_replay_and_a_branch_are_the_run(every, run, tmp_path):
    _, _, trajectory = run
    saved = Trajectory.load(trajectory.save(tmp_path / "run.safetensors"))
    for again in (saved.replay(every.model), saved.replay(every.model, canvas="free")):
        assert torch.equal(again.canvases, trajectory.canvases)
        torch.testing.assert_close(again.confidence, trajectory.confidence, rtol=1e-4, atol=1e-6, equal_nan=True)
    branch = saved.from_step(2).replay(every.model, canvas="free")
    assert torch.equal(branch.canvases, trajectory.canvases[2:])


@others_and_runs
def test_a_hook_at_a_step_changes_nothing_before_it(every, run):
    """Activations are those that the network computes at that step outside the loop."""
    prompt, options, plain = run
    name, seen = "blocks.1.hook_resid_post", {}

    def shift(activation, hook):
        if hook.step.branch == "conditional":
            seen[hook.step.index] = activation.clone()
        return activation + 3.0 if hook.step.index == 2 else None

    hooked = every.model.denoise(prompt, **options, fwd_hooks=[(name, shift)])
    assert torch.equal(hooked.canvases[:3], plain.canvases[:3])
    for step in (0, 1):
        with every.model.clock.at(plain.state_at(step)):
            _, cache = every.model.run_with_cache(every.model.cfg.readable(plain.canvases[step]), names_filter=name)
        torch.testing.assert_close(seen[step], cache[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "every",
    [
        *("llada", "dream", "llama", "a2d-qwen3", "uniform", "sedd-uniform", "udlm", "mdlm"),
        *("sdar", "fast_dllm", "nemotron-block", "bd3lm", "llada_moe", "llada2", "diffullama", "radd"),
    ],
    indirect=True,
)
def test_confidence_is_the_probability_on_the_canvas_of_that_step(every):
    """Read where the network predicts: by hand, the row before in a shifted model."""
    model = every.model
    steps = steps_of(model.cfg, 4)
    trajectory = model.denoise(prompt_of(every)[:1], length=LENGTH, steps=steps)
    for position in range(PROMPT, LENGTH, 2):
        # Under uniform noise the last step writes every position.
        step = trajectory.n_steps - 1 if model.cfg.uniform_noise else int(trajectory.revealed_at[0, position])
        state = trajectory.state_at(step)
        with model.clock.at(state):
            canvas = model.cfg.readable(trajectory.canvases[step])
            is_shifted = state.block is not None and state.block.first_shifted and position == state.block.start[0]
            row = position - int(model.cfg.readout == "shifted" or is_shifted)
            logits = HeadAt.of(model, canvas[:, [position]]).clean_logits(model(canvas, logits_at=[row]))
        odds = logits[0, 0].softmax(-1)
        torch.testing.assert_close(
            trajectory.confidence[0, position], odds[trajectory.tokens[0, position]], rtol=1e-4, atol=1e-6
        )


@others
def test_guidance_is_the_formula(every):
    if every.kind == "ar":
        with pytest.raises(ValueError, match=r"has no \[MASK\]"):
            every.model.denoise(prompt_of(every)[:1], length=LENGTH, cfg_scale=0.5)
        return
    model, seen = every.model, []
    look = ("denoise.hook_logits", lambda a, hook: seen.append(a))
    steps = steps_of(model.cfg, 1)
    trajectory = model.denoise(prompt_of(every)[:1], length=LENGTH, steps=steps, cfg_scale=0.8, fwd_hooks=[look])
    canvas = trajectory.canvases[0]
    n_open = int((canvas >= 0).sum())
    canvas = canvas[:, :n_open]
    conditional, unconditional = model(canvas), model(torch.full_like(canvas, model.cfg.mask_token_id))
    guided = unconditional + 1.8 * (conditional - unconditional)
    shift = int(model.cfg.readout == "shifted")
    torch.testing.assert_close(
        seen[0][:, PROMPT:n_open], guided[:, PROMPT - shift : n_open - shift], rtol=1e-5, atol=5e-5
    )


@pytest.fixture(scope="module")
def dream_and_in_place(specimen):
    """A shifted bidirectional model, and its weights in a model read in place."""
    shifted = specimen(DREAM).model
    cfg = replace(shifted.cfg, readout="in_place")
    return shifted, HookedDiffusionTransformer(cfg, tensors=shifted.state_dict().items())


def a_row_down(activation, hook):
    """Rows moved by one before the head, the first kept: what was read in the row before stands in its place."""
    return torch.cat([activation[:, :1], activation[:, :-1]], dim=1)


MOVED = ("ln_final.hook_normalized", a_row_down)
CANVAS = torch.tensor([11, 22, 33, 44, 55, 66, 77, 512, 512])
QUERY = Query(CANVAS, (2, 4), (7, 8), (31, 32))


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(cfg_scale=0.8),
        dict(sampler="ancestral", temperature=0.9),
        dict(sampler="remdm"),
    ],
)
def test_denoising_does_not_know_of_the_shift(dream_and_in_place, options):
    shifted, in_place = dream_and_in_place
    prompt = torch.tensor([[512, 12, 13, 512], [21, 22, 23, 24]])
    first = shifted.denoise(prompt, length=10, steps=4, seed=3, **options)
    second = in_place.denoise(prompt, length=10, steps=4, seed=3, fwd_hooks=[MOVED], **options)
    assert torch.equal(first.canvases, second.canvases)
    torch.testing.assert_close(first.confidence, second.confidence, rtol=1e-4, atol=1e-6, equal_nan=True)
    unmoved = in_place.denoise(prompt, length=10, steps=4, seed=3, **options)
    assert not torch.equal(first.canvases, unmoved.canvases)


@pytest.mark.parametrize("kind", ["resid", "mlp", "attn"])
def test_a_trace_does_not_know_of_the_shift(dream_and_in_place, kind):
    shifted, in_place = dream_and_in_place
    settings = dict(kind=kind, noise=0.5, samples=1, window=2)
    first = causal_trace(shifted, QUERY, **settings)
    with in_place.hooks(fwd_hooks=[MOVED]):
        second = causal_trace(in_place, QUERY, **settings)
    torch.testing.assert_close(first.token_scores, second.token_scores, rtol=1e-4, atol=1e-8)
    assert first.clean == pytest.approx(second.clean, rel=1e-4)
    assert causal_trace(in_place, QUERY, **settings).clean != pytest.approx(first.clean, rel=1e-2)


def test_rome_does_not_know_of_the_shift(dream_and_in_place):
    shifted, in_place = dream_and_in_place
    essence = Query(torch.tensor([33, 44, 9, 512]), (0, 2), (), ())
    keys = [compute_key(model, QUERY, 1).vector for model in dream_and_in_place]
    assert torch.equal(*keys)
    settings = dict(essence=essence, steps=5, lr=0.05, over_states="partial")
    first = optimize_value(shifted, QUERY, 1, **settings)
    with in_place.hooks(fwd_hooks=[MOVED]):
        second = optimize_value(in_place, QUERY, 1, **settings)
    torch.testing.assert_close(first.losses, second.losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first.vector, second.vector, rtol=1e-3, atol=1e-4)
    unmoved = optimize_value(in_place, QUERY, 1, **settings)
    assert (unmoved.losses[0] - first.losses[0]).abs().max() > 0.01
