"""Diffusion transformers equal the authors' code, with time conditioning, folded into the weights, or without any."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from authors_networks import authors_network
from safetensors.torch import load_file
from torch.testing import assert_close

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from diffusion_lens.analysis.rome.edit import RankOneEdit
from diffusion_lens.analysis.rome.keys import compute_key
from diffusion_lens.analysis.rome.values import optimize_value
from diffusion_lens.facts.fact import Query
from diffusion_lens.hooks.step import StepState
from diffusion_lens.model.transformer import normalized
from diffusion_lens.model.weights import fold_norms
from diffusion_lens.records.results import provenance
from weight_conversion import export, open_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = ("mdlm", "bd3lm", "bd3lm/b4_sigma", "bd3lm/full", "udlm", "duo", "sedd", "sedd_uniform", "radd")
TOLD = ("mdlm", "bd3lm/b4_sigma", "udlm", "duo", "sedd", "sedd_uniform")
# Wrong activations (GELU without tanh) move the logits by 5e-4.
CLOSE = dict(rtol=1e-5, atol=3e-5)


class Authors:
    """A small checkpoint with the numbers of the authors' own code."""

    def __init__(self, name):
        self.folder = GOLDEN / name
        self.numbers = load_file(self.folder / "forward.safetensors")
        self.model = authors_network(name)
        self.tokens = self.numbers["tokens"]
        self.logits = self.numbers["raw_logits" if "raw_logits" in self.numbers else "logits"]
        conditioned = self.model.cfg.time_conditioning
        self.time = {"time": -torch.expm1(-self.numbers["sigma"].double()) / (1 - 1e-3)} if conditioned else {}


BUILT = {}


def built(name):
    if name not in BUILT:
        BUILT[name] = Authors(name)
    return BUILT[name]


@pytest.fixture(params=FAMILIES)
def authors(request):
    return built(request.param)


@pytest.fixture(params=TOLD)
def conditioned(request):
    return built(request.param)


def test_logits_and_what_is_added_to_the_stream_are_theirs(authors):
    logits, cache = authors.model.run_with_cache(authors.tokens, **authors.time)
    assert_close(logits, authors.logits, **CLOSE)
    before = authors.numbers["resid_pre.0"]
    for layer in range(authors.model.cfg.n_layers):
        middle, after = (authors.numbers[f"resid_{name}.{layer}"] for name in ("mid", "post"))
        assert_close(cache["attn_out", layer], middle - before, **CLOSE)
        assert_close(cache["mlp_out", layer], after - middle, **CLOSE)
        assert_close(cache["resid_post", layer], after, **CLOSE)
        before = after
    if authors.time:
        assert_close(cache["hook_time"], authors.numbers["cond"], **CLOSE)


@pytest.mark.parametrize("name", ["udlm", "duo", "sedd_uniform"])
def test_gates_multiply_the_outputs_of_attention_and_mlp(name):
    authors = built(name)
    _, cache = authors.model.run_with_cache(authors.tokens, **authors.time)
    for layer in range(authors.model.cfg.n_layers):
        six = cache[f"blocks.{layer}.hook_modulation"]
        assert_close(cache["attn_out", layer], authors.numbers[f"attn_out.{layer}"] * six[:, 2, None], **CLOSE)
        assert_close(cache["mlp_out", layer], authors.numbers[f"mlp_out.{layer}"] * six[:, 5, None], **CLOSE)


def unconditioned(folder):
    """The golden MDLM as published: the noise level that it reads is always 0."""
    return {**json.loads((folder / "config.json").read_text()), "time_conditioning": False}


