"""Growing a model: the old blocks stay, the fresh ones begin small."""

import pytest
import torch

from bundled_models.rows_and_blocks import grow


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
@pytest.mark.parametrize("kind", ["mdm", "ar"])
def test_fresh_blocks_that_write_nothing_change_nothing(kind, new_model, tokens):
    model = new_model(kind)
    grown = grow(model, 3, scale=0.0)
    assert (grown.cfg.n_layers, type(grown)) == (3, type(model))
    assert torch.equal(grown(tokens[:4]), model(tokens[:4]))


def test_old_weights_are_copied_and_fresh_ones_have_their_scale(new_model):
    model = new_model()
    grown = grow(model, 4, scale=0.5, std=0.1, seed=3)
    old = model.state_dict()
    for name, weight in grown.state_dict().items():
        if name in old:
            assert torch.equal(weight, old[name]), name
        elif weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight))
        else:
            into_stream = name.endswith(("attn.o.weight", "mlp.down.weight"))
            assert weight.std().item() == pytest.approx(0.05 if into_stream else 0.1, rel=0.2), name
    grown.W_E.data.zero_()
    assert model.W_E.abs().sum() > 0  # the copy shares no memory with the original


def test_a_seed_gives_the_same_fresh_weights(new_model):
    model = new_model()
    first, again, other = (grow(model, 2, seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())
    assert not torch.equal(first["blocks.1.mlp.gate.weight"], other["blocks.1.mlp.gate.weight"])


def test_a_model_cannot_shrink(new_model):
    with pytest.raises(ValueError, match=r"n_layers=0, but .* has 1 blocks; give at least as many"):
        grow(new_model(), 0)
    with pytest.raises(ValueError, match="scale"):
        grow(new_model(), 2, scale=float("nan"))
