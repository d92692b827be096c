"""torch.func, torch.export and torch.jit take the model as it is, and leave it as it was."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.testing import assert_close

from diffusion_lens import HookedDiffusionTransformer

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # of the attention under vmap


def test_gradients_of_each_row_are_those_of_the_row_alone(tiny):
    """The gradient of each row's own loss, as influence functions and per-sample clipping take it."""
    tokens, rows = tiny.canvas(["Gustav Geisser is the", "today Gustav Geisser is"])
    weights = {name: tensor for name, tensor in tiny.named_parameters() if ".ln" in name}

    def logit(weights, row, mask=None):
        mask = None if mask is None else mask[None]
        return functional_call(tiny, weights, (row[None],), {"attention_mask": mask})[0, rows[0], 5]

    together = vmap(grad(logit), in_dims=(None, 0))(weights, tokens)
    for i, row in enumerate(tokens):
        for name, each in grad(logit)(weights, row).items():
            assert_close(together[name][i], each, rtol=1e-4, atol=1e-5)
    masks = torch.ones_like(tokens)
    masks[0, 0] = 0
    padded = vmap(grad(logit), in_dims=(None, 0, 0))(weights, tokens, masks)
    for name, each in grad(logit)(weights, tokens[0], masks[0]).items():
        assert_close(padded[name][0], each, rtol=1e-4, atol=1e-5)


def test_the_loss_that_chooses_rows_says_so_inside_vmap(tiny):
    rows = torch.tensor([[5, 6, 7], [8, 9, 10]])
    with pytest.raises(ValueError, match=r"chooses rows by their tokens, which torch.func.vmap does not allow"):
        vmap(lambda row: tiny(row[None], return_type="loss"))(rows)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_rows_of_a_model_with_padding_of_its_own(own_pad):
    tokens = torch.tensor([[5, 6, 7], [8, 9, 2]])
    assert tokens[1, 2] == own_pad.padding.own_id
    logits = vmap(lambda row: own_pad(row[None])[0])(tokens)
    assert_close(logits[0], own_pad(tokens[:1])[0], rtol=1e-5, atol=2e-5)
    assert_close(logits[1, :2], own_pad(tokens[1:, :2])[0], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["tiny-mdm", "tiny-ar"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_exported_and_traced_programs_give_the_logits(name):
    model = HookedDiffusionTransformer.from_pretrained(name, device="cpu")  # without rotary tables
    tokens, _ = model.canvas("Gustav Geisser is the")
    exported = torch.export.export(model, (tokens,)).module()
    expected = model(tokens)
    assert type(expected) is torch.Tensor
    assert_close(exported(tokens), expected, rtol=0, atol=1e-6)
    traced = torch.jit.trace(HookedDiffusionTransformer.from_pretrained(name, device="cpu"), (tokens,))
    others = tokens.flip(0)
    assert_close(traced(others), model(others), rtol=0, atol=1e-6)


def test_gradients_of_a_transform_stay_in_it():
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")  # without rotary tables
    tokens, _ = model.canvas("Gustav Geisser is the")
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    grad(lambda given: functional_call(model, given, (tokens,)).square().mean())(weights)
    assert torch.equal(copy.deepcopy(model)(tokens), model(tokens))


def test_a_model_is_not_built_of_weights_without_values(tiny):
    with torch.device("meta"), pytest.raises(ValueError, match=r"on the meta device.*: build the model outside"):
        HookedDiffusionTransformer(tiny.cfg)
