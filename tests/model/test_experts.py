"""Experts: who runs where, what a hook at each of their points does, and what has one MLP in mind and refuses."""

import copy
from dataclasses import replace

import pytest
import torch
from oracles.plain_experts import mixture
from transformer_lens import ActivationCache

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer, Query
from diffusion_lens.analysis import compute_key, edge_attribution
from diffusion_lens.checks.diagnosis import exchanged_in_each, without
from diffusion_lens.denoising.cache import activation_shape
from weight_conversion import Architecture, Experts, tensor_shapes

MLP = "blocks.1.mlp"
ROUTED = [f"{MLP}.hook_{name}" for name in ("router_logits", "experts", "router_weights", "expert_out")]
CLOSE = dict(rtol=1e-4, atol=1e-5)
ROUTERS = {
    "softmax": {},
    "biased": dict(router_bias=True, bias_weighs=True),
    "sigmoid, of groups": dict(
        router="sigmoid", router_bias=True, normalised=True, scale=2.5, n_groups=3, n_chosen_groups=2
    ),
}


MODELS = {}


@pytest.fixture
def model(configs, specimen):
    """Experts in the second of three layers, with a shared one and biases; built once."""
    if not MODELS:
        MODELS["options"] = specimen(configs["llada_moe-options"]).model
    return MODELS["options"]


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(500, (2, 9), generator=torch.Generator().manual_seed(3))


def network(experts, **more):
    """A random network of one layer, bidirectional, with lively weights."""
    sizes = dict(n_layers=1, d_model=12, n_heads=2, n_key_value_heads=2, d_head=6, d_mlp=20)
    words = dict(d_vocab=31, d_vocab_out=31, n_ctx=32, mask_token_id=30)
    architecture = Architecture(
        family="diffusion_lens", name="probe", attention_dir="bidirectional", readout="in_place", experts=experts,
        **{**sizes, **words, **more},
    )  # fmt: skip
    cfg = DiffusionConfig.from_architecture(architecture, device="cpu")
    draw = torch.Generator().manual_seed(0)
    tensors = [
        (name, torch.randn(shape, generator=draw) * (0.1 if name.endswith("bias") else shape[-1] ** -0.5))
        for name, shape in tensor_shapes(architecture).items()
    ]
    return HookedDiffusionTransformer(cfg, tensors=tensors)


@pytest.mark.parametrize("router", ROUTERS)
def test_routers_by_the_definition(router):
    settings = Experts(6, 3, 10, (True,), **ROUTERS[router])
    model = network(settings)
    _, cache = model.run_with_cache(torch.arange(14).view(2, 7))
    block = model.blocks[0]
    weights = {
        name.removeprefix("blocks.0.mlp."): tensor.detach()
        for name, tensor in model.state_dict().items()
        if ".mlp." in name
    }
    read = cache["normalized", 0, "ln2"] * block.ln2.w
    expected = torch.stack([torch.stack([mixture(weights, settings, x) for x in row]) for row in read.detach()])
    torch.testing.assert_close(cache["mlp_out", 0], expected.float(), **CLOSE)


def test_the_order_of_the_experts_does_not_matter(model, tokens):
    order = torch.tensor([2, 0, 3, 1])
    tensors = dict(model.state_dict())
    for name in (f"{MLP}.router.weight", f"{MLP}.router.bias"):
        tensors[name] = tensors[name][order]
    for name in [name for name in tensors if f"{MLP}.experts." in name]:
        new, rest = name.removeprefix(f"{MLP}.experts.").split(".", 1)
        tensors[name] = model.state_dict()[f"{MLP}.experts.{order[int(new)]}.{rest}"]
    permuted = HookedDiffusionTransformer(model.cfg, tensors=tensors.items())
    torch.testing.assert_close(permuted(tokens), model(tokens), **CLOSE)


def test_a_single_expert_is_an_mlp():
    one = network(Experts(1, 1, 20, (True,)))
    renamed = [
        (name.replace("mlp.experts.0.", "mlp."), tensor)
        for name, tensor in one.state_dict().items()
        if "router" not in name
    ]
    dense = HookedDiffusionTransformer(
        DiffusionConfig.from_architecture(replace(one.cfg.architecture, experts=None), device="cpu"), tensors=renamed
    )
    tokens = torch.arange(14).view(2, 7)
    torch.testing.assert_close(one(tokens), dense(tokens), **CLOSE)


