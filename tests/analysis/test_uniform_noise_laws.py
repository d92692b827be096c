"""Analyses where nothing is masked: the answer is p(x_0) at noisy positions, and texts are noised as in training."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_networks import small_architecture, with_time_conditioning

KINDS = ["logits", "log_scores"]


def model_of(head: str) -> Any:
    """A small random model under uniform noise; with log scores it is conditioned on the time."""
    from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
    from weight_conversion import NoiseSchedule, tensor_shapes

    told = with_time_conditioning() if head == "log_scores" else {}
    architecture = small_architecture(n_layers=3, head=head, schedule=NoiseSchedule(), **told)
    # Weights under which attention and conditioning are felt, and scores are not far from 1, where nearly every
    # probability would be 0.
    generator, tensors = torch.Generator().manual_seed(0), []
    for name, shape in tensor_shapes(architecture).items():
        drawn = torch.randn(shape, generator=generator)
        scale = 0.3 if len(shape) == 1 or name == "unembed.weight" else 1.5 / shape[-1] ** 0.5
        tensors.append((name, scale * drawn + (len(shape) == 1 and not name.endswith(".bias"))))
    return HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"), tensors=tensors)


@pytest.fixture(scope="module", params=KINDS)
def timed(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A model, at a time if its network is conditioned on one."""
    model = model_of(request.param)
    if not model.cfg.time_conditioning:
        yield model
        return
    with model.at_time(0.6):
        yield model


def query_of(*, tokens: tuple[int, ...] = (5, 6, 7, 8, 9, 10, 11, 12), answer: tuple[int, ...] = (11, 12)) -> Any:
    """Positions 6 and 7 are noise, of which the clean tokens are asked."""
    from diffusion_lens import Query

    return Query(torch.tensor(tokens), (1, 3), (6, 7), answer)


def p_of_clean(model: Any, query: Any) -> torch.Tensor:
    """p(x_0) at the answer's positions, written out: of log scores, the step that removes all noise."""
    positions = list(query.answer_positions)
    output, present = model(query.tokens[None])[0, positions].double(), query.tokens[positions]
    if model.cfg.head == "logits":
        p = output.softmax(dim=-1)
    else:
        n, kept = output.shape[-1], 1 - (1 - 1e-3) * 0.6
        scores = output.scatter(1, present[:, None], 0.0).exp()
        p = (scores - (1 - kept) / n * scores.sum(dim=1, keepdim=True)) / kept
        move = torch.full_like(p, (1 - kept) / n).scatter(1, present[:, None], kept + (1 - kept) / n)
        p = (p * move).clamp(min=0)
        p = p / p.sum(dim=1, keepdim=True)
    return p


def p_of_answer(model: Any, query: Any) -> torch.Tensor:
    """p(x_0 = answer) of each token."""
    return p_of_clean(model, query)[[0, 1], list(query.answer_tokens)]


def known_query(model: Any) -> Any:
    """The query whose answer is the likeliest."""
    return query_of(answer=tuple(p_of_clean(model, query_of()).argmax(dim=-1).tolist()))


def test_p_of_the_answer_is_that_of_the_clean_tokens(timed: Any) -> None:
    from diffusion_lens.analysis import causal_trace

    trace = causal_trace(timed, query_of(), noise=0.5, samples=2, layers=[0], positions=[0])
    expected = p_of_answer(timed, query_of())
    torch.testing.assert_close(trace.clean_token_scores.double(), expected, rtol=1e-4, atol=1e-7)
    assert causal_trace(timed, known_query(timed), noise=0.1, layers=[0], positions=[0]).known


def test_an_answer_state_patched_after_the_last_block_is_the_clean_run(timed: Any) -> None:
    from diffusion_lens import Query
    from diffusion_lens.analysis import answer_probability, patch_grid

    answer = known_query(timed).answer_tokens[:1]
    clean = Query(torch.tensor([5, 6, 7, 8, 9, 10, 11, 12]), (1, 3), (6,), answer)
    other = Query(torch.tensor([5, 26, 27, 8, 9, 10, 11, 12]), (1, 3), (6,), answer)
    grid = patch_grid(timed, clean, other, answer_probability(timed, clean), "resid_post")
    torch.testing.assert_close(grid.scores[-1, 6], grid.clean.to(grid.scores.dtype), rtol=1e-4, atol=1e-8)
    assert not torch.allclose(grid.clean, grid.corrupted, rtol=1e-3)


