"""What users give is read, and refused, in the same way by the lens, the analyses by step and those of dictionaries."""

from functools import partial

import pytest
import torch
from refusals import unrefused
from torch.testing import assert_close

from diffusion_lens import Fact
from diffusion_lens.analysis import (
    AttentionSinks,
    LinearProbe,
    activations,
    attention_sinks,
    dictionary_loss,
    difference_of_means,
    fit_translators,
    logit_lens,
    probe_time,
)
from diffusion_lens.analysis.engine.inputs import CleanTexts, ForwardPass, Inputs

NAME = "blocks.1.hook_resid_post"
TEXTS = ["Gustav Geisser is the", "Ada is", "today Tilda Drusser was the brave"]


class Identity:
    def encode(self, x):
        return x

    def decode(self, features):
        return features


def means(model, inputs, **settings):
    return difference_of_means(model, inputs, inputs, NAME, **settings)


def losses(model, inputs, **settings):
    return dictionary_loss(model, inputs, NAME, Identity(), **settings)


def test_steps_hooks_and_trajectories_are_refused_by_one_rule(tiny):
    run = tiny.denoise("Ada is", max_new_tokens=3, **({"steps": 3} if tiny.cfg.has_mask else {}))
    for analyse in (logit_lens, attention_sinks, means):
        call = partial(analyse, tiny)
        cases = [
            ({"inputs": []}, "there is no input"),
            ({"inputs": [run, "Ada"]}, "trajectories cannot be mixed with other inputs"),
            ({"inputs": "Ada", "steps": [0]}, "steps= requires a trajectory of model.denoise"),
            ({"inputs": run, "steps": [3]}, r"steps=\[3\]; give numbers from 0 to 2"),
            ({"inputs": run, "steps": [1, -2]}, r"steps=\[1, -2\] contains duplicates"),
            ({"inputs": run, "steps": []}, r"steps=\[\]"),
            ({"inputs": run.from_step(1), "steps": [0]}, "step 0 is not part of a trajectory that begins at step 1"),
            ({"inputs": torch.tensor([[tiny.cfg.d_vocab]])}, "is not among the"),
        ]
        assert unrefused(call, cases) == []
        assert unrefused(call, [({"inputs": [3]}, r"\[0\]=3 is an int; it must be a text, a Query")], TypeError) == []
    for analyse in (logit_lens, attention_sinks):
        with pytest.raises(ValueError, match="2 trajectories are given; give one"):
            analyse(tiny, [run, run])


def test_clean_texts_are_refused_by_one_rule(tiny, tmp_path):
    masked = tiny.canvas("Ada", 2)[0] if tiny.cfg.has_mask else torch.tensor([[5, tiny.cfg.d_vocab - 1]])
    cases = [
        ([], "there is no text: the list is empty", ValueError),
        (["Ada", 3], r"\[1\]=3 is an int; it must be a text$", TypeError),
        (
            Fact("Ada is the baker", "Ada", " baker").to_query(tiny),
            r"=Query\(.* is a Query; it must be a text",
            TypeError,
        ),
        (["Ada", " ".join(["Ada"] * 999)], "text 1: 9.. positions do not fit", ValueError),
    ]
    if tiny.cfg.has_mask:
        cases.append((masked, r"text 0 contains \[MASK\] or an id that is no token", ValueError))
    collect = partial(activations, names=NAME, out=tmp_path / "a")
    for analyse in (fit_translators, probe_time, collect, losses):
        for given, message, error in cases:
            with pytest.raises(error, match=message):
                analyse(tiny, given)
    assert not (tmp_path / "a").exists()


def test_a_mask_belongs_to_tokens(small, tmp_path):
    tokens, mask = small.tokenize(TEXTS)
    collect = partial(activations, names=NAME, out=tmp_path / "a")
    for analyse in (logit_lens, fit_translators, collect, losses, attention_sinks, probe_time):
        with pytest.raises(ValueError, match="attention_mask= belongs to tokens"):
            analyse(small, TEXTS, attention_mask=mask)
    for analyse in (logit_lens, fit_translators, collect, losses, attention_sinks, means):
        with pytest.raises(ValueError, match="the tokens alone do not show what is padding"):
            analyse(small, tokens)
    with pytest.raises(TypeError, match=r"is a Tensor; it must be a tuple \(a tensor or None, a tensor or None\)"):
        means(small, tokens, attention_mask=mask)
    of_pair = difference_of_means(small, tokens, TEXTS[1], NAME, attention_mask=(mask, None))
    assert_close(of_pair[NAME], difference_of_means(small, TEXTS, TEXTS[1], NAME)[NAME])
    assert of_pair.n_positive == mask.sum()
    of_texts, of_tokens = attention_sinks(small, TEXTS), attention_sinks(small, tokens, attention_mask=mask)
    assert torch.equal(of_texts.received.nan_to_num(), of_tokens.received.nan_to_num())
    if small.cfg.has_mask:
        of_texts, of_tokens = probe_time(small, TEXTS), probe_time(small, tokens, attention_mask=mask)
        assert torch.equal(of_texts.score, of_tokens.score)
    of_texts, of_tokens = (CleanTexts.of(small, *given) for given in ((TEXTS,), (tokens, mask)))
    assert [row.tolist() for row in of_texts.tokens] == [row.tolist() for row in of_tokens.tokens]


