"""A network that reads the time without a schedule of noise: each measure under noise says what to set."""

import pytest
import torch
from random_dictionaries import Identity
from small_networks import small_architecture, with_time_conditioning

from diffusion_lens.analysis import dictionary_loss, second_moment
from diffusion_lens.evaluation import chain_rule_nll, monte_carlo_nll
from weight_conversion import NoiseSchedule

TEXTS = torch.randint(3, 30, (3, 9), generator=torch.Generator().manual_seed(0))
MEASURES = {
    "dictionary_loss": lambda model: dictionary_loss(model, TEXTS, "blocks.0.hook_resid_post", Identity()).loss().value,
    "second_moment": lambda model: second_moment(model, TEXTS, 0).relative_error(),
    "chain_rule_nll": lambda model: chain_rule_nll(model, TEXTS[0, :6], TEXTS[0, 6:]).item(),
    "monte_carlo_nll": lambda model: monte_carlo_nll(model, TEXTS[0, :6], TEXTS[0, 6:], samples=32).value,
}


@pytest.mark.parametrize("name", MEASURES)
def test_an_unknown_schedule_is_refused_with_a_way_on(name):
    from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer

    architecture = small_architecture(mask_token_id=39, **with_time_conditioning())
    model = HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"), seed=3)
    with pytest.raises(ValueError, match=r"names no schedule of noise.*model\.cfg\.schedule = .*NoiseSchedule"):
        MEASURES[name](model)
    model.cfg.schedule = NoiseSchedule("log_linear")
    known = MEASURES[name](model)
    assert known > 0
    # With another largest noise, a text that is all masked is read at another time.
    model.cfg.schedule = NoiseSchedule("log_linear", eps=0.3)
    if name != "second_moment":
        assert MEASURES[name](model) != known
