"""Each kind of positions against attention written out head by head, and the laws that tell the kinds apart."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformer_lens.model_bridge.generalized_components.alibi_utils import build_alibi_slopes

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from diffusion_lens.analysis import patch_grid
from diffusion_lens.model.attention import KeyValueCache
from diffusion_lens.model.positions import LinearBiases
from diffusion_lens.records.identity import describe_modules
from diffusion_lens.records.results import provenance
from diffusion_lens.training import TrainingConfig, train
from weight_conversion import Architecture, export, open_checkpoint, tensor_shapes

KINDS = ("rotary", "standard", "none", "alibi")
N_POS, MASK = 7, 20
every_kind = pytest.mark.parametrize("kind", KINDS)
both_ways = pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
close = dict(rtol=1e-4, atol=1e-5)


def architecture(kind, causal, **changes):
    return replace(
        Architecture(
            family="diffusion_lens", name="small", n_layers=2, d_model=12, n_heads=3, n_key_value_heads=1, d_head=4,
            d_mlp=10, d_vocab=21, d_vocab_out=20, n_ctx=16, attention_dir="causal" if causal else "bidirectional",
            readout="shifted" if causal else "in_place", mask_token_id=None if causal else MASK,
            positional_embedding_type=kind,
        ),
        **changes,
    )  # fmt: skip


@cache
def network(kind, causal):
    a, generator = architecture(kind, causal), torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(a).items()}
    tensors = {name: 1 + 0.3 * x if x.dim() == 1 else 0.4 * x for name, x in drawn.items()}
    return HookedDiffusionTransformer(DiffusionConfig.from_architecture(a, device="cpu"), tensors=tensors.items())


@pytest.fixture
def tokens():
    return torch.randint(20, (2, N_POS), generator=torch.Generator().manual_seed(1))


def norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(vector, position):
    """A query or key as two halves of complex numbers, each multiplied with a power of its own."""
    half = len(vector) // 2
    angles = position * 10000.0 ** (-torch.arange(half) / half)
    rotated = torch.complex(vector[:half], vector[half:]) * torch.polar(torch.ones(half), angles)
    return torch.cat([rotated.real, rotated.imag])


def slow_scores(model, q, k, kind, causal):
    """Float[head query key], pair by pair."""
    slopes, n = build_alibi_slopes(3, torch.device("cpu")), len(q)
    scores = torch.full((3, n, n), float("-inf"))
    for head in range(3):
        for i in range(n):
            for j in range(i + 1 if causal else n):
                query, key = q[i, head], k[j, 0]
                if kind == "rotary":
                    query, key = turned(query, i), turned(key, j)
                scores[head, i, j] = query @ key / 2 - (slopes[head] * abs(i - j) if kind == "alibi" else 0)
    return scores


def slow(model, row, kind, causal):
    """Logits of one row, and the scores of each layer, from the named weights alone."""
    w, of_layers = model.state_dict(), []
    x = w["embed.weight"][row]
    if kind == "standard":
        x = x + w["pos_embed.weight"][: len(row)]
    for layer in range(2):
        of = {name.removeprefix(f"blocks.{layer}."): value for name, value in w.items()}
        into = norm(x, of["ln1.weight"])
        q = (into @ of["attn.q.weight"].T).unflatten(-1, (3, 4))
        k, v = ((into @ of[f"attn.{name}.weight"].T).unflatten(-1, (1, 4)) for name in "kv")
        scores = slow_scores(model, q, k, kind, causal)
        of_layers.append(scores)
        z = torch.stack([scores[head].softmax(-1) @ v[:, 0] for head in range(3)], dim=1)
        x = x + z.flatten(1) @ of["attn.o.weight"].T
        into = norm(x, of["ln2.weight"])
        gate, up = into @ of["mlp.gate.weight"].T, into @ of["mlp.up.weight"].T
        x = x + (torch.nn.functional.silu(gate) * up) @ of["mlp.down.weight"].T
    return norm(x, w["ln_final.weight"]) @ w["unembed.weight"].T, of_layers


def padded(tokens, left, right):
    real = torch.zeros(len(tokens), left + tokens.shape[1] + right, dtype=torch.bool)
    real[:, left : left + tokens.shape[1]] = True
    out = torch.full(real.shape, 3)
    out[real] = tokens.flatten()
    return out, real


@every_kind
@both_ways
def test_logits_and_scores_are_those_of_attention_written_out(kind, causal, tokens):
    model = network(kind, causal)
    names = [f"blocks.{layer}.attn.hook_attn_scores" for layer in range(2)]
    logits, cached = model.run_with_cache(tokens, names_filter=names)
    plain = model(tokens)
    assert torch.equal(plain, logits), "reading the scores must change no bit"
    for row in range(2):
        expected, scores = slow(model, tokens[row], kind, causal)
        torch.testing.assert_close(plain[row], expected, **close)
        for name, of_layer in zip(names, scores, strict=True):
            torch.testing.assert_close(cached[name][row], of_layer, **close)


@every_kind
@both_ways
def test_padding_on_either_side_moves_no_position(kind, causal, tokens):
    model, plain = network(kind, causal), network(kind, causal)(tokens)
    for left, right in ((3, 0), (0, 3), (2, 1)):
        longer, real = padded(tokens, left, right)
        logits = model(longer, attention_mask=real)[:, left : left + N_POS]
        torch.testing.assert_close(logits, plain, **close)
        at = model(longer, attention_mask=real, logits_at=[left + 1, left + 4])
        torch.testing.assert_close(at, plain[:, [1, 4]], **close)


@every_kind
@both_ways
def test_selected_rows_are_those_of_the_whole(kind, causal, tokens):
    model = network(kind, causal)
    plain = model(tokens)
    torch.testing.assert_close(model(tokens, logits_at=[5, 2]), plain[:, [5, 2]], **close)
    entries = torch.tensor([0, 1, 1]), torch.tensor([6, 0, 3])
    torch.testing.assert_close(model(tokens, logits_at=entries), plain[entries], **close)


@every_kind
@pytest.mark.parametrize("cuts", [[1, 2, 3], [4], [6]])
def test_pieces_with_a_cache_give_the_logits_of_the_whole(kind, cuts, tokens):
    model, past = network(kind, True), KeyValueCache(2)
    pieces = [model(piece, past_kv_cache=past) for piece in tokens.tensor_split(cuts, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), **close)


@given(st.permutations(range(N_POS)))
@settings(max_examples=10, deadline=None)
def test_without_positions_a_bidirectional_model_reads_a_set(order):
    tokens = torch.arange(N_POS)[None] + 3
    shuffled = {kind: network(kind, False)(tokens[:, order]) for kind in KINDS}
    torch.testing.assert_close(shuffled["none"], network("none", False)(tokens)[:, order], **close)
    if list(order) not in (list(range(N_POS)), list(range(N_POS))[::-1]):
        for kind in ("rotary", "standard", "alibi"):
            assert not torch.allclose(shuffled[kind], network(kind, False)(tokens)[:, order], **close)


def test_linear_biases_read_both_directions_alike(tokens):
    for kind, symmetric in (("alibi", True), ("none", True), ("rotary", False), ("standard", False)):
        model = network(kind, False)
        assert torch.allclose(model(tokens.flip(1)).flip(1), model(tokens), **close) == symmetric


@pytest.mark.parametrize("n_heads", [1, 2, 3, 4, 6, 8, 12, 20])
def test_slopes_are_those_of_alibi(n_heads):
    torch.testing.assert_close(torch.tensor(LinearBiases(n_heads).slopes), build_alibi_slopes(n_heads, "cpu"))


@every_kind
@both_ways
def test_public_positions_rebuild_the_scores(kind, causal, tokens):
    model = network(kind, causal)
    names = [f"blocks.1.attn.hook_{name}" for name in ("q", "k", "rot_q", "attn_scores")]
    _, cached = model.run_with_cache(tokens, names_filter=names)
    q, k, rotated, scores = (cached[name] for name in names)
    at = torch.arange(N_POS)[None]
    torch.testing.assert_close(model.positions.turn(q, at), rotated)
    for shift in (0, 5):  # only distances matter to attention, whatever the kind
        q_at, k_at = (model.positions.turn(x, at + shift) for x in (q, k))
        rebuilt = torch.einsum("bqhd, bkd -> bhqk", q_at, k_at[:, :, 0]) / 2
        bias = model.positions.score_bias(at + shift, at + shift)
        assert (bias is None) == (kind != "alibi")
        rebuilt = rebuilt if bias is None else rebuilt + bias
        seen = scores.isfinite()
        torch.testing.assert_close(rebuilt[seen], scores[seen], **close)


@every_kind
def test_a_negative_position_is_refused(kind):
    positions, at = network(kind, False).positions, torch.tensor([[0, -2]])
    with pytest.raises(ValueError, match=r"position -2 is negative.*add the same number"):
        positions.turn(torch.zeros(1, 2, 3, 4), at)
    with pytest.raises(ValueError, match="position -2 is negative"):
        positions.score_bias(at, at)


def test_learned_positions_have_transformer_lens_names(tokens):
    model = network("standard", False)
    assert model.W_pos.shape == (16, 12)
    assert torch.equal(dict(model.tl_named_parameters())["pos_embed.W_pos"], model.W_pos)
    _, cached = model.run_with_cache(tokens)
    assert torch.equal(cached["hook_pos_embed"], model.W_pos[:N_POS].expand(2, -1, -1))
    assert torch.equal(cached["pos_embed.hook_out"], cached["hook_pos_embed"])
    parts, labels = cached.decompose_resid(layer=1, return_labels=True)
    assert labels[:2] == ["embed", "pos_embed"]
    torch.testing.assert_close(parts.sum(0), cached["resid_post", 0], **close)
    changed = model.run_with_hooks(tokens, fwd_hooks=[("hook_pos_embed", lambda x, hook: 0 * x)])
    assert not torch.allclose(changed, model(tokens), **close)
    assert not hasattr(network("none", False), "W_pos")
    assert "hook_pos_embed" not in network("none", False).hook_dict


@every_kind
@both_ways
def test_a_run_may_start_at_the_embedded_stream(kind, causal, tokens):
    model, (longer, real) = network(kind, causal), padded(tokens, 2, 0)
    stream, _, _, mask = model.input_to_embed(longer, attention_mask=real)
    again = model(stream, start_at_layer=0, attention_mask=mask)
    torch.testing.assert_close(again, model(longer, attention_mask=real), **close)


@every_kind
@both_ways
def test_resumed_runs_of_patching_are_those_of_plain_hooks(kind, causal, tokens):
    model, (clean, corrupted) = network(kind, causal), tokens.split(1)
    metric = lambda logits: logits[0, -1, 4] - logits[0, -1, 5]  # noqa: E731
    grid = patch_grid(model, clean, corrupted, metric, "resid_pre")
    _, cached = model.run_with_cache(clean)
    for layer in range(2):
        for pos in (0, 3, N_POS - 1):

            def patch(x, hook, pos=pos):
                x = x.clone()
                x[:, pos] = cached[hook.name][:, pos]
                return x

            hook = (f"blocks.{layer}.hook_resid_pre", patch)
            expected = metric(model.run_with_hooks(corrupted, fwd_hooks=[hook]))
            torch.testing.assert_close(grid.scores[layer, pos].float(), expected, **close)


@every_kind
def test_the_loop_gives_padded_rows_the_canvas_of_single_rows(kind):
    for causal in (False, True):
        model, (prompt, real) = network(kind, causal), padded(torch.tensor([[4, 5]]), 2, 0)
        alone = model.denoise(torch.tensor([[4, 5]]), max_new_tokens=4, steps=4)
        pair = model.denoise(torch.cat([prompt, torch.tensor([[6, 7, 8, 9]])]), max_new_tokens=4, steps=4,
                             attention_mask=torch.cat([real, torch.ones(1, 4, dtype=torch.bool)]))  # fmt: skip
        assert torch.equal(pair.tokens[0, 2:], alone.tokens[0])


@every_kind
def test_saved_models_and_interrupted_trainings_continue(kind, tmp_path, tokens):
    def fresh():
        return HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture(kind, False), device="cpu"))

    def stop(model):
        raise KeyboardInterrupt

    model, config = fresh(), TrainingConfig(steps=4, batch_size=2, warmup=0)
    whole = train(model, tokens, config, progress=False)
    again, calls = fresh(), dict(folder=tmp_path / "run", checkpoint_every=2, progress=False)
    with pytest.raises(KeyboardInterrupt):
        train(again, tokens, config, evaluate=stop, evaluate_every=3, **calls)
    again = fresh()
    resumed = train(again, tokens, config, **calls)
    assert torch.equal(whole.losses, resumed.losses)
    other = HookedDiffusionTransformer(
        DiffusionConfig.from_architecture(architecture("none" if kind == "alibi" else "alibi", False), device="cpu")
    )
    with pytest.raises(ValueError, match="architecture"):
        train(other, tokens, config, **calls)

    loaded = HookedDiffusionTransformer.from_pretrained(model.save_pretrained(tmp_path / "saved"), device="cpu")
    assert loaded.cfg.positional_embedding_type == kind
    assert torch.equal(loaded(tokens), model(tokens))
    assert describe_modules(loaded) == describe_modules(model)


def test_only_other_kinds_are_named_in_records_and_formats(tmp_path):
    recorded = {kind: provenance(network(kind, False), network(kind, False).cfg)["architecture"] for kind in KINDS}
    assert "positional_embedding_type" not in recorded.pop("rotary")
    assert {record["positional_embedding_type"] for record in recorded.values()} == set(recorded)
    for kind in KINDS:
        assert Architecture.from_dict(architecture(kind, False).to_dict()) == architecture(kind, False)
    with pytest.raises(ValueError, match="positional_embedding_type is 'sinus'; it must be one of rotary, standard"):
        architecture("sinus", False)

    for kind in ("standard", "none", "alibi"):
        model = network(kind, False)
        with pytest.raises(ValueError, match=f"lit_gpt format cannot express positional_embedding_type='{kind}'"):
            export(model.state_dict(), model.cfg.architecture, tmp_path / "m.safetensors", family="lit_gpt")
        path = export(model.state_dict(), model.cfg.architecture, tmp_path / kind / "m.safetensors")
        assert open_checkpoint(path).architecture == model.cfg.architecture


def test_a_seed_draws_the_same_other_weights_for_every_kind():
    drawn = [
        HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture(kind, False), device="cpu"), seed=3)
        for kind in KINDS
    ]
    for name, weight in drawn[0].state_dict().items():
        assert all(torch.equal(model.state_dict()[name], weight) for model in drawn)


def test_odd_heads_are_possible_where_nothing_is_rotated(tokens):
    assert architecture("none", False, d_head=3).d_head == 3
    with pytest.raises(ValueError, match="must be even"):
        architecture("rotary", False, d_head=3)
