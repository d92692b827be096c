"""Off-by-one readouts cannot hide: a model that copies its own row tells which row was read."""

import torch

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from weight_conversion import Architecture, tensor_shapes


def copying_model(attention_dir: str, readout: str) -> HookedDiffusionTransformer:
    """Row i writes the token that is at position i, plus one: embeddings pass through blocks that add nothing."""
    masked = attention_dir == "bidirectional"
    architecture = Architecture(
        family="lit_gpt", name="copier", n_layers=1, d_model=12, n_heads=1, n_key_value_heads=1, d_head=12, d_mlp=4,
        d_vocab=11 + masked, d_vocab_out=11, n_ctx=16, attention_dir=attention_dir, readout=readout,
        mask_token_id=11 if masked else None,
    )  # fmt: skip
    tensors = {name: torch.zeros(shape) for name, shape in tensor_shapes(architecture).items()}
    tensors["ln_final.weight"] += 1
    tensors["embed.weight"] = torch.eye(11 + masked, 12)
    tensors["unembed.weight"] = torch.eye(12)[:11].roll(1, dims=0)
    return HookedDiffusionTransformer(
        DiffusionConfig.from_architecture(architecture, device="cpu"), tensors=tensors.items()
    )


def test_a_causal_model_continues_from_the_row_before():
    written = copying_model("causal", "shifted").denoise(torch.tensor([[3]]), length=7).tokens
    assert written.tolist() == [[3, 4, 5, 6, 7, 8, 9]]


def test_a_shifted_bidirectional_model_reads_the_row_before():
    model = copying_model("bidirectional", "shifted")
    written = model.denoise(torch.tensor([[3]]), length=7, sampler="left_to_right").tokens
    assert written.tolist() == [[3, 4, 5, 6, 7, 8, 9]]


def test_an_in_place_model_reads_its_own_row():
    """Its own row holds [MASK] until it is filled, so it never sees its neighbour."""
    model = copying_model("bidirectional", "in_place")
    seen = []
    model.denoise(
        torch.tensor([[3, 4]]), length=4, steps=1, fwd_hooks=[("denoise.hook_logits", lambda a, hook: seen.append(a))]
    )
    mask_row = model(torch.full((1, 1), 11))[0, 0]
    assert torch.equal(seen[0][0, 2], mask_row)
    assert torch.equal(seen[0][0, 3], mask_row)


def test_behind_padding_the_first_position_keeps_its_own_row():
    """The row before it is padding's, whatever the padding holds."""
    model = copying_model("bidirectional", "shifted")
    alone = model.denoise(torch.tensor([[11, 3, 11]]), steps=1)
    padded = model.denoise(torch.tensor([[7, 5, 11, 3, 11]]), steps=1, attention_mask=torch.tensor([[0, 0, 1, 1, 1]]))
    assert alone.tokens[0, 2] == 4
    assert torch.equal(padded.tokens[:, 2:], alone.tokens)
    assert torch.equal(padded.confidence[:, 2], alone.confidence[:, 0])
