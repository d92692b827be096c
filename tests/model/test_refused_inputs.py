"""Masks, tensors, dtypes and devices that mean nothing here are refused, saying what does."""

import copy
import re

import numpy as np
import pytest
import torch

import diffusion_lens
from diffusion_lens import HookedDiffusionTransformer


@pytest.fixture
def tokens(either):
    return either.tokens


def additive(tokens):
    mask = torch.zeros(tokens.shape)
    mask[0, -3:] = float("-inf")
    return mask


@pytest.mark.parametrize(
    ("strange", "shown"),
    [(lambda t: additive(t), "-inf"), (lambda t: torch.full(t.shape, 0.5), "0.5"), (lambda t: 2 * (t > 0), "2")],
    ids=["added to scores", "a weight", "a count"],
)
def test_a_mask_of_other_values_than_0_and_1_is_refused(either, tokens, strange, shown):
    for attempt in (
        lambda mask: either.model(tokens, attention_mask=mask),
        lambda mask: either.model(tokens, attention_mask=mask, return_type="loss"),
        lambda mask: either.model.denoise(tokens, max_new_tokens=2, attention_mask=mask),
    ):
        with pytest.raises(
            ValueError, match=rf"contains {shown}; it must be 1 \(or true\) at real tokens.*attention_mask == 0"
        ):
            attempt(strange(tokens))


def test_the_cure_for_an_additive_mask_is_the_mask(either, tokens):
    real = torch.ones_like(tokens)
    real[0, -3:] = 0
    expected = either.model(tokens, attention_mask=real)
    for mask in (additive(tokens) == 0, real.float(), real.bool()):
        assert torch.equal(either.model(tokens, attention_mask=mask), expected)


@pytest.mark.parametrize(
    ("bad", "message"),
    [(lambda x: x.to_sparse(), r"sparse_coo; give a dense one"), (lambda x: x.to("meta"), "meta device")],
    ids=["sparse", "meta"],
)
def test_tensors_without_plain_values_are_refused(either, tokens, bad, message):
    with pytest.raises(TypeError, match=f"tokens: .*{message}"):
        either.model(bad(tokens))
    with pytest.raises(TypeError, match=f"residual stream: .*{message}"):
        either.model(bad(either.model(tokens, stop_at_layer=1).detach()), start_at_layer=1)
    with pytest.raises(TypeError, match=f"attention_mask: .*{message}"):
        either.model(tokens, attention_mask=bad(torch.ones_like(tokens)))


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("as_given", [lambda mask: mask.numpy(), lambda mask: mask.tolist()], ids=["ndarray", "list"])
def test_a_mask_that_is_no_tensor_is_refused(either, tokens, as_given):
    mask = as_given(torch.ones_like(tokens))
    message = rf"attention_mask.* a {type(mask).__name__}.*; it must be a tensor"
    for attempt in (
        lambda: either.model(tokens, attention_mask=mask),
        lambda: either.model(tokens, attention_mask=mask, return_type="loss"),
        lambda: either.model.denoise(tokens, max_new_tokens=2, attention_mask=mask),
    ):
        with pytest.raises(TypeError, match=message):
            attempt()


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("given", [3, 3.0, None, b"text", [3], np.array([3])], ids=repr)
def test_input_other_than_text_and_tokens_is_refused(tiny, given):
    for attempt in (tiny, tiny.to_tokens, lambda text: tiny.denoise(text, length=14)):
        with pytest.raises(TypeError, match=r"must be a string or a list of them.*torch\.tensor\(ids\)"):
            attempt(given)


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("given", [("hook_embed", print), {"hook_embed": print}, ["hook_embed"]], ids=repr)
def test_hooks_that_are_no_list_of_pairs_are_refused(tiny, given):
    tokens = tiny.to_tokens("the")

    def inside(hooks):
        with tiny.hooks(hooks):
            raise AssertionError

    for attempt in (
        lambda hooks: tiny.run_with_hooks(tokens, fwd_hooks=hooks),
        lambda hooks: tiny.run_with_hooks(tokens, bwd_hooks=hooks),
        lambda hooks: tiny.denoise(tokens, length=14, fwd_hooks=hooks),
        inside,
    ):
        with pytest.raises(TypeError, match=r"a list of pairs, \[\(name, function\), \.\.\.\]"):
            attempt(given)


