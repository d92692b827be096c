"""Transitions inside the open block: BD3LM's canvases by its recorded draws, its loss, and the laws of rows with times
of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from authors_networks import GOLDEN, authors_network, distinct
from safetensors.torch import load_file

MASK = 65


@pytest.mark.parametrize(
    ("variant", "name", "passes"),
    [
        ("bd3lm", "ancestral", 22),
        ("bd3lm", "ancestral_nucleus", 13),
        ("bd3lm", "first_hitting_nucleus", 15),
        ("bd3lm/b4_sigma", "ancestral_nucleus", 13),
        ("bd3lm/b4_sigma", "first_hitting", 15),
        ("bd3lm/full", "ancestral_nucleus", 10),
        ("bd3lm/full", "first_hitting", 15),
    ],
)
def test_canvases_equal_the_authors(variant: str, name: str, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row opens its next block by itself, where the authors' rows wait for one another: the draws are by block.

    For one row, the passes are the authors' steps that predicted again.
    """
    from diffusion_lens.denoising.sampler import PositionNoise
    from diffusion_lens.denoising.samplers import bd3lm

    case = json.loads((GOLDEN / variant / "noise.json").read_text())[name]
    tensors = load_file(GOLDEN / variant / "noise.safetensors")
    g = {key.split("/")[1]: x for key, x in tensors.items() if key.startswith(f"{name}/")}
    model, size = authors_network(variant), case["block_size"]
    begins = [case["canvas_length_per_step"].index(n) for n in range(size, 17, size)]

    def by_token(self: Any, step: int, positions: torch.Tensor, n: int) -> torch.Tensor:
        block = model.clock.step.block  # of no use where the whole canvas is one block
        steps = [step]
        if block is not None:
            steps = [begins[index] + within for index, within in zip(block.index, block.step, strict=True)]
        drawn = [g["draws"][steps[row], row, pos % size, :n] for row, pos in positions.nonzero().tolist()]
        return torch.stack(drawn).double()

    def chosen_first(self: Any, step: int, positions: torch.Tensor) -> torch.Tensor:
        return (torch.arange(int(positions.sum())) != g["chosen_masked_index"][step]).double()

    monkeypatch.setattr(PositionNoise, "by_token", by_token)
    if case["first_hitting"]:
        monkeypatch.setattr(PositionNoise, "by_position", chosen_first)
        monkeypatch.setattr(PositionNoise, "by_row", lambda self, step: g["time_uniforms"][step, None])
    nucleus = case["nucleus_p"] if case["nucleus_p"] < 1 else None
    sampler = bd3lm(None if case["first_hitting"] else case["num_steps"], case["first_hitting"], nucleus)
    start = torch.full((case["n_samples"], 1), 64)
    run = model.denoise(start, length=16, sampler=sampler, temperature=1.0)
    assert torch.equal(run.tokens, g["x_final"].long())
    assert run.forward_passes == passes
    for row, steps in enumerate(g["x_steps"].long().unbind(dim=1)):
        written = run.canvases[:, row]
        before = torch.full((1, 16), MASK).index_fill(1, torch.tensor([0]), 64)
        assert torch.equal(distinct(written.masked_fill(written < 0, MASK)), distinct(torch.cat([before, steps])))


@pytest.mark.parametrize("variant", ["bd3lm", "bd3lm/b4_sigma", "bd3lm/full"])
def test_loss_equals_the_authors(variant: str) -> None:
    """Each token is masked with probability t, weighted by 1/t, and predicted from clean blocks before its own."""
    from diffusion_lens.model.loss import masked_batch

    g, model = load_file(GOLDEN / variant / "noise.safetensors"), authors_network(variant)
    text, noisy = g["x0"].long(), g["loss.xt"].long()
    real = torch.ones_like(text, dtype=torch.bool)
    real[:, 0] = False  # the authors leave out the first position
    batch = masked_batch(model, text, noisy, g["loss.p"].expand(text.shape), real=real)
    conditioned = (
        {"time": -torch.expm1(-g["sigma"][1].double()).item() / (1 - 1e-3)} if model.cfg.time_conditioning else {}
    )
    with torch.no_grad():
        rows = dict(attention_mask=model.padding.all_real(batch.tokens), logits_at=batch.rows)
        logits = model(batch.tokens, **rows, **batch.beside)
        clean = model.head.clean_logits(model(g["tokens"][1:2].long(), **conditioned)).log_softmax(dim=-1)
    torch.testing.assert_close(batch.loss(logits), g["loss.value"][0], rtol=1e-5, atol=0)
    torch.testing.assert_close(batch.by_position(logits), g["loss.nlls"].abs(), rtol=1e-5, atol=0)
    masked = g["tokens"][1:2] == MASK
    expected = g["log_probs_subs"][masked][:, :MASK]
    torch.testing.assert_close(clean[masked][:, :MASK], expected, rtol=1e-5, atol=1e-5)


def test_a_row_reads_the_largest_noise_of_its_schedule() -> None:
    from diffusion_lens.model.loss import masked_batch
    from diffusion_lens.model.noise import Linear

    model, text = authors_network("bd3lm"), torch.randint(60, (1, 8), generator=torch.Generator().manual_seed(0))
    batch = masked_batch(model, text, torch.full_like(text, MASK), torch.ones(1, 8))
    torch.testing.assert_close(batch.sigma[0, 0].double(), Linear().sigma(torch.ones((), dtype=torch.float64)))


@pytest.fixture
def conditioned(specimen: Any, configs: Any) -> Any:
    """A model by blocks of four whose network is conditioned on the time."""
    return specimen(configs["bd3lm"]).model