def test_a_constant_time_is_folded_into_the_weights():
    authors = built("mdlm")
    model = HookedDiffusionTransformer.from_pretrained(
        authors.folder, config=unconditioned(authors.folder), device="cpu"
    )
    assert model.cfg.time.folded
    assert not any("time" in name or "modulation" in name for name in model.hook_dict)
    logits, cache = model.run_with_cache(authors.tokens)
    assert_close(logits, authors.numbers["logits_sigma0"], **CLOSE)
    out = cache["post", 1] @ model.W_out[1] + model.b_out[1]
    assert_close(out, cache["mlp_out", 1], rtol=1e-5, atol=1e-5)
    read = cache["ln_final.hook_normalized"] * model.ln_final.w + model.ln_final.b
    assert_close(read @ model.W_U + model.b_U, logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"time= was given, and .* has no time conditioning"):
        model(authors.tokens, time=0.5)
    with pytest.raises(ValueError, match="at_time was given"), model.at_time(0.5):
        pass


def test_composition_scores_equal_those_of_the_folded_network():
    """At time 0, which a time cannot be, the noise level is 0; the norms' weights count where they are folded too."""
    authors = built("mdlm")
    constant, conditioned = (
        HookedDiffusionTransformer.from_pretrained(authors.folder, config=config, device="cpu")
        for config in (unconditioned(authors.folder), None)
    )
    fold_norms(constant)
    with torch.no_grad():
        for block in conditioned.blocks:
            for reader in (block.attn.q, block.attn.k, block.attn.v):
                reader.weight.mul_(block.ln1.w)
    for mode in "QKV":
        expected = constant.all_composition_scores(mode).scores
        with conditioned.at_time(1e-12):
            assert_close(conditioned.all_composition_scores(mode).scores, expected, rtol=1e-4, atol=1e-6)
        with conditioned.at_time(0.9):
            assert (conditioned.all_composition_scores(mode).scores - expected).abs().max() > 0.01
    with pytest.raises(ValueError, match="is conditioned on the time of its canvas"):
        conditioned.all_composition_scores("Q")


def test_a_copy_made_at_a_time_needs_its_own(conditioned):
    with conditioned.model.at_time(0.3):
        copy = deepcopy(conditioned.model)
        with pytest.raises(ValueError, match="is conditioned on the time of its canvas: pass time="):
            copy(conditioned.tokens)
        assert torch.equal(copy(conditioned.tokens, time=0.3), conditioned.model(conditioned.tokens))


def test_a_folded_model_there_and_back(tmp_path):
    authors = built("bd3lm")
    model = authors.model
    again = HookedDiffusionTransformer.from_pretrained(model.save_pretrained(tmp_path / "ours"), device="cpu")
    assert again.cfg.architecture == model.cfg.architecture
    assert torch.equal(again(authors.tokens), model(authors.tokens))
    theirs = load_file(authors.folder / "model.safetensors")
    back = load_file(export(again.state_dict(), again.cfg.architecture, tmp_path / "back" / "model.safetensors"))
    buffers = ("inv_freq", "sampling_eps_min", "sampling_eps_max")
    assert set(back) == {name for name in theirs if not name.endswith(buffers)}
    for name, tensor in back.items():
        # Multiplied and divided by one number: the same, or the number beside it.
        assert_close(tensor, theirs[name], rtol=2.4e-7, atol=0, msg=name)
        if "qkv" in name or "adaLN" in name or "embedding" in name:
            assert torch.equal(tensor, theirs[name])
    reloaded = HookedDiffusionTransformer.from_pretrained(tmp_path / "back", device="cpu")
    assert_close(reloaded(authors.tokens), model(authors.tokens), rtol=1e-5, atol=1e-5)


def test_what_training_changes_in_a_folded_model_is_exported(tmp_path):
    """Also where a constant is 0, which no division undoes."""
    authors = built("bd3lm")
    tensors = dict(open_checkpoint(authors.folder).tensors())
    width = authors.model.cfg.d_model
    for name in ("weight", "bias"):
        changed = tensors[f"blocks.1.modulation.{name}"].clone()
        changed[2 * width : 3 * width] = 0.0
        tensors[f"blocks.1.modulation.{name}"] = changed
    cfg = DiffusionConfig.from_architecture(open_checkpoint(authors.folder).architecture, device="cpu")
    model = HookedDiffusionTransformer(cfg, tensors=tensors.items())
    assert not model.blocks[1].attn.o.weight.any()
    with torch.no_grad():
        model.blocks[1].attn.o.weight[:5] += 0.3
        model.blocks[0].ln1.bias += 0.2
        model.ln_final.weight *= 1.5
    logits = model(authors.tokens)
    path = export(model.state_dict(), model.cfg.architecture, tmp_path / "model.safetensors")
    again = HookedDiffusionTransformer.from_pretrained(path.parent, device="cpu")
    assert_close(again(authors.tokens), logits, rtol=1e-5, atol=2e-5)