def test_only_chosen_experts_run(model, tokens):
    """Products of the layer's experts, counted: two of four experts at each position, in three matrices."""
    from torch.utils.flop_counter import FlopCounterMode

    mlp = model.blocks[1].mlp
    x = torch.randn(2, 9, model.cfg.d_model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        mlp(x)
    d_model, experts = model.cfg.d_model, model.cfg.experts
    by_position = 2 * 3 * d_model * experts.d_expert * experts.n_chosen
    around = 2 * d_model * experts.n_experts + 2 * experts.n_chosen * d_model  # the router, and the weighted sum
    assert counter.get_total_flops() == 18 * (by_position + around)


def test_ablating_an_expert_takes_its_term_away(model, tokens):
    def ablate(weights, hook):
        weights = weights.clone()
        weights[..., 2] = 0
        return weights

    _, plain = model.run_with_cache(tokens, names_filter=[*ROUTED, "blocks.1.hook_mlp_out"])
    with model.hooks(fwd_hooks=[(f"{MLP}.hook_router_weights", ablate)]):
        _, ablated = model.run_with_cache(tokens, names_filter="blocks.1.hook_mlp_out")
    choice, weights, _ = (plain[name] for name in ROUTED[1:])
    chosen = (choice == 2).float()
    assert 0 < chosen.mean() < 0.5
    term = (chosen[..., None] * plain[ROUTED[3]]).sum(2) * weights[..., 2:3]
    expected = plain["blocks.1.hook_mlp_out"] - term
    torch.testing.assert_close(ablated["blocks.1.hook_mlp_out"], expected, **CLOSE)


def test_a_forced_choice_runs_the_experts_that_were_not_chosen(model, tokens):
    def others(choice, hook):
        every = torch.ones(*choice.shape[:2], 4).scatter(-1, choice, 0)
        return every.topk(2, dim=-1).indices

    _, plain = model.run_with_cache(tokens, names_filter=ROUTED)
    with model.hooks(fwd_hooks=[(f"{MLP}.hook_experts", others)]):
        _, forced = model.run_with_cache(tokens, names_filter=[*ROUTED, "blocks.1.hook_mlp_out"])
    assert not ((plain[ROUTED[2]] != 0) & (forced[ROUTED[2]] != 0)).any()
    scores = plain[ROUTED[0]].softmax(-1) + model.blocks[1].mlp.router.bias
    torch.testing.assert_close(forced[ROUTED[2]] + plain[ROUTED[2]], scores, **CLOSE)
    weights = forced[ROUTED[2]].gather(-1, forced[ROUTED[1]])
    torch.testing.assert_close(
        (weights[..., None] * forced[ROUTED[3]]).sum(2), forced["blocks.1.hook_mlp_out"], **CLOSE
    )


def test_an_expert_that_is_chosen_twice_counts_once(model, tokens):
    hooks = [(f"{MLP}.hook_experts", lambda choice, hook: torch.ones_like(choice))]
    half = [(f"{MLP}.hook_experts", lambda choice, hook: torch.tensor([1, 0]).expand_as(choice))]

    def only_one(weights, hook):
        return weights * torch.tensor([0.0, 1.0, 0.0, 0.0])

    twice = model.run_with_hooks(tokens, fwd_hooks=hooks)
    once = model.run_with_hooks(tokens, fwd_hooks=[*half, (f"{MLP}.hook_router_weights", only_one)])
    torch.testing.assert_close(twice, once, **CLOSE)


def test_a_choice_outside_the_layer_is_refused(model, tokens):
    with pytest.raises(ValueError, match=r"chose experts \d to 4; the layer has experts 0 to 3"):
        model.run_with_hooks(tokens, fwd_hooks=[(f"{MLP}.hook_experts", lambda choice, hook: choice + 1)])


def test_the_weights_of_another_run_can_be_put_in(model, tokens):
    """Experts that only that run chose are computed, and the sum has its weights."""
    other = tokens.flip(0)
    _, theirs = model.run_with_cache(other, names_filter=ROUTED[2])
    swap = lambda weights, hook: theirs[ROUTED[2]]  # noqa: E731
    with model.hooks(fwd_hooks=[(ROUTED[2], swap)]):
        _, cache = model.run_with_cache(tokens, names_filter=["blocks.1.ln2.hook_normalized", "blocks.1.hook_mlp_out"])
    x = cache["blocks.1.ln2.hook_normalized"] * model.blocks[1].ln2.w
    outputs = torch.stack([expert(x) for expert in model.blocks[1].mlp.experts], dim=2)
    expected = (theirs[ROUTED[2]][..., None] * outputs).sum(2)
    torch.testing.assert_close(cache["blocks.1.hook_mlp_out"], expected, **CLOSE)


def test_a_hook_in_an_expert_sees_zeros_where_the_expert_did_not_run(model, tokens):
    point = f"{MLP}.experts.2.hook_post"
    _, cache = model.run_with_cache(tokens, names_filter=[point, ROUTED[1]])
    chosen = (cache[ROUTED[1]] == 2).any(-1)
    assert cache[point].shape == activation_shape(point, model.cfg, *tokens.shape)
    assert torch.equal((cache[point] != 0).any(-1), chosen)
    grown = model.run_with_hooks(tokens, fwd_hooks=[(point, lambda x, hook: x + 3)])
    with model.hooks(fwd_hooks=[(point, lambda x, hook: x)]):
        assert torch.equal(model(tokens), model(tokens))
    assert not torch.allclose(grown, model(tokens))


def test_a_hook_of_torch_on_an_expert_sees_every_position(model, tokens):
    seen = []
    expert = model.blocks[1].mlp.experts[2]
    with torch.no_grad():
        plain = model(tokens)
        handle = expert.register_forward_hook(lambda module, given, out: seen.append(out.shape))
        hooked = model(tokens)
        handle.remove()
    assert seen == [(2, 9, model.cfg.d_model)]
    torch.testing.assert_close(hooked, plain, **CLOSE)


def test_caches_have_the_shapes_that_are_reserved(model, tokens):
    _, cache = model.run_with_cache(tokens)
    for name, activation in cache.items():
        assert activation.shape == activation_shape(name, model.cfg, *tokens.shape), name


def test_decompositions_count_the_shared_expert(model, tokens):
    _, cache = model.run_with_cache(tokens)
    assert cache["blocks.1.hook_shared_out"].abs().max() > 0
    for layer in (2, -1):
        stack, labels = cache.decompose_resid(layer=layer, return_labels=True)
        whole = cache["resid_pre", 2] if layer == 2 else cache["resid_post", 2]
        assert "1_mlp_out" in labels
        torch.testing.assert_close(stack.sum(0), whole, rtol=1e-4, atol=1e-4)
    assert isinstance(cache, ActivationCache)
    missing = cache.cache_dict.pop("blocks.1.hook_shared_out")
    with pytest.raises(KeyError, match="hook_shared_out"):
        cache.decompose_resid(layer=-1)
    assert missing.shape == (2, 9, 32)


def test_folded_norms_are_read_by_router_and_experts(model, tokens):
    folded = copy.deepcopy(model)
    folded.enable_compatibility_mode()
    assert all(bool((norm.weight == 1).all()) for norm in (folded.blocks[1].ln2, folded.ln_final))
    torch.testing.assert_close(folded(tokens), model(tokens), rtol=1e-4, atol=1e-4)
    assert "blocks.1.mlp.experts.3.W_in" in folded.tl_parameters()


@pytest.mark.parametrize("name", ["W_in", "W_out", "W_gate"])
def test_stacked_weights_name_those_of_one_expert(model, name):
    with pytest.raises(ValueError, match=rf"blocks\[1\]\.mlp\.experts\[0\]\.{name}"):
        getattr(model, name)


def test_keys_and_values_are_those_of_one_mlp(model, tokens):
    query = Query(tokens[0], (2, 4), (7,), (31,))
    assert compute_key(model, query, 0).vector.shape == (model.cfg.d_mlp,)
    words = r"layer 1 of .* has 4 experts.*its layers with one MLP are \[0, 2\].*hook_expert_out"
    with pytest.raises(ValueError, match=words):
        compute_key(model, query, 1)


def test_edges_refuse_a_shared_expert(model, tokens):
    metric = lambda logits: logits[:, -1, 3].sum()  # noqa: E731
    with pytest.raises(ValueError, match=r"block 1 .* shared expert.*node_attribution"):
        edge_attribution(model, tokens, tokens.flip(0), metric)


def test_the_tensors_are_those_of_the_layout(model):
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes == tensor_shapes(model.cfg.architecture)


def test_checks_change_the_matrices_of_every_expert(model):
    architecture, tensors = model.cfg.architecture, dict(model.state_dict())
    silenced = without(architecture, 1, "MLP").change(tensors, architecture)
    assert len(silenced) == 5  # four experts and the shared one
    assert all(".down." in name and not bool(tensor.any()) for name, tensor in silenced.items())
    swapped = exchanged_in_each(architecture)[1].change(tensors, architecture)
    assert len(swapped) == 10
    gate = f"{MLP}.experts.2.gate.weight"
    assert torch.equal(swapped[gate], tensors[gate.replace("gate", "up")])