def test_forced_replay_reads_the_recorded_canvases_at_their_times(timed: Any) -> None:
    from diffusion_lens.analysis import trace_trajectory
    from diffusion_lens.model.noise import HeadAt

    query = query_of()
    run = timed.denoise(query.tokens[None, :6], length=8, steps=3, temperature=1.0)
    trace = trace_trajectory(timed, query, trajectory=run, noise=0.5, samples=2, layers=[0], positions=[0])
    assert trace.steps == [0, 1, 2]
    for i, step in enumerate(trace.steps):
        state = run.state_at(step)
        with timed.clock.at(state):
            positions = list(query.answer_positions)
            logits = HeadAt.of(timed, state.tokens[:, positions]).clean_logits(timed(state.tokens)[:, positions])
        p = logits[0].softmax(dim=-1)[[0, 1], list(query.answer_tokens)]
        torch.testing.assert_close(trace.clean_token_scores[i], p, rtol=1e-4, atol=1e-8)


def test_restored_step_of_the_loop_can_be_continued(timed: Any) -> None:
    from diffusion_lens.analysis import temporal_effect

    query = query_of()
    run = timed.denoise(query.tokens[None, :6], length=8, steps=3, temperature=0.0)
    query = query_of(answer=tuple(run.tokens[0, 6:].tolist()))
    effect = temporal_effect(timed, query, trajectory=run, noise=0.0, samples=1, layers=[1], positions=[2])
    assert bool((effect.scores == 1).all())


def test_lens_of_the_last_layer_is_p_of_the_clean_tokens(timed: Any) -> None:
    from diffusion_lens.analysis import logit_lens

    lens = logit_lens(timed, query_of(), positions=[6, 7], layers=[3])
    expected = p_of_answer(timed, query_of())
    torch.testing.assert_close(lens.target_probabilities[0, 0, :, 0].double(), expected, rtol=1e-4, atol=1e-7)


def test_page_with_a_lens_and_a_trace_can_be_written(timed: Any, tmp_path: Any) -> None:
    from diffusion_lens.analysis import logit_lens, trace_trajectory

    query = query_of()
    run = timed.denoise(query.tokens[None, :6], length=8, steps=3)
    trace = trace_trajectory(timed, query, trajectory=run, noise=0.5, samples=1)
    assert run.explore(tmp_path / "run.html", lens=logit_lens(timed, run), trace=trace).exists()


def test_score_head_says_that_it_needs_a_time() -> None:
    from diffusion_lens.analysis import answer_probability, causal_trace

    model = model_of("log_scores")
    with pytest.raises(ValueError, match=r"conditioned on the time of its canvas.*model.at_time\(t\)"):
        causal_trace(model, query_of(), noise=0.5)
    metric = answer_probability(model, query_of())
    with pytest.raises(ValueError, match=r"depend on the canvas and on its time.*at_time"):
        metric(torch.zeros(1, 2, 40))


def test_a_metric_of_the_user_reads_logits_of_the_clean_tokens(timed: Any) -> None:
    from diffusion_lens import Query
    from diffusion_lens.analysis import node_attribution, patch_grid

    clean = query_of()
    other = Query(torch.tensor([5, 26, 27, 8, 9, 10, 11, 12]), (1, 3), (6, 7), (11, 12))

    def p_of_12(logits: torch.Tensor) -> torch.Tensor:
        return logits[0, -1].softmax(dim=-1)[12]

    expected = [p_of_clean(timed, query)[1, 12] for query in (clean, other)]
    for rows in (None, [7]):
        grid = patch_grid(timed, clean, other, p_of_12, "resid_post", logits_at=rows)
        torch.testing.assert_close(torch.stack([grid.clean, grid.corrupted]).double(), torch.stack(expected))
        torch.testing.assert_close(grid.scores[-1, 7].double(), expected[0], rtol=1e-4, atol=1e-8)
    estimate = patch_grid(timed, clean, other, p_of_12, "resid_post", method="attribution")
    torch.testing.assert_close(estimate.corrupted, grid.corrupted)
    assert node_attribution(timed, clean.tokens[None], other.tokens[None], p_of_12).scores.abs().max() > 0


