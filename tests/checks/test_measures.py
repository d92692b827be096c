"""When a change of a model explains its loss on a page."""

import pytest
import torch

from diffusion_lens.checks.diagnosis import PageMeasure

RIGHT = (0.999, 1.001)
N = 1000


def parts(loss, spread=0.0, few=0.0):
    """A thousand tokens that sum to `loss`: alike, each off by a drawn amount, or ten of them with `few` more."""
    losses = torch.full((N,), loss / N, dtype=torch.float64)
    drawn = torch.randn(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * spread / N
    losses += drawn - drawn.mean()
    losses[:10] += few / 10
    return losses - few / N


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (parts(1.5), parts(1.0, spread=1.0), "explains"),
        (parts(1.5), parts(1.6), "worse"),
        (parts(1.0), parts(1.01, spread=0.5), "worse"),
        # By less than chance, from just outside to just inside, or to the right loss itself.
        (parts(1.002), parts(1.0005, spread=0.1), "same"),
        (parts(0.998), parts(0.9995, spread=0.1), "same"),
        (parts(1.002), parts(1.0, spread=0.1), "explains"),
        (parts(0.998), parts(1.0, spread=0.1), "explains"),
        (parts(1.002), parts(1.0005), "explains"),
        # A few tokens carry all of it, so no error of the mean tells; but it is much.
        (parts(1.05, few=0.05), parts(1.0), "explains"),
        # Less than the noise of the page: it has to be a hundredth.
        (parts(1.0125, spread=1.0), parts(1.0005), "explains"),
        (parts(1.009, spread=1.0), parts(1.0005), "same"),
        # Likelier than the right model finds it, and likelier still.
        (parts(0.99), parts(0.9), "same"),
        (parts(0.99), parts(1.5), "worse"),
        (parts(float("nan")), parts(1.0), "explains"),
    ],
)
def test_a_change_explains_where_it_undoes_a_mistake(before, after, verdict):
    measure = PageMeasure(torch.zeros(1, 1, dtype=torch.long), vocabulary=1000, right=RIGHT)
    assert measure.judge(before.float(), after.float()) == verdict


@pytest.mark.parametrize(
    ("share", "gain", "verdict"), [(0.01, 0.009, "same"), (0.01, 0.011, "explains"), (0.3, 0.011, "same")]
)
def test_without_a_known_loss_the_gain_has_to_be_a_share_of_the_loss(share, gain, verdict):
    measure = PageMeasure(torch.zeros(1, 1, dtype=torch.long), vocabulary=1000, share=share)
    assert measure.judge(parts(1.0).float(), parts(1.0 - gain).float()) == verdict
