"""A session refuses a model whose state its specs do not name, and a prompt stays what it is in the code."""

import pytest
from page_reader import PageFile, ran

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.explorer import Session
from diffusion_lens.interventions import zero_ablate

SPEC = {"prompt": "Gustav Geisser is the", "steps": 2, "answer": " brave", "subject": [0, 2]}


def test_hooks_of_the_model_are_refused():
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm")
    session = Session([model])
    run = session.run(SPEC)
    with model.hooks(fwd_hooks=[("blocks.1.hook_attn_out", zero_ablate())]):
        for ask in (lambda: session.run(SPEC), lambda: session.chunk(run["id"], "lens/0")):
            with pytest.raises(ValueError, match=r"attached to 'tiny-mdm' at blocks\.1\.hook_attn_out"):
                ask()
    assert session.run(SPEC) == run


def test_numbers_of_two_weights_are_not_mixed():
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm")
    session = Session([model])
    run = session.run(SPEC)
    model.blocks[1].mlp.W_out.data.mul_(1.5)
    for ask in (
        lambda: session.run({**SPEC, "seed": 1}),
        lambda: session.chunk(run["id"], "lens/0"),
        lambda: session.chunk(run["id"], "attention/1/0"),
        lambda: session.chunk(run["id"], "trace/mlp/0"),
    ):
        with pytest.raises(ValueError, match="weights of 'tiny-mdm' have changed"):
            ask()
    assert Session([model]).run(SPEC)["text"]


def test_a_prompt_may_contain_the_names_of_a_selection():
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm")
    prompt = "Gustav {name} {step is the"
    run = Session([model]).run({"prompt": prompt, "steps": 1})
    code = run["python"]["run"]
    assert "{name}" not in code
    assert ran(code, model)[0]["trajectory"].text == [run["text"]]


def test_the_code_stops_at_other_weights(tmp_path):
    """A model of one's own has the name of the published one, which the code loads."""
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm")
    model.blocks[1].mlp.W_out.data.mul_(1.5)
    page = PageFile(model.denoise(SPEC["prompt"], steps=1).explore(tmp_path / "page.html").read_text(encoding="utf-8"))
    for run in (Session([model]).run(SPEC), page.run()):
        code = run["python"]["run"]
        assert ran(code, model)[0]["trajectory"].text == [run["text"]]
        with pytest.raises(AssertionError, match="other weights"):
            exec(code, {})