@pytest.fixture(params=["block_posterior", "bd3lm", "keeping"])
def sampler(request: pytest.FixtureRequest) -> Any:
    from diffusion_lens.denoising.samplers import BlockPosterior, bd3lm

    return {"block_posterior": BlockPosterior(5), "bd3lm": bd3lm(), "keeping": bd3lm(5, first_hitting=False)}[
        request.param
    ]


def test_rows_with_times_of_their_own_are_independent(conditioned: Any, sampler: Any, tmp_path: Path) -> None:
    from diffusion_lens.denoising.trajectory import Trajectory

    prompts = torch.randint(500, (2, 6), generator=torch.Generator().manual_seed(1))
    prompts[1, 3:] = 512
    settings = dict(sampler=sampler, temperature=1.0)
    run = conditioned.denoise(prompts, length=13, seed=[3, 4], **settings)
    assert ((run.tokens >= 0) & (run.tokens != 512)).all()
    for row, n in enumerate((6, 3)):
        alone = conditioned.denoise(prompts[row : row + 1, :n], length=13, seed=[3 + row], **settings)
        assert torch.equal(run.canvases[: len(alone.canvases), row], alone.canvases[:, 0])
    hooked = conditioned.denoise(
        prompts, length=13, seed=[3, 4], **settings, fwd_hooks=[("hook_embed", lambda x, hook: None)]
    )
    assert torch.equal(hooked.canvases, run.canvases)

    saved = Trajectory.load(run.save(tmp_path / "run.safetensors"))
    assert any(isinstance(saved.state_at(step).sigma, tuple) for step in range(saved.n_steps))
    for canvas in ("forced", "free"):
        again = saved.replay(conditioned, canvas=canvas)
        assert torch.equal(again.canvases, run.canvases)
        torch.testing.assert_close(again.confidence, run.confidence, rtol=1e-4, atol=1e-5)
        assert [again.state_at(step).sigma for step in range(5)] == [run.state_at(step).sigma for step in range(5)]
    for step in range(1, saved.n_steps, 3):  # the first steps of blocks, and steps within them
        branch = saved.from_step(step).replay(conditioned, canvas="free")
        assert torch.equal(branch.canvases, run.canvases[step:])
        assert branch.record["sigmas"][step:] == run.record["sigmas"][step:]
    one = run.row(1).replay(conditioned)
    torch.testing.assert_close(one.confidence[0], run.confidence[1], rtol=1e-4, atol=1e-5)
    twice = run.repeat(2).replay(conditioned)
    torch.testing.assert_close(twice.confidence[3], run.confidence[1], rtol=1e-4, atol=1e-5)


def test_the_time_falls_within_each_block(conditioned: Any, sampler: Any) -> None:
    sigmas: list[float] = []
    blocks: list[int] = []

    def look(x: torch.Tensor, hook: Any) -> None:
        sigmas.append(hook.step.sigma)
        blocks.append(int(hook.step.block.index))

    prompt = torch.tensor([[1, 2]])
    conditioned.denoise(prompt, length=12, sampler=sampler, temperature=1.0, fwd_hooks=[("denoise.hook_tokens", look)])
    for index in range(3):
        within = [sigma for sigma, block in zip(sigmas, blocks, strict=True) if block == index]
        assert within
        assert within == sorted(within, reverse=True)


def test_first_hitting_reveals_one_position_in_each_step(either: Any) -> None:
    """In a model without blocks, the whole canvas is one block."""
    prompt = torch.tensor([[5, 6]])
    if either.kind == "ar":
        with pytest.raises(ValueError, match="'left_to_right'"):
            either.model.denoise(prompt, length=9, sampler="first_hitting")
        return
    run = either.model.denoise(prompt, length=9, sampler="first_hitting", temperature=1.0)
    assert sorted(run.revealed_at[0, 2:].tolist()) == list(range(7))
    run = either.model.denoise(prompt, length=9, sampler="block_posterior", steps=3, temperature=1.0)
    assert run.n_steps == 3
    assert (run.revealed_at[0, 2:] >= 0).all()


def test_settings_that_do_not_fit_are_refused(conditioned: Any) -> None:
    from diffusion_lens.denoising.samplers import BlockPosterior, bd3lm, describe_sampler, sampler_from

    prompt = torch.tensor([[1, 2]])
    for wrong, message in (
        (dict(steps=4, sampler=BlockPosterior(3)), "this canvas takes 9"),
        (dict(steps=2, sampler=BlockPosterior()), "steps=2 for 3 blocks"),
        (dict(steps=3, sampler="first_hitting"), "10 in all: leave steps out"),
        (dict(sampler="posterior"), "that fit: block_posterior, first_hitting, "),
    ):
        with pytest.raises(ValueError, match=message):
            conditioned.denoise(prompt, length=12, **wrong)
    with pytest.raises(ValueError, match="first_hitting=False"):
        bd3lm(5)
    with pytest.raises(ValueError, match="steps_per_block=0"):
        BlockPosterior(0)
    assert conditioned.denoise(prompt, length=12, steps=7, sampler="block_posterior").n_steps == 7
    for kept in (bd3lm(), bd3lm(4, first_hitting=False, nucleus_p=0.9), BlockPosterior()):
        assert sampler_from(json.loads(json.dumps(describe_sampler(kept)))) == kept


def test_nucleus_leaves_out_the_token_that_crosses() -> None:
    from diffusion_lens.denoising.sampler import Proposal

    logits = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]]).log()
    assert Proposal(top_p=0.7).likeliest(logits).tolist() == [[True, True, False], [False, True, False]]
    assert Proposal(top_p=0.7, crosses=False).likeliest(logits).tolist() == [[True, False, False], [False, True, False]]
