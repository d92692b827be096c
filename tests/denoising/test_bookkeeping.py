"""What a run records, asks and refuses at its edges."""

import pytest
import torch
from recorded_runs import PROMPT, RESID, record, same

from diffusion_lens.denoising.samplers import Ancestral, Confidence, ReMDM


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_hooks_and_caches_reach_every_step_even_when_nothing_is_left(either):
    run, cache = either.model.denoise_with_cache(
        PROMPT, names_filter=RESID, length=6, steps=16, sampler=Ancestral(), seed=[1, 2]
    )
    assert (run.canvases[-3] != 512).all()
    assert cache.steps == tuple(range(16))


def test_causal_prompts_are_padded_on_the_left(either):
    prompt, real = torch.tensor([[3, 5, 0, 0]]), torch.tensor([[1, 1, 0, 0]])
    if either.kind == "ar":
        with pytest.raises(ValueError, match="pad its prompts on the left"):
            either.model.denoise(prompt, attention_mask=real, max_new_tokens=4)
        with pytest.raises(ValueError, match="padding between real tokens"):
            either.model(torch.tensor([[3, 5, 0, 7]]), return_type="loss", attention_mask=torch.tensor([[1, 1, 0, 1]]))
        return
    alone = either.model.denoise(prompt[:, :2], max_new_tokens=4, steps=3)
    padded = either.model.denoise(prompt, attention_mask=real, max_new_tokens=4, steps=3)
    assert torch.equal(padded.tokens[:, 4:], alone.tokens[:, 2:])


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_a_remasked_run_branches_by_force_only(either):
    run = either.model.denoise(PROMPT, length=20, steps=20, sampler=ReMDM("rescale", eta=0.6), seed=1, temperature=1.0)
    branch = run.from_step(7)
    same(branch.replay(either.model, canvas="forced"), branch)
    with pytest.raises(ValueError, match="freely from its start"):
        branch.replay(either.model, canvas="free")
    page = run.to_html(folded=False)
    assert page.count(">·<") == int((run.canvases[:, 0] == 512).sum())


def test_a_namesake_of_another_architecture_is_another_model(either):
    from diffusion_lens import HookedDiffusionTransformer

    folder = either.folder.parents[1] / "mha" / either.kind
    other = HookedDiffusionTransformer.from_pretrained(folder / "model.safetensors", config=folder / "lit_config.json")
    assert other.cfg.model_name == either.model.cfg.model_name
    with pytest.raises(ValueError, match="whose architecture differs"):
        record(either).replay(other)


def test_a_replay_checks_its_sampler_and_seeds(either):
    run = record(either)
    with pytest.raises(ValueError, match="3 seeds for 2 rows"):
        run.replay(either.model, canvas="free", seeds=[1, 2, 3])
    if either.kind == "ar":
        with pytest.raises(ValueError, match=r"that fit: left_to_right$"):
            run.replay(either.model, canvas="free", sampler=Confidence())
    else:
        assert run.replay(either.model, canvas="free", sampler="confidence").record["sampler"]["name"] == "confidence"


def test_a_forced_replay_reveals_what_was_revealed_whatever_ranks(either):
    run = record(either)
    ranked = run.replay(either.model, fwd_hooks=[("denoise.hook_confidence", lambda a, hook: a * float("-inf"))])
    assert torch.equal(ranked.revealed_at, run.revealed_at)


def test_runs_of_different_prompts_do_not_part(either):
    other = either.model.denoise(PROMPT + 1, length=12, temperature=0.7, seed=3, steps=6)
    with pytest.raises(ValueError, match="have different prompts"):
        either.model.denoise(PROMPT, length=12, temperature=0.7, seed=3, steps=6).diff(other)


def test_a_predicate_leaves_out_what_never_passes(either):
    _, cache = either.model.denoise_with_cache(PROMPT, lambda name: "blocks.0.attn." in name, length=6, steps=2)
    assert "blocks.0.attn.hook_result" not in cache[0].cache_dict
    assert "blocks.0.attn.hook_pattern" in cache[0].cache_dict
    with pytest.raises(ValueError, match="set_use_attn_result"):
        either.model.denoise_with_cache(PROMPT, "blocks.0.attn.hook_result", length=6, steps=2)


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_the_loops_own_points_belong_to_no_branch(either):
    with pytest.raises(ValueError, match="belong to neither branch"):
        either.model.denoise_with_cache(
            PROMPT, "denoise.hook_logits", branch="unconditional", cfg_scale=1.0, length=6, steps=2
        )
