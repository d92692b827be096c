"""A golden checkpoint of each family, with its logits: right ones pass, and each mistake is flagged and named."""

import functools
from pathlib import Path

import pytest
import torch
from faults import FAULTS, faulty
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.checks import Reference, check_model

GOLDEN = Path(__file__).parents[1] / "golden"
MODULES = {
    "llama": (LlamaConfig, LlamaForCausalLM, dict(attention_bias=True, mlp_bias=True)),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, dict(tie_word_embeddings=True)),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(head_dim=16)),
}
OF_LIT_GPT = ("lit_gpt/gqa/mdm", "lit_gpt/gqa/ar", "lit_gpt/mha/mdm", "lit_gpt/mha/ar")
CHECKPOINTS = (*OF_LIT_GPT, "llada/mha", "llada/gqa", "dream", *MODULES)
# Where a fault meets code of its own: grouped heads or not, biases, norms of heads, tied heads, [MASK] or none.
CHECKPOINTS_BY_FAULT = {
    "query and key heads swapped": ("lit_gpt/mha/ar", "dream", "qwen3"),
    "query heads permuted": ("llada/mha", "qwen2"),
    "rotary interleaved": ("qwen2", "qwen3"),
    "another rotary base": ("llada/mha",),
    "gate and up exchanged": ("llama",),
    "wrong mask id": ("lit_gpt/gqa/mdm",),
    "readout shifted": ("dream", "llada/mha"),
    "causal for bidirectional": ("llada/mha", "llama"),
    "a layer of another seed": ("qwen2",),
    "embedding rows off by one": ("qwen2",),
    "head rows off by one": ("dream",),
}


def lit_gpt(folder):
    sampled = load_file(folder / "sampling.safetensors")
    if folder.name == "mdm":  # one step, no guidance
        before, after = sampled["case00.trajectory"]
        return dict(before=before, after=after)
    after = sampled["case00.output"]
    before = after.clone()
    before[:, sampled["case00.prompt"].shape[1] :] = -1
    return dict(before=before, after=after)


def by_steps(folder, run):
    sampled = load_file(folder / "trajectories.safetensors")
    steps = sampled[f"{run}/x_steps"]
    before = torch.cat([sampled[f"{run}/x_init"][None], steps[:-1]])
    return dict(before=before.flatten(0, 1), after=steps.flatten(0, 1))


def of_hugging_face(family, folder):
    """A random model of theirs, its logits, and the text that their own greedy generation continues."""
    config, build, more = MODULES[family]
    torch.manual_seed(0)
    settings = dict(
        vocab_size=103, hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        pad_token_id=None, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    theirs = build(config(**settings, **more)).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            drawn = torch.randn(weight.shape)
            if weight.dim() == 1:
                weight.copy_(0.3 * drawn if name.endswith("bias") else 1 + 0.3 * drawn)
            else:
                weight.copy_(drawn * (0.35 if "embed" in name else 1.5 / weight.shape[1] ** 0.5))
        theirs.save_pretrained(folder)
        tokens = torch.randint(103, (3, 17))
        logits = theirs(tokens).logits
        after = tokens[:1, :5]
        for _ in range(5):
            after = torch.cat([after, theirs(after).logits[:, -1:].argmax(-1)], dim=1)
    before = after.clone()
    before[:, 5:] = -1
    return dict(tokens=tokens, logits=logits, before=before, after=after)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """The model and the reference of each checkpoint, made when they are first used."""
    return functools.cache(lambda checkpoint: load_case(checkpoint, tmp_path_factory.mktemp("reference")))


@pytest.fixture
def case(request, cases):
    return cases(request.param)


def load_case(checkpoint, scratch):
    """The model of a checkpoint, and its reference from a file."""
    if checkpoint in MODULES:
        tensors, folder = of_hugging_face(checkpoint, scratch), scratch
    else:
        folder = GOLDEN / checkpoint
        if checkpoint in OF_LIT_GPT:
            recorded, steps = load_file(folder / "forward.safetensors"), lit_gpt(folder)
        else:
            run = "maskgit_plus_steps4" if checkpoint == "dream" else "steps4_block8_cfg0"
            recorded, steps = load_file(folder / "golden.safetensors"), by_steps(folder, run)
        tensors = {**{name: recorded[name] for name in ("tokens", "logits")}, **steps}
    model = HookedDiffusionTransformer.from_pretrained(folder, device="cpu")
    path = scratch / "reference.file.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return model, Reference.load(path)


@pytest.mark.parametrize("case", CHECKPOINTS, indirect=True)
def test_right_models_pass(case):
    model, reference = case
    report = check_model(model, reference=reference)
    assert report.passed, report.to_text()
    assert {finding.check: finding.outcome for finding in report.findings}["reference"] == "ok"


@pytest.mark.parametrize(
    ("case", "fault"),
    [(checkpoint, fault) for fault, checkpoints in CHECKPOINTS_BY_FAULT.items() for checkpoint in checkpoints],
    indirect=["case"],
)
def test_each_fault_is_flagged_and_named(case, fault):
    model, reference = case
    report = check_model(faulty(model, fault), reference=reference, only=("weights", "reference", "diagnosis"))
    assert not report.passed
    assert {finding.check for finding in report.off} & {"reference", "weights"}
    assert any(FAULTS[fault][1] in cause for cause in report.likely), report.to_text()


def test_every_fault_has_a_checkpoint():
    assert {*CHECKPOINTS_BY_FAULT, "a norm left out"} == {*FAULTS}  # the last one has a test of its own


def test_a_norm_left_out_is_named_by_its_weights(cases):
    model, _ = cases("qwen2")
    report = check_model(faulty(model, "a norm left out"), only=("weights",))
    assert any("blocks.1.ln2.weight" in cause for cause in report.likely), report.to_text()
