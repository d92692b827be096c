"""Laws of runs whose canvases hooks rewrite, for every sampler: masked again, forced to the answer, or the prompt."""

import pytest
import torch

from diffusion_lens.analysis import logit_lens, temporal_effect, trace_trajectory
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising.samplers import (
    Ancestral,
    BlockConfidence,
    BlockPosterior,
    Blocks,
    Confidence,
    FirstHitting,
    LeftToRight,
    Posterior,
    Proposal,
    ReMDM,
    Score,
    UniformPosterior,
)
from diffusion_lens.interventions import named

FACT = toy_facts.load().facts(trained="p2d", asked="p2d")[1]
OTHER = 7  # the token that a hook writes over one of the prompt
FEW = dict(noise=0.5, samples=2, layers=[0], positions=[1])
CASES = [
    # name of a bundled model, sampler, and the way to rewrite
    ("tiny-mdm", Confidence(), "remask"),
    ("tiny-mdm", Confidence(), "force"),
    ("tiny-mdm", Ancestral(), "prompt"),
    ("tiny-mdm", ReMDM("rescale", eta=0.6), "force"),
    ("tiny-mdm", ReMDM("conf"), "remask"),
    ("tiny-mdm", Blocks(), "remask"),
    ("tiny-mdm", Posterior(proposal=Proposal(writes_mask=True)), "force"),
    ("tiny-ar", LeftToRight(), "force"),
    ("tiny-block", BlockConfidence(), "prompt"),
    ("tiny-block", BlockPosterior(), "remask"),
    ("tiny-block", FirstHitting(), "force"),
    ("tiny-uniform", UniformPosterior(), "remask"),
    ("tiny-uniform", Score(), "prompt"),
]


class Rewritten:
    """A run under a hook that rewrites the canvases of about half of its steps, and what was seen of each step."""

    def __init__(self, model, sampler, kind, seed):
        self.model, self.kind, self.seed = model, kind, seed
        if model.cfg.is_autoregressive:
            self.query, settings = FACT.to_query(model, first_tokens=4), dict(max_new_tokens=4)
        else:
            self.query = FACT.to_query(model, n_masks=14 - model.to_tokens(FACT.prompt).shape[1])
            settings = dict(length=14, steps=None if isinstance(sampler, FirstHitting) else 6)
        self.places, self.answer = list(self.query.answer_positions), torch.tensor(self.query.answer_tokens)
        self.written = {}  # the canvases as the steps before left them
        self.hook = ("denoise.hook_tokens", named(f"{kind} {seed}", self.edit))
        self.prompt = self.query.tokens[None, : self.places[0]]
        self.run, self.read = model.denoise_with_cache(
            self.prompt,
            "hook_embed",
            sampler=sampler,
            temperature=1.0,
            seed=seed,
            fwd_hooks=[self.hook],
            **settings,
        )

    def edit(self, tokens, hook):
        self.written.setdefault(hook.step.index, tokens.clone())
        generator = torch.Generator().manual_seed(100 * self.seed + hook.step.index)
        acts, place = torch.randint(2, (1,), generator=generator), torch.randint(4, (1,), generator=generator)
        tokens, blank = tokens.clone(), None if self.model.cfg.uniform_noise else self.model.cfg.blank
        if not acts:
            return tokens
        if self.kind == "remask":
            later = tokens[:, self.places[place] :]
            later[later >= 0] = OTHER if blank is None else blank
        elif self.kind == "force":
            tokens[:, self.places] = self.answer
        else:
            tokens[:, 1] = OTHER
        return tokens

    @property
    def unmasked_first(self):
        """t1: the step that reads an answer token which a hook wrote in it, or leaves one that was open."""
        run = self.run
        for step in range(run.n_steps):
            before = run.is_masked(self.written[step])[0, self.places]
            now = run.is_masked(run.canvases[step])[0, self.places]
            after = run.is_masked(self.written.get(step + 1, run.tokens))[0, self.places]
            if bool((before & ~now).any()) or bool((now & ~after).any()):
                return step
        return None


@pytest.mark.parametrize(
    ("tiny", "sampler", "kind"), CASES, indirect=["tiny"], ids=lambda each: getattr(each, "name", each)
)
def test_laws_of_a_rewritten_run(tiny, sampler, kind):
    each = Rewritten(tiny, sampler, kind, seed=len(kind))
    run = each.run

    # 1. A canvas is the one that its step read, and the prompt is what was given.
    for step in each.read:
        reached = run.canvases[step, 0] >= 0
        embedded = tiny.W_E[run.canvases[step, 0, reached]]
        torch.testing.assert_close(each.read[step, "hook_embed"][0, reached], embedded, rtol=0, atol=1e-6)
    assert torch.equal(run.prompt[run.given], each.prompt[0])

    # 2. By force it is the same run without the hook, also from the middle.
    for part in (run, run.from_step(2)):
        forced = part.replay(tiny)
        assert torch.equal(forced.canvases, part.canvases)
        assert torch.equal(forced.revealed_at, part.revealed_at)
        assert torch.equal(forced.prompt, run.prompt)
        torch.testing.assert_close(forced.confidence, part.confidence, rtol=1e-5, atol=1e-6)

    # 3. The lens reads the probabilities that the loop recorded.
    lens = logit_lens(tiny, run, layers=[-1])
    for step in range(run.n_steps):
        read = (run.revealed_at == step) & run.is_open(run.canvases[step])
        if run.uniform_noise:
            read = ~run.given & (step == run.n_steps - 1)
        of_lens = torch.full_like(run.confidence, torch.nan)
        of_lens[:, lens.positions] = lens.at_step(step).target_probabilities[0, :, :, 0].float()
        torch.testing.assert_close(of_lens[read], run.confidence[read], rtol=0, atol=1e-5)

    # 4. Every step up to the last that the answer is open can be traced; tokens that are there count 1 or 0.
    if run.is_masked(run.tokens[0, each.places]).all():
        with pytest.raises(ValueError, match="reveals none of the answer positions"):
            trace_trajectory(tiny, each.query, trajectory=run, **FEW)
        return
    trace = trace_trajectory(tiny, each.query, trajectory=run, **FEW)
    for index, step in enumerate(trace.steps):
        there = ~run.is_open(run.canvases[step])[0, each.places]
        right = (run.canvases[step, 0, each.places] == each.answer).float()
        assert torch.equal(trace.clean_token_scores[index][there], right[there])
        assert torch.equal(trace.corrupted_token_scores[index][there], right[there])
        if there.all():
            assert (trace.scores[index] == right.prod()).all()
    if not run.uniform_noise and kind != "remask":
        assert trace.steps[0] == each.unmasked_first
    if kind == "prompt":
        assert [words[1] for words in trace.str_canvases] == [run.str_canvases()[step][1] for step in trace.steps]

    # 5. Without noise, free runs are the run itself, and so is every branch that the sampler can take up.
    still = FEW | dict(noise=0.0, samples=1)
    with tiny.hooks(fwd_hooks=[each.hook]):
        free = trace_trajectory(tiny, each.query, trajectory=run, canvas="free", **still)
        known = [step for step in range(trace.steps[-1] + 1) if not run.from_step(step).lacks_confidence(sampler)]
        ended = temporal_effect(tiny, each.query, trajectory=run, steps=known, **still).token_scores[:, 0, 0]
    torch.testing.assert_close(free.corrupted_token_scores, free.clean_token_scores, rtol=0, atol=1e-6)
    right = (run.tokens[0, each.places] == each.answer).float()
    assert torch.equal(ended, right.expand_as(ended))
