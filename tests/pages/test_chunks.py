"""Chunks are read by struct as they were packed, and words are counted on from those that the reader knows."""

import numpy as np
import pytest
import torch
from page_reader import unpack

from diffusion_lens.pages.views import Stored, Words, pack


@pytest.mark.parametrize(("dtype", "error"), [("u1", 0.5 / 254), ("u2", 0.5 / 65534)])
def test_shares_are_stored_to_half_a_step(dtype, error):
    shares = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares[0, 0, :3] = torch.tensor([0.0, 1.0, float("nan")])
    _, arrays = unpack(pack({"x": Stored.shares(shares, dtype)}))
    assert np.isnan(arrays["x"][0, 0, 2])
    assert arrays["x"][0, 0, :2].tolist() == [0, 1]
    np.testing.assert_allclose(arrays["x"], shares.numpy(), rtol=0, atol=error * 1.001)


def test_arrays_follow_each_other_at_multiples_of_eight():
    numbers = torch.tensor([1.5, float("nan"), -2.25])
    chunk = pack(
        {"a": Stored.integers([-1, 2, 7]), "b": Stored.numbers(numbers), "none": Stored.integers([])}, more="ä"
    )
    header, arrays = unpack(chunk)
    assert len(chunk) % 8 == 0
    assert header == {"more": "ä"}
    assert arrays["a"].tolist() == [-1, 2, 7]
    np.testing.assert_array_equal(arrays["b"], numbers.numpy())
    assert arrays["none"].shape == (0,)


def test_what_is_no_share_is_refused():
    with pytest.raises(ValueError, match=r"between 0 and 1, and these are between -0\.5 and 2"):
        Stored.shares(torch.tensor([-0.5, 2.0]))


def test_words_are_counted_once_and_on_from_known_ones():
    texts = {7: " a", 9: " a", 3: "b", 4: "c"}
    words = Words()
    assert words.indices(torch.tensor([[7, -1], [3, 7]]), texts).tolist() == [[1, -1], [0, 1]]
    assert words.index(9, texts) == 2  # the same text, another token
    assert words.texts == ["b", " a", " a"]
    further = Words(words)
    assert further.indices([4, 3], texts).tolist() == [3, 0]
    assert further.texts == ["c"]
    assert words.stored(torch.tensor([3, -1]), texts).values.tolist() == [0, 65535]


def test_more_words_than_16_bits_count_are_stored_in_32():
    words = Words()
    words.indices(np.arange(70_000), {i: str(i) for i in range(70_000)})
    stored = words.stored(torch.tensor([69_999, -1]), {})
    assert (stored.dtype, stored.values.tolist()) == ("i4", [69_999, -1])