def test_rows_have_times_of_their_own(conditioned):
    together = conditioned.model(conditioned.tokens, **conditioned.time)
    for row, time in enumerate(conditioned.time["time"]):
        alone = conditioned.model(conditioned.tokens[row : row + 1], time=float(time))
        assert_close(alone[0], together[row], rtol=1e-5, atol=2e-5)


def test_at_time_holds_in_every_pass_inside(conditioned):
    model, tokens = conditioned.model, conditioned.tokens
    expected = model(tokens, time=0.3)
    with model.at_time(0.3):
        assert torch.equal(model(tokens), expected)
        assert torch.equal(model(model(tokens, stop_at_layer=1), start_at_layer=1), expected)
        assert torch.equal(model(tokens, time=0.9), model(tokens, time=0.9))
        assert_close(model(tokens, logits_at=[2]), expected[:, [2]], rtol=1e-5, atol=1e-5)
        assert_close(model.unembed(normalized(model, model(tokens, stop_at_layer=3))), expected, rtol=1e-6, atol=1e-6)
        with pytest.raises(RuntimeError), model.at_time(0.5):
            raise RuntimeError
        assert torch.equal(model(tokens), expected)
    with pytest.raises(ValueError, match="is conditioned on the time of its canvas: pass time="):
        model(tokens)
    assert not torch.allclose(model(tokens, time=0.9), expected, atol=1e-2)
    for wrong in (0.0, -0.1, 1.5, float("nan"), torch.tensor([0.5, 2.0])):
        with pytest.raises(ValueError, match=r"it must be in \(0, 1\]: the share of noise in the canvas"):
            model(tokens, time=wrong)
    with pytest.raises(ValueError, match=r"it must be in \(0, 1\]"), model.at_time(1.5):
        pass


def test_the_network_reads_the_noise_level_of_a_step(conditioned):
    model, tokens = conditioned.model, conditioned.tokens
    nothing = torch.zeros_like(tokens, dtype=torch.bool)
    step = dict(index=0, n_steps=2, s=0.1, tokens=tokens, masked=~nothing, given=nothing)
    with model.at_time(0.9):
        with model.clock.at(StepState(**step, t=0.3)):
            assert_close(model(tokens), model(tokens, time=0.3))
        with model.clock.at(StepState(**step, t=0.3, sigma=0.8)):
            assert_close(model(tokens), model(tokens, time=-torch.expm1(torch.tensor(-0.8)) / 0.999), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("time", "words"),
    [
        (0.0, r"time is 0.0; it must be in \(0, 1\]"),
        (1.01, r"time is 1.01"),
        (float("nan"), r"nan"),
        (torch.tensor([0.2, 0.0, 0.5]), r"time is 0.0"),
        (torch.tensor([0.2, 0.4]), r"time has 2 entries; it must be a number, or one for each of the 3 rows"),
        (torch.tensor([[0.2]]), r"time has shape \[1, 1\]"),
    ],
)
def test_times_that_do_not_fit(time, words):
    authors = built("udlm")
    with pytest.raises(ValueError, match=words):
        authors.model(authors.tokens, time=time)
    if isinstance(time, float):
        with pytest.raises(ValueError, match=words), authors.model.at_time(time):
            pass
    with pytest.raises(TypeError, match=r"time is a tensor of torch.int64; it must be of floating-point numbers"):
        authors.model(authors.tokens, time=torch.tensor(1))


