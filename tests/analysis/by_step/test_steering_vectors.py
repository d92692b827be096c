"""Differences of means equal stacked caches, and their hooks equal interventions written by hand."""

from copy import deepcopy
from functools import cache

import pytest
import torch
from torch.testing import assert_close

from diffusion_lens.analysis import SteeringVectors, difference_of_means
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising.samplers import ReMDM
from diffusion_lens.interventions import acts_by_step, at_steps, by_step, named, steer, while_masked, zero_ablate

NAME, OTHER = "blocks.1.hook_resid_post", "blocks.0.attn.hook_z"
PEOPLE = toy_facts.load().facts(trained="both", asked="p2d")
POSITIONS = ("all", "masked", "unmasked", "predicting", [0, -2])


def chosen_by_hand(model, run, positions):
    """Bool[step batch pos], position by position."""
    canvases, blank = run.canvases[:-1], run.blank
    chosen = torch.zeros(canvases.shape, dtype=torch.bool)
    for step, canvas in enumerate(canvases.tolist()):
        for row, tokens in enumerate(canvas):
            real = [i for i in range(len(tokens)) if run.real[row, i]]
            reached = [i for i in real if tokens[i] != -1]
            masked = [i for i in reached if tokens[i] == blank or (model.cfg.uniform_noise and not run.given[row, i])]
            if positions == "predicting" and model.cfg.is_autoregressive:
                picked = reached[-1:] if len(reached) < len(real) else []
            elif positions == "predicting":
                picked = [max(i - 1, real[0]) for i in masked] if model.cfg.readout == "shifted" else masked
            elif isinstance(positions, list):
                picked = [reached[i] for i in positions if i < len(reached)]
            else:
                picked = {"all": reached, "masked": masked, "unmasked": [i for i in reached if i not in masked]}[
                    positions
                ]
            chosen[step, row, picked] = True
    return chosen


def mean_by_hand(states, chosen):
    """Float[step d], NaN where nothing is chosen."""
    return torch.stack([state[rows].double().mean(0).float() for state, rows in zip(states, chosen, strict=True)])


def two_runs(model, names, prompts=None, **settings):
    """A positive and a negative run with the caches of some hook points; without texts, rows of tokens."""
    prompts = prompts or [model_tokens(model, seed) for seed in (1, 2)]
    settings |= {} if model.cfg.is_autoregressive else {"steps": 4}
    n_new = 7 if model.cfg.has_mask and model.cfg.opens_blocks else 4  # so that every step writes
    pairs = [
        model.denoise_with_cache(prompt, names_filter=names, max_new_tokens=n_new, **settings) for prompt in prompts
    ]
    return [run for run, _ in pairs], [cache for _, cache in pairs]


def model_tokens(model, seed):
    return torch.randint(3, 400, (3 + seed, 5), generator=torch.Generator().manual_seed(seed))


@cache
def two_cached_runs(model):
    return two_runs(model, [NAME, OTHER])


@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_vectors_are_the_difference_of_stacked_caches(several, positions):
    model = several.model
    if positions == "masked" and model.cfg.is_autoregressive:
        with pytest.raises(ValueError, match=r"has no \[MASK\]: 'predicting' selects"):
            difference_of_means(model, *two_cached_runs(model)[0], NAME, positions="masked")
        return
    runs, caches = two_cached_runs(model)
    vectors = difference_of_means(model, *runs, [NAME, OTHER], positions=positions)
    chosen = [chosen_by_hand(model, run, positions) for run in runs]
    for name in (NAME, OTHER):
        means = [mean_by_hand(cache.stack(name), rows) for cache, rows in zip(caches, chosen, strict=True)]
        assert_close(vectors.positive[name], means[0], rtol=1e-4, atol=1e-5)
        assert_close(vectors[name], means[0] - means[1], rtol=1e-4, atol=2e-5)
    assert vectors[OTHER].shape == (runs[0].n_steps, model.cfg.n_heads, model.cfg.d_head)
    assert [vectors.n_positive.tolist(), vectors.n_negative.tolist()] == [
        rows.sum(dim=(1, 2)).tolist() for rows in chosen
    ]