def test_facts_and_queries_of_different_lengths_are_read_as_alone(tiny):
    facts = [Fact("Gustav Geisser is the", "Gustav Geisser", " brave"), Fact("Ada is the", "Ada", " baker")]
    queries = [fact.to_query(tiny, n_masks=1 if tiny.cfg.has_mask else None) for fact in facts]
    together, received = logit_lens(tiny, queries), attention_sinks(tiny, queries).received
    for row, query in enumerate(queries):
        alone, n = logit_lens(tiny, query), len(query.tokens)
        n_read = len(alone.positions)
        assert_close(together.entropy[:, row, :n_read], alone.entropy[:, 0], rtol=1e-4, atol=1e-5)
        assert torch.equal(together.targets[row, :n_read], alone.targets[0])
        assert_close(received[..., row, :n], attention_sinks(tiny, query).received[..., 0, :], rtol=1e-4, atol=1e-5)
    of_fact = logit_lens(tiny, facts[0])
    of_query = logit_lens(tiny, Inputs.of(tiny, facts[0]).rows[0].queries[0])
    assert torch.equal(of_fact.entropy.nan_to_num(), of_query.entropy.nan_to_num())


def test_states_are_those_of_a_cache_at_the_step(several):
    model = several.model
    tokens = torch.randint(3, 20, (2, 5), generator=torch.Generator().manual_seed(0))
    names = ["hook_embed", "blocks.0.attn.hook_z", "blocks.1.hook_resid_post", "ln_final.hook_normalized"]
    run, seen = model.denoise(tokens, max_new_tokens=3), []
    (one,) = Inputs.of(model, run).at(2)
    counting = [("hook_embed", lambda activation, hook: seen.append(hook.step.index))]
    for chosen in (names, names[:3], names[:1]):
        states = one.states(chosen, fwd_hooks=counting)
        with model.clock.at(run.state_at(2)):
            _, cache = model.run_with_cache(run.canvases[2].clamp(min=0), names_filter=chosen)
        for name in chosen:
            assert_close(states[name], cache[name])
    assert seen == [2, 2, 2]
    entries = (torch.tensor([1, 0]), torch.tensor([3, 2]))
    assert torch.equal(one.states(names, entries)[names[1]], one.states(names)[names[1]][entries])


@pytest.mark.filterwarnings("ignore:the trajectory .*written by another network")
def test_canvases_share_passes_where_nothing_is_hooked(small, monkeypatch):
    """With the same numbers as one pass for each canvas, which a hook that changes nothing enforces."""
    n_passes, run_pass = [0], ForwardPass.run

    def counted(self, *args):
        n_passes[0] += 1
        run_pass(self, *args)

    def count(analyse):
        n_passes[0] = 0
        return analyse(), n_passes[0]

    monkeypatch.setattr(ForwardPass, "run", counted)
    settings = {"steps": 12} if small.cfg.has_mask else {}
    runs = [small.denoise(prompts, max_new_tokens=3, **settings) for prompts in (TEXTS, TEXTS[:1])]
    distinct = [len(run.canvases[:-1].unique_consecutive(dim=0)) if small.cfg.has_mask else 1 for run in runs]
    n_steps = runs[0].n_steps
    assert max(distinct) < n_steps
    n_sinks, n_means, n_probe = distinct[0], 2 * sum(distinct), sum(distinct)
    for analyse, n_shared, n_alone in (
        (lambda: attention_sinks(small, runs[0]), n_sinks, n_steps),
        (lambda: difference_of_means(small, runs, runs[::-1], NAME, positions=[-1]), n_means, 4 * n_steps),
        (lambda: probe_time(small, runs, NAME, positions="all"), n_probe, 2 * n_steps),
    ):
        shared, n = count(analyse)
        with small.hooks(fwd_hooks=[("hook_embed", lambda activation, hook: None)]):
            alone, n_of_hooked = count(analyse)
        assert (n, n_of_hooked) == (n_shared, n_alone)
        if isinstance(shared, AttentionSinks):
            assert_close(shared.received, alone.received, rtol=1e-4, atol=1e-5, equal_nan=True)
            assert torch.equal(shared.n_queries, alone.n_queries)
        elif isinstance(shared, LinearProbe):
            assert_close(shared.weights[NAME], alone.weights[NAME], rtol=1e-3, atol=1e-4)
            assert_close(shared.score, alone.score, rtol=1e-4, atol=1e-4)
        else:
            assert_close(shared.positive[NAME], alone.positive[NAME], rtol=1e-4, atol=1e-5)
            assert torch.equal(shared.n_positive, alone.n_positive)
