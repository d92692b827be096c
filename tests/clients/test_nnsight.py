"""What docs/coming_from.md says of nnsight. nnsight rewrites a `with` block, so the blocks are short."""

import re
import runpy
from pathlib import Path
from typing import Any

import nnsight
import pytest
import torch
from nnsight import NNsight

PROMPT, LENGTH, STEPS = "today Yara Plasser was the", 14, 4
POINT = "blocks.1.hook_resid_post"


def sections() -> dict[str, str]:
    """The code of each operation, after that of the page's beginning and that of the part about nnsight."""
    page = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")
    top, *parts = re.split(r"^## ", page, flags=re.M)
    (part,) = (part for part in parts if part.startswith("From nnsight"))
    first, *others = re.split(r"^\*\*(?=[A-Z].*\*\*$)", part, flags=re.M)

    def code(text: str) -> str:
        return "\n".join(re.findall(r"^```py(?:thon)?\n(.*?)^```$", text, re.M | re.S))

    return {other.partition("*")[0]: "\n".join(map(code, (top, first, other))) for other in others}


@pytest.mark.parametrize("section", sections())
def test_both_forms_on_the_page_give_the_same(section: str, tmp_path: Path) -> None:
    code = sections()[section]
    script = tmp_path / "page.py"  # nnsight reads the source of a trace
    script.write_text(code, encoding="utf-8")
    found = runpy.run_path(str(script))
    torch.testing.assert_close(found["theirs"], found["ours"], rtol=1e-4, atol=1e-5)


def test_the_page_compares_eight_operations() -> None:
    assert len(sections()) == 8


def test_a_wrapped_module_has_no_scan(prompts: Any) -> None:
    with pytest.raises(AttributeError, match="scan"):
        NNsight(prompts.model).scan(prompts.tokens)
    assert hasattr(nnsight.LanguageModel, "scan")


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_steps_without_a_forward_pass_are_no_iterations(tiny: Any) -> None:
    traced, n_given = NNsight(tiny), tiny.to_tokens(PROMPT).shape[1]
    expected = tiny.denoise(PROMPT, length=n_given + 5, steps=8)
    with traced.trace(PROMPT, fn=tiny.denoise, length=n_given + 5, steps=8) as tracer:
        indices = nnsight.save([])
        for _ in tracer.iter[: expected.forward_passes]:
            _ = traced.blocks[1].hook_resid_post.output
            indices.append(tiny.blocks[1].hook_resid_post.step.index)
        trajectory = nnsight.save(tracer.result)
    assert torch.equal(trajectory.tokens, expected.tokens)
    assert indices == expected.revealed_at[0, n_given:].unique().tolist()
    assert indices != list(range(len(indices)))


def test_an_output_equals_the_cache(prompts: Any) -> None:
    traced = NNsight(prompts.model)
    with traced.trace(prompts.tokens):
        found = nnsight.save(traced.blocks[1].hook_resid_post.output)
    assert torch.equal(found, prompts.model.run_with_cache(prompts.tokens)[1][POINT])


def test_an_output_that_is_set_acts_as_a_hook(prompts: Any) -> None:
    traced = NNsight(prompts.model)
    with traced.trace(prompts.tokens):
        traced.blocks[1].hook_resid_post.output = traced.blocks[1].hook_resid_post.output * 0.5
        logits = nnsight.save(traced.output)
    expected = prompts.model.run_with_hooks(prompts.tokens, fwd_hooks=[(POINT, lambda x, hook: x * 0.5)])
    assert torch.equal(logits, expected)
    assert not torch.equal(logits, prompts.model(prompts.tokens))


def test_a_gradient_equals_that_of_a_hook(prompts: Any) -> None:
    traced = NNsight(prompts.model)
    with traced.trace(prompts.tokens):
        state = traced.blocks[1].hook_resid_post.output
        logit = traced.output[0, -1, prompts.answer]
        with logit.backward():
            gradient = nnsight.save(state.grad)
    kept = {}
    with prompts.model.hooks(fwd_hooks=[(POINT, lambda x, hook: kept.update(state=x))]):
        logit = prompts.logit(prompts.tokens).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(logit, kept["state"])[0])


