"""Which facts are averaged, on models of each kind: those that the loop writes, and those known on one canvas."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from diffusion_lens.analysis import LoopSettings, average_indirect_effect, average_trajectory_effect, recalled_facts
from diffusion_lens.analysis.causal_tracing.average import LoopRuns
from diffusion_lens.analysis.over_facts.folder import fact_seed
from diffusion_lens.data.toy_facts import load
from diffusion_lens.model.noise import HeadAt

KINDS = ["sdar", "bd3lm", "uniform", "udlm", "sedd-uniform", "llada2", "dream", "radd"]
LENGTH, SEED, STEPS = 20, 3, 4
ASKED = load().facts(trained="d2p", asked="d2p")[:60]
QUICK = dict(samples=1, length=LENGTH, layers=[0], roles=["prompt_last"], noise=0.1)


def tokens_after(fact, model):
    """The prompt's tokens, and the two positions after them."""
    prompt = fact.tokenize(model)[0]
    return torch.tensor([prompt]), [len(prompt), len(prompt) + 1]


def with_answers(model, answers):
    """Three facts with the given tokens as their answers, and a fourth with the answer of the first.

    Args:
        answers: The tokens by fact; those whose text is not read back as these tokens are left out.
    """
    facts = []
    for fact, tokens in answers:
        new = replace(fact, answer=" " + " ".join(model.words(tokens)))
        if new.tokenize(model) == (fact.tokenize(model)[0], tokens):
            facts.append(new)
        if len(facts) == 3:
            break
    wrong = next(fact for fact in facts[1:] if fact.answer != facts[0].answer)
    return [*facts, replace(wrong, answer=facts[0].answer, id="untrue")]


def written(model, fact):
    """What `denoise` writes after this fact's prompt alone."""
    prompt, positions = tokens_after(fact, model)
    run = model.denoise(prompt, length=LENGTH, steps=STEPS, seed=[fact_seed(SEED, fact.id)])
    return run.tokens[0, positions].tolist()


def likeliest(model, fact):
    """The likeliest tokens on the canvas on which both are noise."""
    prompt, positions = tokens_after(fact, model)
    query = replace(fact, answer=ASKED[0].answer).to_query(model, n_masks=LENGTH - prompt.shape[1])
    rows = model.readout.rows(torch.tensor(positions))
    logits = HeadAt.of(model, query.tokens[None, positions]).clean_logits(model(query.tokens[None])[:, rows])
    return logits[0].masked_fill(~model.cfg.writable(torch.arange(logits.shape[-1])), -torch.inf).argmax(-1).tolist()


@pytest.mark.parametrize("name", KINDS)
def test_recalled_is_what_the_loop_writes_fact_by_fact(in_words, name):
    model, loop = in_words(name), LoopSettings(steps=STEPS, seed=SEED)
    facts = with_answers(model, ((fact, written(model, fact)) for fact in ASKED))
    expected = [fact.id for fact in facts[:3]]
    assert written(model, facts[3]) != facts[3].tokenize(model)[1]
    assert recalled_facts(model, facts, loop, length=LENGTH) == expected
    averaged = average_trajectory_effect(model, facts[1:], loop=loop, **QUICK)
    assert averaged.ids == expected[1:]
    assert set(averaged.unknown) == {"untrue"}


@pytest.mark.parametrize("name", KINDS)
def test_known_on_one_canvas_is_the_likeliest_token(in_words, name):
    model = in_words(name)
    with model.at_time(0.6) if model.cfg.time_conditioning else nullcontext():
        facts = with_answers(model, ((fact, likeliest(model, fact)) for fact in ASKED))
        averaged = average_indirect_effect(model, facts, known="one_canvas", **QUICK)
    assert averaged.ids == [fact.id for fact in facts[:3]]
    assert set(averaged.unknown) == {"untrue"}


def test_facts_run_alone_where_a_sampler_gives_a_batch_one_time(in_words):
    """UDLM's gives the network the time of the last step that changed any row."""
    model, loop = in_words("udlm"), LoopSettings(steps=16, sampler="udlm", temperature=0.5, seed=SEED)
    runs = LoopRuns(model, {fact.id: fact.to_query(model, n_masks=6) for fact in ASKED[:6]}, loop)
    for fact in ASKED[:6]:
        prompt, _ = tokens_after(fact, model)
        seed = [fact_seed(SEED, fact.id)]
        alone = model.denoise(prompt, length=prompt.shape[1] + 6, steps=16, sampler="udlm", temperature=0.5, seed=seed)
        assert torch.equal(runs[fact.id].canvases, alone.canvases)
        assert runs[fact.id].record["sigmas"] == alone.record["sigmas"]
    assert loop.facts_together(in_words("uniform").cfg) == 32


def first_proposed(model, fact, steps):
    """The likeliest token at the first position after the prompt in the first step of the loop."""
    prompt, (position, _) = tokens_after(fact, model)
    seen = []
    model.denoise(
        prompt,
        length=LENGTH,
        steps=steps,
        seed=[fact_seed(SEED, fact.id)],
        fwd_hooks=[("denoise.hook_logits", lambda logits, hook: seen.append(logits[0, position].clone()))],
    )
    return [int(seen[0].masked_fill(~model.cfg.writable(torch.arange(len(seen[0]))), -torch.inf).argmax())]


@pytest.mark.parametrize("name", ["sdar", "nemotron-block", "bd3lm", "sedd-uniform"])
def test_known_on_one_canvas_of_a_run_is_what_its_first_step_proposes(in_words, name):
    """Of a seeded block the first token is read in the row before and written alone, and each step has its time."""
    model, steps = in_words(name), 16 if name == "nemotron-block" else STEPS
    facts = with_answers(model, ((fact, first_proposed(model, fact, steps)) for fact in ASKED))
    loop = LoopSettings(steps=steps, seed=SEED)
    averaged = average_trajectory_effect(model, facts, known="one_canvas", first_tokens=1, loop=loop, **QUICK)
    assert averaged.ids == [fact.id for fact in facts[:3]]
    assert set(averaged.unknown) == {"untrue"}
