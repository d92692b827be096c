"""A golden checkpoint of each family, with its logits: right ones pass, and each mistake is flagged and named."""

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
    "llama": (LlamaConfig, LlamaForCausalLM, dict(attention_bias=True)),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, dict(tie_word_embeddings=True)),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(head_dim=16)),
}
# Every fault on these; the rest share their code, but for biases and tied heads.
FULLY = ("lit_gpt/gqa/mdm", "lit_gpt/mha/ar", "llada/mha", "dream", "qwen3")
PARTLY = {
    "llama": ("gate and up exchanged", "causal for bidirectional", "readout shifted"),
    "qwen2": ("embedding rows off by one", "rotary interleaved", "query heads permuted"),
}
CHECKPOINTS = (*FULLY, "lit_gpt/mha/mdm", "lit_gpt/gqa/ar", "llada/gqa", *PARTLY)


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
        for _ in range(12):
            after = torch.cat([after, theirs(after).logits[:, -1:].argmax(-1)], dim=1)
    before = after.clone()
    before[:, 5:] = -1
    return dict(tokens=tokens, logits=logits, before=before, after=after)


@pytest.fixture(scope="module")
def case(request, tmp_path_factory):
    """A right model and the file of its reference."""
    made = tmp_path_factory.mktemp("reference")
    if request.param in MODULES:
        tensors, folder = of_hugging_face(request.param, made), made
        model = HookedDiffusionTransformer.from_pretrained(folder, device="cpu")
    else:
        folder = GOLDEN / request.param
        model = HookedDiffusionTransformer.from_pretrained(folder, device="cpu")
        if request.param.startswith("lit_gpt"):
            recorded, steps = load_file(folder / "forward.safetensors"), lit_gpt(folder)
        else:
            run = "maskgit_plus_steps4" if request.param == "dream" else "steps4_block8_cfg0"
            recorded, steps = load_file(folder / "golden.safetensors"), by_steps(folder, run)
        tensors = {**{name: recorded[name] for name in ("tokens", "logits")}, **steps}
    path = made / "reference.file.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return model, Reference.load(path)


@pytest.mark.parametrize("case", CHECKPOINTS, indirect=True)
def test_right_models_pass(case):
    model, reference = case
    report = check_model(model, reference=reference)
    assert report.passed, report.to_text()
    assert {finding.check: finding.outcome for finding in report.findings}["reference"] == "ok"


CASES = [
    *((checkpoint, fault) for checkpoint in FULLY for fault in FAULTS),
    *((family, fault) for family, faults in PARTLY.items() for fault in faults),
]


@pytest.mark.parametrize(("case", "fault"), CASES, indirect=["case"])
def test_each_fault_is_flagged_and_named(case, fault):
    model, reference = case
    if fault == "wrong mask id" and not model.cfg.has_mask:
        fault = "readout shifted"  # a causal model has no [MASK] to mistake
    report = check_model(faulty(model, fault), reference=reference, only=("weights", "reference", "diagnosis"))
    assert not report.passed
    assert {finding.check for finding in report.off} & {"reference", "weights"}
    assert any(FAULTS[fault][1] in cause for cause in report.likely), report.to_text()