def test_the_loop_is_traced_step_by_step(tiny: Any) -> None:
    traced = NNsight(tiny)
    with traced.trace(PROMPT, fn=tiny.denoise, length=LENGTH, steps=STEPS) as tracer:
        states, indices = nnsight.save([]), nnsight.save([])
        for _ in tracer.iter[:STEPS]:
            states.append(traced.blocks[1].hook_resid_post.output)
            indices.append(tiny.blocks[1].hook_resid_post.step.index)
        trajectory = nnsight.save(tracer.result)
    expected, cache = tiny.denoise_with_cache(PROMPT, length=LENGTH, steps=STEPS, names_filter=POINT)
    assert torch.equal(trajectory.tokens, expected.tokens)
    assert indices == list(range(STEPS))
    n_given = tiny.to_tokens(PROMPT).shape[1]
    for step, state in enumerate(states):
        # While no TransformerLens hook asks for all, the AR baseline computes one position in each later step.
        reached = slice(0 if step == 0 else n_given + step - 1, n_given + step)
        positions = slice(None) if tiny.cfg.has_mask else reached
        torch.testing.assert_close(state, cache[step][POINT][:, positions], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_both_branches_of_guidance_are_one_batch_unless_hooked(tiny: Any) -> None:
    traced, rows = NNsight(tiny), []
    for hooks in ([], [(POINT, lambda x, hook: None)]):
        with tiny.hooks(fwd_hooks=hooks):
            with traced.trace(PROMPT, fn=tiny.denoise, length=LENGTH, steps=1, cfg_scale=0.5):
                state = nnsight.save(traced.blocks[1].hook_resid_post.output)
        rows.append(state.shape[0])
    assert rows == [2, 1]


def test_an_intervention_at_a_step_equals_a_hook_at_that_step(prompts: Any) -> None:
    from diffusion_lens.interventions import at_steps

    model = prompts.model
    traced = NNsight(model)
    hook = (POINT, lambda x, hook: None)
    with model.hooks(fwd_hooks=[hook]):  # so that every step computes the whole canvas on both models
        with traced.trace(PROMPT, fn=model.denoise, length=LENGTH, steps=STEPS) as tracer:
            for step in tracer.iter[:STEPS]:
                if step == 1:
                    traced.blocks[1].hook_resid_post.output = traced.blocks[1].hook_resid_post.output * -1
            trajectory = nnsight.save(tracer.result)
    hooks = [(POINT, at_steps(lambda x, hook: -x, [1]))]
    expected = model.denoise(PROMPT, length=LENGTH, steps=STEPS, fwd_hooks=hooks)
    assert torch.equal(trajectory.tokens, expected.tokens)
    assert not torch.equal(trajectory.tokens, model.denoise(PROMPT, length=LENGTH, steps=STEPS).tokens)


@pytest.mark.parametrize("point", ["blocks.1.attn.hook_pattern", "denoise.hook_logits"])
def test_what_is_computed_for_hooks_only_needs_a_hook_that_does_nothing(tiny: Any, point: str) -> None:
    traced = NNsight(tiny)
    envoy = traced.blocks[1].attn.hook_pattern if "attn" in point else traced.loop_hooks.hook_logits
    with pytest.raises(Exception, match=r"hook_pattern|hook_logits"):
        with traced.trace(PROMPT, fn=tiny.denoise, length=LENGTH, steps=1):
            missing = nnsight.save(envoy.output)  # noqa: F841
    with tiny.hooks(fwd_hooks=[(point, lambda x, hook: None)]):
        with traced.trace(PROMPT, fn=tiny.denoise, length=LENGTH, steps=1):
            found = nnsight.save(envoy.output)
    _, cache = tiny.denoise_with_cache(PROMPT, length=LENGTH, steps=1, names_filter=point)
    torch.testing.assert_close(found, cache[0][point])