@pytest.mark.parametrize("positions", ["all", "predicting", "unmasked", [1, -1]], ids=str)
def test_padding_of_ragged_rows_is_never_read(small, positions):
    prompts = [["Gustav Geisser is the", "today Tilda Drusser was"], ["Gustav", "people say Tilda is the brave"]]
    runs, caches = two_runs(small, NAME, prompts)
    assert not all(run.real.all() for run in runs)
    vectors = difference_of_means(small, *runs, NAME, positions=positions, steps=[1, -1])
    means = [
        mean_by_hand(cache.stack(NAME), chosen_by_hand(small, run, positions))
        for run, cache in zip(runs, caches, strict=True)
    ]
    assert vectors.steps == (1, 3)
    assert_close(vectors[NAME], (means[0] - means[1])[[1, 3]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_several_runs_are_pooled_also_where_a_sampler_masks_again(small):
    prompts = [["Gustav Geisser is the"], ["Tilda Drusser is the", "Gustav Geisser was the"], ["Gustav is the brave"]]
    runs, caches = two_runs(small, NAME, prompts, sampler=ReMDM("rescale", eta=0.9), seed=1)
    assert any((run.is_masked(run.canvases[1:]) & ~run.is_masked(run.canvases[:-1])).any() for run in runs)
    vectors = difference_of_means(small, runs[:2], runs[2], NAME, positions="masked", steps=[2])
    states, masked = [cache[2, NAME] for cache in caches], [run.is_masked(run.canvases[2]) for run in runs]
    pooled = torch.cat([states[0][masked[0]], states[1][masked[1]]])
    assert_close(vectors.positive[NAME][0], pooled.mean(0), rtol=1e-4, atol=1e-5)
    assert vectors.n_positive.tolist() == [len(pooled)]
    assert_close(vectors.negative[NAME][0], states[2][masked[2]].mean(0), rtol=1e-4, atol=1e-5)


def test_vectors_of_a_model_in_bfloat16_are_float32_and_steer_it(small):
    half = deepcopy(small).to(torch.bfloat16)
    runs, _ = two_runs(half, NAME, [["Gustav Geisser is the"], ["Tilda Drusser is the"]])
    vectors = difference_of_means(half, *runs, NAME)
    assert vectors[NAME].dtype == torch.float32
    steered = runs[0].replay(half, fwd_hooks=vectors.hooks(5.0))
    assert not torch.equal(steered.confidence, runs[0].confidence)
    assert steered.record["hooks"][NAME][0].startswith("forward: by_step(0: steer(direction=#")


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_texts_queries_and_tokens_have_one_vector_without_steps(small):
    texts = ["Gustav Geisser is the", "Tilda is", "today Tilda was the brave"]
    by_text = [small.run_with_cache(text, names_filter=NAME)[1][NAME][0] for text in texts]
    vectors = difference_of_means(small, texts, small.to_tokens(texts[0]), [NAME], positions=-1, batch_size=1)
    expected = torch.stack([states[-1] for states in by_text]).mean(0) - by_text[0][-1]
    assert_close(vectors[NAME], expected, rtol=1e-4, atol=1e-5)
    assert (vectors.steps, vectors.n_positive.item(), vectors.n_negative.item()) == (None, 3, 1)

    queries = [fact.to_query(small, first_tokens=1) for fact in PEOPLE[:12:5]]
    of_facts = difference_of_means(small, queries, texts, NAME, positions="all")
    vectors = difference_of_means(small, queries[:2], queries[2], NAME, positions="answer")
    rows = [
        small.run_with_cache(query.tokens[None], names_filter=NAME)[1][NAME][
            0, small.readout.rows(torch.tensor(query.answer_positions[0]))
        ]
        for query in queries
    ]
    assert_close(vectors[NAME], (rows[0] + rows[1]) / 2 - rows[2], rtol=1e-4, atol=1e-5)
    first, second = of_facts[NAME].tolist(), vectors[NAME].tolist()
    lengths = [sum(x * x for x in vector) ** 0.5 for vector in (first, second)]
    cosine = sum(x * y for x, y in zip(first, second, strict=True)) / (lengths[0] * lengths[1])
    assert of_facts.cosine(vectors)[NAME].item() == pytest.approx(cosine, abs=1e-5)


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_guided_states_are_those_of_the_hooked_conditional_branch(small):
    prompts = [["Gustav Geisser is the"], ["Tilda Drusser is the"]]
    with small.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", named("no MLP at step 1", at_steps(zero_ablate(), 1)))]):
        runs, caches = two_runs(small, NAME, prompts, cfg_scale=0.7)
        vectors = difference_of_means(small, *runs, NAME)
    expected = (caches[0].stack(NAME).mean(2) - caches[1].stack(NAME).mean(2))[:, 0]
    assert_close(vectors[NAME], expected, rtol=1e-4, atol=1e-5)
    assert vectors.record["hooks"] == {"blocks.0.hook_mlp_out": ["forward: no MLP at step 1"]}


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_hooks_add_the_vector_of_the_step(small):
    runs, _ = two_runs(small, NAME, [["Gustav Geisser is the"], ["Tilda Drusser is the"]])
    vectors = difference_of_means(small, *runs, [NAME, "blocks.0.hook_mlp_out"], positions="predicting")

    def same(hooks, by_hand):
        first, second = (runs[1].replay(small, canvas="free", fwd_hooks=each) for each in (hooks, by_hand))
        assert_close(first.confidence, second.confidence)
        assert torch.equal(first.canvases, second.canvases)
        return first

    every = [(name, at_steps(steer(vectors[name][step], 3.0), step)) for name in vectors.names for step in range(4)]
    steered = same(vectors.hooks(3.0), every)
    assert not torch.equal(steered.confidence, runs[1].confidence)
    late = [(NAME, at_steps(steer(vectors[NAME][step], 2.0, [1, 2]), step)) for step in (2, 3)]
    same(vectors.hooks(2.0, steps=[2, -1], positions=[1, 2], names=NAME), late)
    masked = [(NAME, while_masked(at_steps(steer(vectors[NAME][1], 2.0), 1)))]
    same(vectors.hooks(2.0, steps=1, positions="masked", names=[NAME]), masked)
    assert all(acts_by_step(hook) for _, hook in vectors.hooks())

    single = difference_of_means(small, ["Gustav is"], ["Tilda is"], NAME)
    same(single.hooks(steps=0), [(NAME, at_steps(steer(single[NAME]), 0))])
    plain = small.run_with_hooks("Tilda is", fwd_hooks=single.hooks(0.5))
    assert_close(plain, small.run_with_hooks("Tilda is", fwd_hooks=[(NAME, steer(single[NAME], 0.5))]))


def test_hooks_steer_the_rows_that_predict(several):
    """Those from which the vectors were computed, which by hand are other rows where the readout is shifted."""
    model = several.model
    runs, _ = two_runs(model, NAME)
    vectors = difference_of_means(model, *runs, NAME, positions="predicting")
    (hook,), seen = vectors.hooks(4.0, positions="predicting"), []
    store = (NAME, lambda activation, hook: seen.append(activation.clone()))
    for fwd_hooks in ([store], [hook, store]):
        runs[1].replay(model, fwd_hooks=fwd_hooks)
    chosen = chosen_by_hand(model, runs[1], "predicting")
    plain, steered = torch.stack(seen[:4]), torch.stack(seen[4:])
    expected = torch.where(chosen[..., None], 4.0 * vectors[NAME][:, None, None], torch.tensor(0.0))
    assert_close(steered - plain, expected, rtol=1e-3, atol=1e-4)


def test_steering_towards_a_word_makes_the_models_write_it(tiny):
    word, steps = "young", {"steps": 7} if tiny.cfg.has_mask else {}
    young = [fact for fact in PEOPLE if fact.description.startswith(word)][1::5]
    others = [fact for fact in PEOPLE if not fact.description.startswith(word)][1::10]
    positive, negative = (
        tiny.denoise([fact.prompt for fact in facts], max_new_tokens=7, **steps) for facts in (young, others[:8])
    )
    vectors = difference_of_means(tiny, positive, negative, NAME, positions="predicting")
    run = tiny.denoise([fact.prompt for fact in others[-8:]], max_new_tokens=7, **steps)
    assert not any(word in text for text in run.text)
    towards, away = (run.replay(tiny, canvas="free", fwd_hooks=vectors.hooks(scale)) for scale in (2.0, -2.0))
    assert all(word in text for text in towards.text)
    assert not any(word in text for text in away.text)
    written = positive.replay(tiny, canvas="free", fwd_hooks=vectors.hooks(-2.0))
    assert sum(word in text for text in positive.text) == len(young)
    assert sum(word in text for text in written.text) == 0


def test_cosines_and_norms(small):
    runs, _ = two_runs(small, NAME, [["Gustav Geisser is the"], ["Tilda Drusser is the"]])
    vectors = difference_of_means(small, *runs, NAME)
    opposite = difference_of_means(small, *runs[::-1], NAME)
    assert_close(vectors.cosine(opposite)[NAME], -torch.ones(4))
    assert_close(vectors.norm[NAME][1], vectors[NAME][1].norm())
    with pytest.raises(ValueError, match="compare vectors of the same steps"):
        vectors.cosine(difference_of_means(small, *runs, NAME, steps=[0]))
    with pytest.raises(ValueError, match="no hook point in common"):
        vectors.cosine(difference_of_means(small, *runs, OTHER))


def test_saved_vectors_are_read_back(small, tmp_path):
    runs, _ = two_runs(small, NAME, [["Gustav Geisser is the"], ["Tilda Drusser is the"]])
    for vectors in (
        difference_of_means(small, *runs, [NAME, OTHER]),
        difference_of_means(small, ["Gustav is"], ["Tilda is"], NAME),
    ):
        loaded = SteeringVectors.load(vectors.save(tmp_path / "vectors.safetensors"))
        assert all(torch.equal(loaded[name], vectors[name]) for name in vectors.names)
        assert loaded.record == vectors.record
        assert loaded.steps == vectors.steps
        assert repr(loaded) == repr(vectors)
        assert loaded.plot().lines


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_a_step_without_a_selected_position_has_no_vector(small):
    run = small.denoise(["Gustav Geisser is the"], max_new_tokens=4, steps=4)
    finished = run.replay(small, canvas="free", fwd_hooks=[("denoise.hook_reveal", lambda x, hook: ~run.given)])
    assert not finished.is_masked(finished.canvases[1]).any()
    with pytest.warns(UserWarning, match="written by another network"):
        vectors = difference_of_means(small, run, finished, NAME, positions="masked")
    assert vectors[NAME].isnan().all(dim=1).tolist() == [False, True, True, True]
    assert vectors.n_negative.tolist() == [4, 0, 0, 0]
    with pytest.raises(
        ValueError, match=r"at the steps \[1, 2, 3\], where a group has no selected .* give steps=\[0\]"
    ):
        vectors.hooks()
    assert len(vectors.hooks(steps=[0])) == 1


def test_what_does_not_fit_is_refused(small):
    runs, _ = two_runs(small, NAME, [["Gustav Geisser is the"], ["Tilda Drusser is the"]])
    cases = [
        (("Gustav", runs[0], NAME), {}, "both groups need the same kind of input"),
        (([runs[0], "Gustav"], runs[0], NAME), {}, "trajectories cannot be mixed"),
        (("Gustav", [], NAME), {}, "there is no input"),
        (("Gustav", "Tilda", None), {}, "names_filter is required"),
        (("Gustav", "Tilda", "blocks.0.attn.hook_pattern"), {}, r"\[batch head query key\]"),
        (("Gustav", "Tilda", "denoise.hook_logits"), {}, "inside the denoising loop"),
        (("Gustav", "Tilda", NAME), {"steps": 0}, "steps= requires a trajectory"),
        (("Gustav", "Tilda", NAME), {"positions": "answer"}, "needs queries or facts"),
        (("Gustav", "Tilda", NAME), {"positions": "mask"}, "nearest is 'masked'"),
        (("Gustav", "Tilda", NAME), {"positions": 1}, r"positions=\[1\] are outside the shortest row, which has 1 tok"),
        (("Gustav", "Tilda", NAME), {"positions": [0, 0]}, "each once"),
        (("Gustav", "Tilda", NAME), {"positions": "masked"}, "selects no position of the positive inputs"),
        ((*runs, NAME), {"steps": [7]}, r"steps=\[7\]; give numbers from 0 to 3"),
    ]
    for inputs, settings, message in cases:
        with pytest.raises(ValueError, match=message):
            difference_of_means(small, *inputs, **settings)
    with pytest.raises(KeyError, match="nearest"):
        difference_of_means(small, "Gustav", "Tilda", "blocks.1.hook_residual")
    with pytest.raises(TypeError, match=r"positive\[0\]=3 is an int; it must be a text, a Query"):
        difference_of_means(small, [3], "Tilda", NAME)
    longer = small.denoise("Tilda is", max_new_tokens=5, steps=5 if small.cfg.has_mask else None)
    with pytest.raises(ValueError, match="different steps"):
        difference_of_means(small, [runs[0], longer], runs[1], NAME)

    vectors = difference_of_means(small, *runs, NAME, steps=[0, 1])
    with pytest.raises(ValueError, match="was made for runs of 4 steps, and this run has 5"):
        longer.replay(small, fwd_hooks=vectors.hooks())
    for settings, message in (
        ({"steps": [3]}, r"no vectors of the steps \[3\]"),
        ({"positions": "all"}, "it must be 'masked', 'predicting'"),
    ):
        with pytest.raises(ValueError, match=message):
            vectors.hooks(**settings)
    with pytest.raises(KeyError, match="no vector of"):
        vectors.hooks(names=OTHER)


def test_by_step_calls_the_function_of_each_step():
    for hooks, message in (({}, "given no step"), ({4: zero_ablate()}, r"the steps \[4\]")):
        with pytest.raises(ValueError, match=message):
            by_step(hooks, 4)
