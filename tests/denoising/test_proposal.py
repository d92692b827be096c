"""Which tokens stay under top-p and top-k, and that draws follow what is left."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion_lens.denoising.sampler import Proposal

relaxed = settings(max_examples=40, deadline=None)


def slow_filter(logits, top_p, top_k):
    """One token after another, from the likeliest on."""
    total = sum(torch.tensor(logits, dtype=torch.float64).exp().tolist())
    kept, mass = [], 0.0
    for token in sorted(range(len(logits)), key=lambda i: -logits[i]):
        if (top_p is not None and mass > top_p) or (top_k is not None and len(kept) == top_k):
            break
        kept.append(token)
        mass += float(torch.tensor(logits[token], dtype=torch.float64).exp()) / total
    return sorted(kept)


@relaxed
@given(
    logits=st.lists(st.integers(-40, 40), min_size=2, max_size=12, unique=True),
    top_p=st.sampled_from([None, 0.05, 0.33, 0.71, 0.97, 1.0]),
    top_k=st.sampled_from([None, 1, 3, 40]),
)
def test_the_likeliest_stay(logits, top_p, top_k):
    logits = [each / 10 for each in logits]
    kept = Proposal(top_p=top_p, top_k=top_k).likeliest(torch.tensor([logits]))
    assert kept[0].nonzero().flatten().tolist() == slow_filter(logits, top_p, top_k)


def uniform(n, width):
    return torch.rand(n, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp(min=1e-300)


def test_samples_follow_the_remaining_probabilities():
    """At temperature 2, of the softmax over the three likeliest tokens that can be written."""
    n, logits = 6000, torch.tensor([0.1, 1.5, -0.2, 2.0, 0.9, 1.1])
    drawn = Proposal(top_k=3).propose(logits.expand(n, -1), 2.0, uniform(n, 6), mask_id=1)
    share = torch.bincount(drawn, minlength=6) / n
    expected = torch.zeros(6)
    expected[[3, 5]] = (logits[[3, 5]] / 2).softmax(0)  # token 1 is [MASK]: among the three, and passed over
    assert (share - expected).abs().max() < 5 * (0.25 / n) ** 0.5
    assert set(drawn.tolist()) == {3, 5}


def test_the_mass_is_counted_at_the_temperature():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    hot, cold = (
        set(Proposal(top_p=0.6).propose(logits.expand(500, -1), heat, uniform(500, 4)).tolist()) for heat in (50.0, 0.1)
    )
    assert hot == {1, 2, 3}
    assert cold == {3}


def test_a_mask_that_alone_is_likely_enough_gives_way_to_the_next():
    logits = torch.tensor([[9.0, 1.0, 2.0]]).expand(50, -1)
    for filtered in (dict(top_k=1), dict(top_p=0.5)):
        assert Proposal(**filtered).propose(logits, 1.0, uniform(50, 3), mask_id=0).unique().tolist() == [2]
        kept = Proposal(**filtered, writes_mask=True).propose(logits, 1.0, uniform(50, 3), mask_id=0)
        assert kept.unique().tolist() == [0]


def test_a_mask_without_a_column_changes_nothing():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert Proposal().propose(logits, mask_id=3).tolist() == [1]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [(dict(score="margins"), "score='margins'"), (dict(scored_on="logits"), "scored_on='logits'")],
)
def test_bad_settings(chosen, message):
    with pytest.raises(ValueError, match=message):
        Proposal(**chosen)