def test_the_second_moment_is_that_of_noisy_texts() -> None:
    """Noised as in training: at a time of its own, each token is replaced by one drawn from all 40."""
    from diffusion_lens.analysis import second_moment
    from diffusion_lens.settings import own_seed

    model, corpus, keys = model_of("logits"), [torch.arange(3, 15), torch.arange(20, 29)], []
    moment = second_moment(model, corpus, 1, seed=20)
    for i, text in enumerate(corpus):
        generator = torch.Generator().manual_seed(own_seed(20, i))
        t = (1 - 1e-3) * torch.rand((), generator=generator) % 1 + 1e-3
        is_noise = torch.rand((1, len(text)), generator=generator)[0] < (1 - 1e-3) * t
        noisy = torch.where(is_noise, torch.randint(40, (1, len(text)), generator=generator)[0], text)
        _, cache = model.run_with_cache(noisy[None], names_filter="blocks.1.mlp.hook_post")
        keys.append(cache["blocks.1.mlp.hook_post"][0].double())
    together = torch.cat(keys)
    torch.testing.assert_close(moment.matrix, together.T @ together / 21, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("head", KINDS)
def test_the_time_is_probed_on_noisy_texts_at_all_positions(head: str) -> None:
    from diffusion_lens.analysis import probe_time

    texts = torch.randint(40, (10, 12), generator=torch.Generator().manual_seed(0))
    probe = probe_time(model_of(head), texts, "blocks.1.hook_resid_post", samples=4)
    assert sum(probe.record["n_rows"].values()) == 10 * 12 * 4
    assert probe.score.isfinite().all()


def test_no_embedding_hides_a_token(timed: Any) -> None:
    from diffusion_lens.interventions import mask_tokens

    with pytest.raises(ValueError, match=r"has no \[MASK\]; corrupt with add_noise, zero_ablate or swap"):
        mask_tokens(timed)


def test_a_fact_of_the_bundled_model_is_traced_and_rewritten() -> None:
    """The subject's last token carries it early, the noisy position that is read late; after the edit the loop writes
    the new object."""
    from dataclasses import replace

    from diffusion_lens import HookedDiffusionTransformer
    from diffusion_lens.analysis import RankOneEdit, causal_trace, compute_key, noise_scale, optimize_value
    from diffusion_lens.data import toy_facts

    model = HookedDiffusionTransformer.from_pretrained("tiny-uniform", device="cpu")
    facts = [fact for fact in toy_facts.load(1).facts("both", "p2d") if fact.id.endswith("-held-out-0")]
    fact, other = facts[0], facts[35]
    n_prompt = len(model.encode(fact.prompt))
    query = fact.to_query(model, n_masks=14 - n_prompt, first_tokens=1)
    trace = causal_trace(model, query, noise=noise_scale(model, [query]), samples=4)
    assert trace.known
    assert trace.total_effect > 0.5
    subject, read = query.subject[1] - 1, query.answer_positions[0]
    assert trace.indirect_effect[:, 0].argmax() == subject
    assert trace.indirect_effect[:, -1].argmax() == read

    rewritten = replace(fact, answer=other.answer)
    query = rewritten.to_query(model, n_masks=14 - n_prompt)
    value = optimize_value(model, query, 0)
    assert value.losses[-1, 1] < 0.1 * value.losses[0, 1]
    with RankOneEdit(model, 0, compute_key(model, query, 0), value):
        mlp = model.blocks[0].mlp
        torch.testing.assert_close(mlp.W_out.T @ value.key + mlp.b_out, value.vector, rtol=1e-4, atol=1e-4)
        assert model.denoise(fact.prompt, length=14, steps=12).completion == [other.answer.strip()]
    assert model.denoise(fact.prompt, length=14, steps=12).completion == [fact.answer.strip()]


def test_averages_and_recall_are_those_of_single_facts() -> None:
    from diffusion_lens import HookedDiffusionTransformer
    from diffusion_lens.analysis import average_indirect_effect
    from diffusion_lens.data import toy_facts
    from diffusion_lens.evaluation import recall_by_steps

    model = HookedDiffusionTransformer.from_pretrained("tiny-uniform", device="cpu")
    facts = [fact for fact in toy_facts.load(1).facts("both", "p2d") if fact.id.endswith("-held-out-0")][:20:10]
    traced = dict(noise=0.5, samples=1, known="all", roles=["subject_last"], first_tokens=None)
    result = average_indirect_effect(model, facts, **traced)
    for clean, fact in zip(result.clean.tolist(), facts, strict=True):
        query = fact.to_query(model, n_masks=14 - len(model.encode(fact.prompt)))
        positions = list(query.answer_positions)
        p = model(query.tokens[None])[0, positions].softmax(dim=-1)
        assert clean == pytest.approx(p[range(len(positions)), list(query.answer_tokens)].prod().item(), rel=1e-3)
    recall = recall_by_steps(model, facts, [8], length=14)
    written = [model.denoise(fact.prompt, length=14, steps=8).text[0] for fact in facts]
    found = [fact.answer in text for fact, text in zip(facts, written, strict=True)]
    assert recall.contained[:, 0].bool().tolist() == found