@pytest.mark.usefixtures("annotations_unchecked")
def test_a_time_that_is_no_number_is_refused():
    authors = built("udlm")
    for time in ([0.5, 0.6], "0.5", True):
        with pytest.raises(
            TypeError, match=r"it must be a number in \(0, 1\], or a tensor of one for each row"
        ) as caught:
            authors.model(authors.tokens, time=time)
        assert f"time={time!r} is of type {type(time).__name__}" in str(caught.value)
        assert ("torch.tensor([...])" in str(caught.value)) == isinstance(time, list)
        with pytest.raises(TypeError, match="the same for all rows"), authors.model.at_time(time):
            pass


def test_gradients_reach_the_parts_of_the_time():
    authors = built("udlm")
    authors.model(authors.tokens, **authors.time).sum().backward()
    for name, weight in authors.model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.any(), name
        weight.grad = None


def test_positions_are_not_selected_where_there_are_none():
    authors = built("udlm")
    names = ["hook_time", "blocks.1.hook_modulation", "blocks.1.hook_resid_post"]
    _, whole = authors.model.run_with_cache(authors.tokens, names_filter=names, **authors.time)
    with authors.model.hooks():
        cache, forward, _ = authors.model.get_caching_hooks(names, pos_slice=(2, 4))
        authors.model.run_with_hooks(authors.tokens, fwd_hooks=forward, **authors.time)
    assert torch.equal(cache["hook_time"], whole["hook_time"])
    assert cache["blocks.1.hook_modulation"].shape == (3, 6, authors.model.cfg.d_model)
    assert cache["blocks.1.hook_resid_post"].shape[1] == 2


def test_block_diffusion_sees_no_later_block():
    authors = built("bd3lm")
    model, tokens = authors.model, authors.tokens.clone()
    before = model(tokens)
    tokens[:, 8:] = (tokens[:, 8:] + 1) % 60
    assert torch.equal(model(tokens)[:, :8], before[:, :8])
    assert model.cfg.causal_block == 4


def test_results_record_the_time_of_conditioning():
    model = built("udlm").model
    assert "time" not in provenance(model, model.cfg)
    with model.at_time(0.25):
        assert provenance(model, model.cfg)["time"] == 0.25


def test_an_edit_holds_at_its_time_and_is_gated_at_others(tmp_path):
    """The edited key gives v* at the time of the search, and at another time what that gate makes of it."""
    authors = built("mdlm")
    model, tokens = authors.model, authors.tokens[0].clone()
    tokens[8] = model.cfg.mask_token_id
    query = Query(tokens, (2, 5), (8,), (31,))
    with model.at_time(0.4):
        value = optimize_value(model, query, 1, kl_factor=0.0, steps=6, lr=0.1)
        edit = RankOneEdit(model, 1, compute_key(model, query, 1), value)
        gate = model.time.gates(1)[1]
    loaded = type(value).load(value.save(tmp_path / "value.safetensors"))
    assert torch.equal(loaded.gate, value.gate)
    # Outside `at_time`: the edit knows its time.
    with edit:
        mlp = model.blocks[1].mlp
        written = mlp.W_out.T @ value.key + mlp.b_out
        _, cache = model.run_with_cache(tokens[None], time=0.4)
        assert_close(cache["mlp_out", 1][0, 4], value.vector, rtol=1e-4, atol=1e-4)
        with model.at_time(0.9):
            assert_close(
                written * model.time.gates(1)[1], value.vector / gate * model.time.gates(1)[1], rtol=1e-3, atol=1e-3
            )
    with torch.no_grad(), pytest.raises(ValueError, match="the gate of this MLP is 0 in some entries"):
        RankOneEdit(model, 1, compute_key_at(model, query), replace(value, gate=torch.zeros_like(gate)))


def compute_key_at(model, query):
    with model.at_time(0.4):
        return compute_key(model, query, 1)


def test_a_run_by_blocks_has_no_time_to_tell(specimen, configs):
    model = specimen(configs["bd3lm"]).model
    with pytest.raises(
        ValueError, match=r"'block_confidence' gives a step one time.*conditioned on the time and writes block after"
    ):
        model.denoise(torch.randint(500, (1, 6)), length=12, sampler="block_confidence")