@pytest.mark.usefixtures("annotations_unchecked")
def test_the_dictionary_of_a_tokenizer_is_refused_as_text(tiny):
    encoded = tiny.tokenizer("the", return_tensors="pt")
    for attempt in (tiny, tiny.to_tokens, lambda text: tiny.denoise(text, length=14)):
        with pytest.raises(TypeError, match=r"a BatchEncoding; .*ids, \.\.\.\['input_ids'\]"):
            attempt(encoded)


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("given", ["no", 1, 0.0, [True]])
def test_prepend_bos_is_true_or_false(tiny, given):
    text = "Gustav Geisser is"
    for attempt in (tiny, tiny.to_tokens, lambda text, **more: tiny.denoise(text, length=14, **more)):
        with pytest.raises(TypeError, match=re.escape(f"prepend_bos={given!r} is a") + ".*must be True or False"):
            attempt(text, prepend_bos=given)
    with pytest.raises(TypeError, match=r"default_prepend_bos=.*must be True or False"):
        copy.copy(tiny).set_tokenizer(tiny.tokenizer, default_prepend_bos=given)


@pytest.mark.parametrize("name", ["bfloat16", "torch.float16", "float64"])
def test_a_dtype_by_its_name(name):
    dtype = getattr(torch, name.removeprefix("torch."))
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu", dtype=name)
    assert model.cfg.dtype == model.W_E.dtype == dtype
    moved = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    assert moved.to(name).cfg.dtype == dtype
    assert moved.to(dtype="float32").to("cpu", name).W_E.dtype == dtype


@pytest.mark.parametrize("dtype", ["bf16", "float", torch.int8, torch.complex64])
def test_an_unknown_dtype_says_which_there_are(either, dtype):
    for attempt in (
        lambda: HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu", dtype=dtype),
        lambda: copy.copy(either.model).to(dtype=dtype),
    ):
        with pytest.raises(ValueError, match=r"dtype .* one of float32, float16, bfloat16, float64"):
            attempt()


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "device 'gpu' is unknown; it must be 'cpu', 'cuda'"),
        ("meta", "has no values"),
        ("cuda:99", "is not available"),
    ],
)
def test_an_unknown_device_says_which_there_are(device, message):
    with pytest.raises(ValueError, match=message):
        HookedDiffusionTransformer.from_pretrained("tiny-mdm", device=device)
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    for attempt in (lambda: model.to(device), lambda: model.to(device=device)):
        with pytest.raises(ValueError, match=message):
            attempt()


def test_a_move_that_torch_knows_stays_torchs(either):
    model = copy.deepcopy(either.model)
    assert model.to(torch.float64).to(either.tokens.float()).cfg.dtype == torch.float32
    assert model.to(torch.device("cpu"), torch.bfloat16, non_blocking=True).cfg.dtype == torch.bfloat16


def test_the_package_says_its_version():
    from importlib.metadata import version

    assert diffusion_lens.__version__ == version("diffusion-lens")


@pytest.mark.usefixtures("annotations_unchecked")
def test_filters_that_are_none_are_refused(either):
    model, tokens = either.model, either.tokens[:1, :5]
    for wrong, message in (
        ([lambda name: True], r"names_filter\[0\]=<function .* is a function; it must be a text"),
        (
            (name for name in model.hook_dict),
            "names_filter=<generator .* is a generator; it must be a text, a sequence",
        ),
    ):
        with pytest.raises(TypeError, match=message):
            model.run_with_cache(tokens, names_filter=wrong)
