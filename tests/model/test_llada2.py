"""LLaDA2: numbers of the network and canvases of the sampler, by the authors' code and by a slow plain version."""

import json
from pathlib import Path

import pytest
import torch
from oracles.plain_llada2 import generate, logits
from safetensors.torch import load_file

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.denoising.samplers import llada2
from weight_conversion import export, n_params, open_checkpoint
from weight_conversion.registry import FAMILIES, recognise

GOLDEN = Path(__file__).parents[1] / "golden" / "llada2"
MASK = 133
CLOSE = dict(rtol=1e-5, atol=3e-5)


LOADED = []


@pytest.fixture
def loaded(configs, specimen, tmp_path_factory):
    """The tensors of a random checkpoint under their published names, its config, and the model; built once."""
    if not LOADED:
        model = specimen(configs["llada2"]).model
        file = tmp_path_factory.mktemp("llada2") / "model.safetensors"
        path = export(model.state_dict(), model.cfg.architecture, file)
        loaded = HookedDiffusionTransformer.from_pretrained(path.parent, device="cpu")
        LOADED.extend((load_file(path), configs["llada2"], loaded))
    return LOADED


@pytest.fixture(scope="module")
def golden():
    return HookedDiffusionTransformer.from_pretrained(GOLDEN, block_size=4, mask_token_id=MASK, device="cpu")


def distinct(canvases):
    """The canvases that differ from the one before, with [MASK] in blocks that are not open yet."""
    rows = [[MASK if token < 0 else token for token in row] for row in canvases.tolist()]
    return [row for i, row in enumerate(rows) if i == 0 or row != rows[i - 1]]


def test_golden_activations(golden):
    expected = load_file(GOLDEN / "golden.safetensors")
    found, cache = golden.run_with_cache(expected["tokens"])
    names = {
        "attn_out": "hook_attn_out",
        "mlp_out": "hook_mlp_out",
        "shared_expert_out": "hook_shared_out",
        "resid_post": "hook_resid_post",
        "router_logits": "mlp.hook_router_logits",
    }
    compared = 0
    for key in expected:
        what, _, layer = key.rpartition(".")
        if what in names:
            torch.testing.assert_close(cache[f"blocks.{layer}.{names[what]}"], expected[key], **CLOSE)
            compared += 1
    assert compared == 11
    for layer in (1, 2):
        choice = cache[f"blocks.{layer}.mlp.hook_experts"]
        assert torch.equal(choice, expected[f"router_choice.{layer}"])
        weights = cache[f"blocks.{layer}.mlp.hook_router_weights"].gather(-1, choice)
        torch.testing.assert_close(weights, expected[f"router_weights.{layer}"], **CLOSE)
    torch.testing.assert_close(found, expected["logits"], **CLOSE)


def test_golden_trajectories(golden):
    runs = load_file(GOLDEN / "trajectories.safetensors")
    for name, case in json.loads((GOLDEN / "trajectories.json").read_text()).items():
        sampler = llada2(case["block_length"], case["steps"], case["threshold"])
        run = golden.denoise(runs[f"{name}/prompt"][None], length=case["length"], sampler=sampler)
        assert distinct(run.canvases[:, 0]) == runs[f"{name}/x_steps"].tolist(), name


def test_golden_checkpoint_there_and_back(tmp_path):
    options = {"block_size": 4, "mask_token_id": MASK}
    first = open_checkpoint(GOLDEN, options=options)
    again = export(dict(first.tensors()), first.architecture, tmp_path / "model.safetensors")
    theirs, ours = load_file(GOLDEN / "model.safetensors"), load_file(again)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert open_checkpoint(again).architecture == first.architecture


def test_logits_by_the_description(loaded):
    tensors, config, model = loaded
    tokens = torch.randint(500, (2, 11), generator=torch.Generator().manual_seed(1))
    expected = torch.stack([logits(tensors, config, row, 4) for row in tokens]).float()
    torch.testing.assert_close(model(tokens), expected, **CLOSE)


@pytest.mark.parametrize(("steps", "threshold"), [(4, 0.95), (4, 0.3), (3, 0.5), (1, 0.95)])
def test_every_canvas_by_the_description(loaded, steps, threshold):
    tensors, config, model = loaded
    prompt = [17, 4, 99, 256, 31, 7]
    run = model.denoise(torch.tensor([prompt]), length=14, sampler=llada2(4, steps, threshold), temperature=0.0)
    found = run.canvases[:, 0].masked_fill(run.canvases[:, 0] < 0, config["mask_token_id"])
    assert distinct(found) == generate(tensors, config, prompt, 14, 4, steps, threshold)


