"""DiffusionGemma beside transformers' own code: activations, logits, and whole runs with the numbers of `generate`."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_networks import diffusion_gemma as small_config
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

from diffusion_lens import HookedDiffusionTransformer, Query
from diffusion_lens.analysis import (
    TaughtCanvas,
    TaughtPair,
    causal_trace,
    compute_key,
    edge_attribution,
    fit_translators,
    logit_lens,
    patch_grid,
    routes,
    temporal_effect,
    trace_trajectory,
)
from diffusion_lens.analysis.causal_tracing import TraceSettings
from diffusion_lens.denoising import Trajectory
from diffusion_lens.denoising.samplers import diffusion_gemma
from diffusion_lens.evaluation import chain_rule_nll, monte_carlo_nll
from diffusion_lens.interventions import swap as swap_in

SIZE, N_PROMPT = 6, 9  # positions of a canvas, and of a prompt
# Windows shorter and longer than a prompt, heads of equal and other widths, one and several global layers.
SHAPES: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 4},
    "wide": {"sliding_window": 64, "num_key_value_heads": 4, "per_layer_config": {"2": {"head_dim": 12}}},
    "global": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "per_layer_config": {str(i): {"head_dim": 24, "num_key_value_heads": 1} for i in (0, 2)},
    },
}
# Settings of runs: new tokens, steps of a canvas, entropy bound, temperatures, and the stability and mean entropy at
# which a row is finished.
RUNS = {
    "one canvas": (6, 5, 0.5, 0.4, 0.8, 99, 1e-9),
    "three canvases": (18, 4, 6.0, 0.4, 0.8, 99, 1e-9),
    "finished early": (12, 6, 20.0, 0.4, 0.8, 0, 5.3),
    "finished when stable": (12, 8, 40.0, 0.01, 0.02, 1, 1.0),
}


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The authors' network with random weights, and ours from its files."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(len(request.param))
    theirs: Any = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**small_config(**SHAPES[request.param])))
    for name, parameter in theirs.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15 if "embed_tokens" in name else 0.05)
        elif "norm" in name or "scale" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if request.param == "wide" and "post_" in name:
            parameter.data.mul_(0.1)  # each token predicts itself, so that predictions become stable
    for i, layer in enumerate(theirs.model.decoder.layers):
        layer.layer_scalar.fill_(0.8 + 0.1 * i)
        theirs.model.encoder.language_model.layers[i].layer_scalar.fill_(1.1 - 0.1 * i)
    theirs.save_pretrained(folder)
    theirs.becomes_stable = request.param == "wide"
    return theirs.eval(), HookedDiffusionTransformer.from_pretrained(folder, device="cpu")


def tokens(n_batch: int, n_pos: int) -> torch.Tensor:
    return torch.randint(3, 500, (n_batch, n_pos), generator=torch.Generator().manual_seed(n_pos))


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    found, wanted = found.detach(), wanted.detach()
    torch.testing.assert_close(found, wanted, rtol=0, atol=3e-5 * (1 + float(wanted.abs().max())))


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_states_and_logits_equal_the_authors(pair: Any, padded: bool) -> None:
    theirs, ours = pair
    prompt, canvas = tokens(2, N_PROMPT), tokens(2, SIZE)
    conditioning = 3 * torch.randn(2, SIZE, 512, generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(prompt)
    real[1, : 3 * padded] = 0
    kept, read = [], []
    for layers, found in ((theirs.model.encoder.language_model.layers, kept), (theirs.model.decoder.layers, read)):
        for layer in layers:
            layer.register_forward_hook(lambda module, given, out, found=found: found.append(out.clone()))
    everything = torch.cat([real, torch.ones_like(canvas)], dim=1)
    given = {
        "input_ids": prompt,
        "attention_mask": real,
        "decoder_input_ids": canvas,
        "decoder_attention_mask": everything,
        "position_ids": (real.cumsum(dim=1) - 1).clamp(min=0),
        "decoder_position_ids": real.sum(dim=1, keepdim=True) + torch.arange(SIZE),
    }
    plain, conditioned = theirs(**given).logits, theirs(**given, self_conditioning_logits=conditioning).logits
    for layers in (theirs.model.encoder.language_model.layers, theirs.model.decoder.layers):
        for layer in layers:
            layer._forward_hooks.clear()

    whole = torch.cat([prompt, canvas], dim=1)
    with ours.at_block(N_PROMPT):
        logits, cache = ours.run_with_cache(whole, attention_mask=everything)
        again = ours(whole, attention_mask=everything, self_conditioning=conditioning)
    for i in range(ours.cfg.n_layers):
        state = cache[f"blocks.{i}.hook_resid_post"]
        near(state[:, :N_PROMPT][real.bool()], kept[i][real.bool()])
        near(state[:, N_PROMPT:], read[i])
    near(logits[:, N_PROMPT:], plain)
    near(again[:, N_PROMPT:], conditioned)
    assert float((plain - conditioned).abs().max()) > 0.03


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # of transformers' stopping criteria
@pytest.mark.parametrize("name", RUNS)
def test_runs_equal_generate_with_its_random_numbers(pair: Any, name: str) -> None:
    theirs, ours = pair
    new, steps, bound, t_min, t_max, stability, confidence = RUNS[name]
    prompt, read = tokens(2, N_PROMPT), []
    step = theirs._denoising_step

    def watched(**given: Any) -> Any:
        read.append((given["current_canvas"].clone(), given["finished_denoising"].clone()))
        return step(**given)

    theirs._denoising_step = watched
    torch.manual_seed(3)
    wanted = theirs.generate(
        prompt,
        max_new_tokens=new,
        max_denoising_steps=steps,
        sampler_config=EntropyBoundSamplerConfig(entropy_bound=bound),
        t_min=t_min,
        t_max=t_max,
        stability_threshold=stability,
        confidence_threshold=confidence,
    ).sequences
    del theirs._denoising_step

    sampler = diffusion_gemma(bound, t_min, t_max, stability, confidence)
    settings = {"max_new_tokens": new, "steps": steps, "sampler": sampler}
    run = ours.denoise(prompt, **settings, seed=torch.Generator().manual_seed(3))
    assert torch.equal(run.tokens, wanted)
    taken = [i for i in range(run.n_steps) if not bool(run.handed.finished[i].all())]
    assert len(taken) == len(read) == run.forward_passes
    early = name == "finished early" or (name == "finished when stable" and theirs.becomes_stable)
    assert (len(read) < steps * new // SIZE) == early
    for i, (canvas, finished) in zip(taken, read, strict=True):
        start = N_PROMPT + SIZE * (i // steps)
        assert torch.equal(run.handed.finished[i], finished)
        # A row that is finished shows what it has written, and the authors' its last noise, which nothing reads.
        assert torch.equal(run.canvases[i, ~finished, start : start + SIZE], canvas[~finished])


@pytest.fixture(scope="module")
def gemma(specimen: Any) -> Any:
    """A small random model, and a run of two canvases."""
    model = specimen(small_config()).model
    sampler = diffusion_gemma(entropy_bound=8.0, stability_threshold=1, confidence_threshold=1e-9)
    return model, model.denoise(tokens(2, N_PROMPT), max_new_tokens=12, steps=4, sampler=sampler, seed=5)


def test_hooks_see_what_a_run_without_them_computes_from_a_cache(gemma: Any) -> None:
    model, run = gemma
    seen: dict[str, list[Any]] = {}

    def keep(x: torch.Tensor, hook: Any) -> None:
        seen.setdefault(hook.name, []).append((x.clone(), hook.step))

    names = ("hook_confidence", "hook_reveal", "hook_noise", "hook_logits")
    hooks = [(f"denoise.{name}", keep) for name in names] + [("self_conditioning.hook_self_conditioning", keep)]
    again = run.replay(model, canvas="free", fwd_hooks=hooks)
    assert torch.equal(again.canvases, run.canvases)
    for i in range(run.n_steps):
        ranked, state = seen["denoise.hook_confidence"][i]
        accepted, noise = seen["denoise.hook_reveal"][i][0], seen["denoise.hook_noise"][i][0]
        left = 4 - i % 4
        p = (seen["denoise.hook_logits"][i][0][state.masked] / (0.4 + 0.4 * left / 4)).double().softmax(dim=-1)
        entropy = torch.special.entr(p).sum(dim=-1).view(2, SIZE)
        torch.testing.assert_close(-ranked[state.masked].view(2, SIZE), entropy, rtol=0, atol=1e-5)
        # By hand: the surest positions, while the entropies of those before add up to at most the bound.
        for row in range(2):
            order = entropy[row].argsort().tolist()
            chosen = [place for k, place in enumerate(order) if float(entropy[row][order[:k]].sum()) <= 8.0]
            start = N_PROMPT + SIZE * (i // 4)
            assert accepted[row].nonzero().flatten().tolist() == sorted(start + place for place in chosen)
        if left > 1:
            rest = state.masked & ~accepted
            assert torch.equal(run.canvases[i + 1][rest], noise[rest])
        signal = seen["self_conditioning.hook_self_conditioning"][i][0]
        assert bool((signal != 0).any()) == (left < 4)
        assert not bool(signal[~state.masked].any())


def test_the_state_between_steps_is_the_embedding_of_what_the_step_before_predicted(gemma: Any) -> None:
    model, run = gemma
    logits: list[torch.Tensor] = []
    run.replay(model, fwd_hooks=[("denoise.hook_logits", lambda x, hook: logits.append(x[hook.step.masked].clone()))])
    for i in range(run.n_steps):
        handed = run.handed[i]
        if i % 4 == 0:
            assert not bool(handed.expected.any())
            continue
        temperature = 0.4 + 0.4 * (4 - (i - 1) % 4) / 4
        expected = (logits[i - 1] / temperature).softmax(dim=-1) @ model.W_E * 32**0.5
        near(handed.expected, expected.view(2, SIZE, 32))
        assert torch.equal(handed.likeliest, logits[i - 1].argmax(dim=-1).view(2, SIZE))
        # Outside the loop, the same pass by the public argument.
        start = N_PROMPT + SIZE * (i // 4)
        stop = start + SIZE
        with model.at_block(start):
            outside = model(
                run.canvases[i][:, :stop],
                self_conditioning=(logits[i - 1] / temperature).view(2, SIZE, 512),
                logits_at=list(range(start, stop)),
            )
        near(outside.flatten(0, 1), logits[i])


def test_replays_and_branches_read_what_the_run_read(gemma: Any, tmp_path: Path) -> None:
    model, run = gemma
    forced = run.replay(model)
    assert torch.equal(forced.canvases, run.canvases)
    for name in ("expected", "likeliest", "finished"):
        assert torch.equal(getattr(forced.handed, name), getattr(run.handed, name))
    loaded = Trajectory.load(run.save(tmp_path / "run.safetensors"))
    for step in (2, 4, 7):
        branch = loaded.from_step(step).replay(model, canvas="free")
        assert torch.equal(branch.canvases, run.canvases[step:])
        assert torch.equal(run.row(1).from_step(step).replay(model, canvas="free").tokens[0], run.tokens[1])


def test_the_lens_of_the_last_layer_gives_the_logits_of_the_step(gemma: Any) -> None:
    model, run = gemma
    kept: list[Any] = []
    run.replay(model, fwd_hooks=[("denoise.hook_logits", lambda x, hook: kept.append((x.clone(), hook.step.masked)))])
    lens = logit_lens(model, run, steps=[1, 6])
    for index, step in enumerate((1, 6)):
        logits, masked = kept[step]
        best = logits.argmax(dim=-1).masked_fill(~masked, -1)
        found = lens.top_tokens[index, -1, ..., 0] if hasattr(lens, "top_tokens") else None
        assert found is not None
        assert torch.equal(found.masked_fill(~masked, -1), best)


def test_a_trace_of_mlps_restores_the_sum_of_experts_and_dense_mlp(gemma: Any) -> None:
    model, run = gemma
    text, answer, position = run.canvases[3, 0, : N_PROMPT + SIZE], int(run.tokens[0, N_PROMPT]), 3
    query, swap = Query(text, (2, 4), (N_PROMPT,), (answer,)), [11, 12]
    changed = text.clone()
    changed[2:4] = torch.tensor(swap)
    with model.at_block(N_PROMPT):
        trace = causal_trace(model, query, "mlp", window=1, corruption="swap", swap=swap, positions=[position])
        clean = model.run_with_cache(text[None])[1]
        for layer in range(model.cfg.n_layers):
            restored = [(f"blocks.{layer}.hook_mlp_out", swap_in(clean, position))]
            logits = model.run_with_hooks(changed[None], fwd_hooks=restored)
            near(trace.scores[0, layer], logits[0, N_PROMPT].softmax(-1)[answer])


def test_switching_off_self_conditioning_changes_every_later_step_of_a_canvas(gemma: Any) -> None:
    model, run = gemma
    off = [("self_conditioning.hook_self_conditioning", lambda x, hook: torch.zeros_like(x))]
    changed = run.replay(model, canvas="free", fwd_hooks=off)
    assert torch.equal(changed.canvases[1], run.canvases[1])  # the first step has none
    assert not torch.equal(changed.canvases[2:4], run.canvases[2:4])


def test_what_it_cannot_do_is_said(gemma: Any) -> None:
    model, _ = gemma
    prompt = tokens(1, N_PROMPT)
    with pytest.raises(ValueError, match="nothing shows where the canvas begins"):
        copy.deepcopy(model)(prompt)  # the fixture says it
    with pytest.raises(ValueError, match="a multiple of it"):
        model.denoise(prompt, max_new_tokens=SIZE + 1)
    with pytest.raises(ValueError, match="temperatures of its own"):
        model.denoise(prompt, max_new_tokens=SIZE, temperature=1.0)
    with pytest.raises(ValueError, match=r"t_min=0\.9, t_max=0\.8"):
        diffusion_gemma(t_min=0.9)
    with pytest.raises(ValueError, match=r"self_conditioning is \[1, 5, 512\]"), model.at_block(N_PROMPT):
        model(tokens(1, N_PROMPT + SIZE), self_conditioning=torch.zeros(1, 5, 512))
    image = prompt.clone()
    image[0, 2] = 510
    with pytest.raises(ValueError, match="stands for an image"):
        model.denoise(image, max_new_tokens=SIZE)
    sequential = model.denoise(prompt, max_new_tokens=SIZE, steps=2, seed=torch.Generator())
    with pytest.raises(ValueError, match="cannot be drawn again"):
        sequential.replay(model, canvas="free")
    assert torch.equal(sequential.replay(model).canvases, sequential.canvases)
    with pytest.raises(ValueError, match="is not published"):
        model(prompt, return_type="loss")
    for likelihood in (chain_rule_nll, monte_carlo_nll):
        with pytest.raises(ValueError, match="is not published"):
            likelihood(model, prompt[0], tokens(1, SIZE)[0])
    with pytest.raises(ValueError, match="heads of different shapes"):
        _ = model.W_K
    with pytest.raises(ValueError, match="use node_attribution"):
        edge_attribution(model, prompt, prompt + 1, lambda logits: logits[0, -1, 5])
    with pytest.raises(ValueError, match="keys and values are those of one MLP"):
        compute_key(model, Query(prompt[0], (2, 4), (), ()), 0)
    pair = TaughtPair(TaughtCanvas(prompt[0], 5, 7, 2), TaughtCanvas(prompt[0], 6, 8, 3))
    with pytest.raises(ValueError, match="no one reader and source"):
        routes(model, [pair])
    with pytest.raises(ValueError, match="translators learn from"):
        fit_translators(model, [sequential])
    query = Query(sequential.prompt[0], (2, 4), (N_PROMPT,), (7,))
    for trace in (partial(trace_trajectory, canvas="free"), temporal_effect):
        with pytest.raises(ValueError, match="hands predictions of its own"):
            trace(model, query, trajectory=sequential.row(0), noise=1.0, samples=1)
    whole = tokens(1, N_PROMPT + SIZE)
    with model.at_block(N_PROMPT):
        stream = model(whole, stop_at_layer=0)
    with pytest.raises(ValueError, match="enters with the embedding"), model.at_block(N_PROMPT):
        model(stream, start_at_layer=0, self_conditioning=torch.zeros(1, SIZE, 512))
    with pytest.raises(ValueError, match="the text has 15"), model.at_block(21):
        model(whole)
    generator = torch.Generator().manual_seed(3)
    records = [model.denoise(prompt, max_new_tokens=SIZE, steps=2, seed=generator).record for _ in range(2)]
    assert len({record["drawn_in_sequence"] for record in records}) == 2


@pytest.fixture(scope="module")
def stable(specimen: Any) -> Any:
    """A network whose tokens predict themselves, and a run in which canvases repeat and a row is finished early."""
    model = specimen(small_config()).model
    own = copy.deepcopy(model)
    own.clock.origins = None
    for name, parameter in own.named_parameters():
        if "_post." in name:
            parameter.data.mul_(0.1)
    sampler = diffusion_gemma(40.0, 0.01, 0.02, stability_threshold=2, confidence_threshold=1e-3)
    return own, own.denoise(tokens(2, N_PROMPT), max_new_tokens=12, steps=8, sampler=sampler, seed=5)


def test_a_forced_replay_waits_where_the_run_waited(stable: Any) -> None:
    model, run = stable
    assert 0 < int(run.handed.finished.sum()) < run.handed.finished.numel()
    assert bool((run.canvases[1:] == run.canvases[:-1]).all(dim=(1, 2)).any())
    seen: dict[str, list[int]] = {"free": [], "forced": []}
    for canvas, steps in seen.items():
        hooks = [("blocks.0.hook_resid_pre", lambda x, hook, steps=steps: steps.append(hook.step.index))]
        again = run.replay(model, canvas=canvas, fwd_hooks=hooks)
        assert torch.equal(again.canvases, run.canvases)
        assert torch.equal(again.revealed_at, run.revealed_at)
        torch.testing.assert_close(again.confidence, run.confidence)
    assert seen["forced"] == seen["free"]
    assert len(seen["free"]) == run.forward_passes


@pytest.mark.parametrize("step", [3, 9])
def test_a_trace_at_a_step_is_what_hooks_of_a_replay_compute(stable: Any, step: int) -> None:
    """Each state restored by hand, in the pass of this step of a forced replay."""
    model, run = stable
    run = run.row(0)
    answer = N_PROMPT + SIZE * (step // 8) + 2
    query = Query(run.prompt[0], (2, 4), (answer,), (int(run.tokens[0, answer]),))
    settings = {"noise": 0.3, "samples": 2, "layers": [0, 2], "positions": [2, 3, answer]}
    trace = trace_trajectory(model, query, trajectory=run, steps=[step - 1, step], **settings)
    corrupt = TraceSettings(noise=0.3, samples=2).hooks(model, query)
    clean_states: dict[str, torch.Tensor] = {}
    found: list[torch.Tensor] = []

    def keep(x: torch.Tensor, hook: Any) -> None:
        if hook.step.index == step:
            clean_states[hook.name] = x[:1].clone()

    def read(x: torch.Tensor, hook: Any) -> None:
        if hook.step.index == step:
            found.append(x[:, answer].softmax(dim=-1)[:, query.answer_tokens[0]].clone())

    points = [f"blocks.{layer}.hook_resid_post" for layer in (0, 2)]
    run.replay(model, fwd_hooks=[*((point, keep) for point in points), ("denoise.hook_logits", read)])
    torch.testing.assert_close(trace.clean_token_scores[1, 0], found[0][0], rtol=1e-4, atol=1e-6)
    copies = run.repeat(2)
    copies.replay(model, fwd_hooks=[*corrupt, ("denoise.hook_logits", read)])
    torch.testing.assert_close(trace.corrupted_token_scores[1, 0], found[1].mean(), rtol=1e-4, atol=1e-6)
    for column, point in enumerate(points):
        for row, position in enumerate((2, 3, answer)):

            def restore(x: torch.Tensor, hook: Any, point: str = point, position: int = position) -> torch.Tensor:
                x[:, position] = clean_states[point][:, position]
                return x

            copies.replay(model, fwd_hooks=[*corrupt, (point, restore), ("denoise.hook_logits", read)])
            torch.testing.assert_close(trace.token_scores[1, row, column, 0], found[-1].mean(), rtol=1e-4, atol=1e-6)


def test_a_patched_state_of_the_first_block_is_the_stream_that_enters_it(gemma: Any) -> None:
    model, run = gemma
    other = model.denoise(
        tokens(2, N_PROMPT) + 1, max_new_tokens=12, steps=4, sampler=diffusion_gemma(8.0, confidence_threshold=1e-9)
    )
    clean, corrupted = run.row(0), other.row(0)
    place = N_PROMPT + 1
    metric = lambda logits: logits[0, place, 7]  # noqa: E731
    grid = patch_grid(model, clean, corrupted, metric, "resid_pre", steps=[2], positions=[3, place], layers=[0, 1])
    states: dict[str, torch.Tensor] = {}
    found: list[float] = []

    def at_step(point: str, change: Any) -> Any:
        return point, lambda x, hook: change(x, hook) if hook.step.index == 2 else None

    def keep(x: torch.Tensor, hook: Any) -> None:
        states[hook.name] = x.clone()

    def read(x: torch.Tensor, hook: Any) -> None:
        found.append(float(x[0, place, 7]))

    points = [f"blocks.{layer}.hook_resid_pre" for layer in (0, 1)]
    clean.replay(model, fwd_hooks=[at_step(point, keep) for point in points])
    for column, point in enumerate(points):
        for row, position in enumerate((3, place)):

            def patch(x: torch.Tensor, hook: Any, position: int = position) -> torch.Tensor:
                x[:, position] = states[hook.name][:, position]
                return x

            corrupted.replay(model, fwd_hooks=[at_step(point, patch), at_step("denoise.hook_logits", read)])
            assert float(grid.scores[0, column, row]) == pytest.approx(found[-1], rel=1e-4, abs=1e-5)


def test_what_is_written_out_is_the_text_network(pair: Any, tmp_path: Path) -> None:
    theirs, ours = pair
    with pytest.warns(UserWarning, match="the text network of .* alone"):
        ours.export_hf(tmp_path / "out")
    again = HookedDiffusionTransformer.from_pretrained(tmp_path / "out", device="cpu")
    whole = torch.cat([tokens(1, N_PROMPT), tokens(1, SIZE)], dim=1)
    with again.at_block(N_PROMPT), ours.at_block(N_PROMPT):
        assert torch.equal(again(whole), ours(whole))
    written = load_file(tmp_path / "out" / "model.safetensors")
    original = {name: weight for name, weight in theirs.state_dict().items() if name in written}
    assert len(original) == len(written)
    assert all(torch.equal(written[name], weight) for name, weight in original.items())


def test_hooks_see_canvases_that_are_not_reached(gemma: Any) -> None:
    model, run = gemma
    canvases: list[torch.Tensor] = []
    run.replay(model, canvas="free", fwd_hooks=[("denoise.hook_tokens", lambda x, hook: canvases.append(x.clone()))])
    assert torch.equal(torch.stack(canvases), run.canvases[:-1])