def test_the_router_reads_in_float32(loaded):
    """In bfloat16, logits that differ by less than its precision still rank the experts."""
    _, _, model = loaded
    router = model.blocks[2].mlp.router
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    narrow = HookedDiffusionTransformer(model.cfg, tensors=model.state_dict().items()).to(torch.bfloat16)
    found = narrow.blocks[2].mlp.router(x.bfloat16())
    assert found.dtype == torch.float32
    expected = x.bfloat16().double() @ router.weight.bfloat16().double().T
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    _, cache = narrow.run_with_cache(torch.arange(8)[None])
    assert cache["blocks.2.mlp.hook_router_weights"].dtype == torch.float32
    assert cache["blocks.2.hook_mlp_out"].dtype == torch.bfloat16


PUBLISHED = {
    **dict(model_type="llada2_moe", hidden_size=2048, num_hidden_layers=20, intermediate_size=5120),
    **dict(moe_intermediate_size=512, num_experts=256, num_experts_per_tok=8, num_shared_experts=1),
    **dict(first_k_dense_replace=1, n_group=8, topk_group=4, routed_scaling_factor=2.5, score_function="sigmoid"),
    **dict(num_attention_heads=16, num_key_value_heads=4, head_dim=128, partial_rotary_factor=0.5, rotary_dim=64),
    **dict(rope_theta=600000, rope_scaling=None, rms_norm_eps=1e-6, vocab_size=157184, pad_token_id=156892),
    **dict(max_position_embeddings=32768, tie_word_embeddings=False, use_bias=False, use_qkv_bias=False),
    **dict(use_qk_norm=True, use_rmsnorm=True, router_dtype="fp32", norm_topk_prob=True, hidden_act="silu"),
    **dict(moe_router_enable_expert_bias=True, norm_head=False, norm_softmax=False, use_sliding_window=False),
    **dict(embedding_dropout=0.0, output_dropout=0.0, max_window_layers=28, output_router_logits=False),
}


def test_a_published_config_is_read_with_what_it_leaves_out():
    family = recognise(PUBLISHED, {}, "inclusionAI/LLaDA2.0-mini")
    architecture = family.read_architecture({**PUBLISHED, "block_size": 32, "mask_token_id": 156895}, {})
    assert n_params(architecture) / 1e9 == pytest.approx(16.26, abs=0.005)
    assert n_params(architecture, active=True) / 1e9 == pytest.approx(1.4, abs=0.05)
    assert (architecture.attention_dir, architecture.causal_block, architecture.rotary_dim) == ("block_causal", 32, 64)
    assert architecture.experts is not None
    assert architecture.experts.layers == (False,) + (True,) * 19
    written = family.write_config(architecture)
    assert family.read_architecture(written, {}) == architecture


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"score_function": "softmax"}, "score_function='softmax'"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"router_dtype": "bf16"}, "router_dtype='bf16'"),
        ({"use_bias": True}, "use_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"rotary_dim": 128}, "rotary_dim=128 .* contradicts"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace=-1"),
        ({"num_shared_experts": 1.5}, "num_shared_experts=1.5"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is too large"),
        ({"topk_group": 9}, "9 of 8 equal groups"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ({"block_size": None}, "block_size="),
        ({"mask_token_id": None}, "mask_token_id is None in the llada2 config"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_the_network_does_not_compute_is_refused(change, culprit):
    config = {**PUBLISHED, "block_size": 32, "mask_token_id": 156895, **change}
    with pytest.raises(ValueError, match=culprit):
        FAMILIES["llada2"].read_architecture(config, {})


def test_shared_experts_are_one_mlp_of_their_joint_width(configs):
    config = {**configs["llada2"], "num_shared_experts": 2}
    experts = FAMILIES["llada2"].read_architecture(config, {}).experts
    assert experts is not None
    assert experts.d_shared == 2 * experts.d_expert
    experts = FAMILIES["llada2"].read_architecture({**config, "num_shared_experts": None}, {}).experts
    assert experts is not None
    assert experts.d_shared is None


def test_the_fused_projection_has_all_queries_first(loaded, tmp_path):
    tensors, _, model = loaded
    rows = tensors["model.layers.1.attention.query_key_value.weight"].split([48, 24, 24])
    ours = model.state_dict()
    for part, expected in zip(("q", "k", "v"), rows, strict=True):
        assert torch.equal(ours[f"blocks.1.attn.{part}.weight"], expected)
    again = export(ours, model.cfg.architecture, tmp_path / "model.safetensors")
    assert open_checkpoint(again).architecture == model.cfg.architecture
