"""What TransformerLens's `generate` takes and returns, for a run of the denoising loop.

The loop runs every step, whatever it writes. So what ends a text there, an end token or a stop string, ends it here in
the tokens and the text that are returned. In a prompt with masks inside, each stretch that the run wrote ends by
itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat, SupportsIndex

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.model.text import require_tokenizer
from diffusion_lens.settings import check_bool, not_negative, whole_numbers

RETURN_TYPES = ("trajectory", "tokens", "str", "input")
_LOGITS = "change the logits in a hook at 'denoise.hook_logits'"
_WITH_CACHE = "denoise_with_cache returns activations by step, also those of 'denoise.hook_logits'"
# Arguments of TransformerLens's `generate` that do not exist here: their default value there, which changes nothing,
# and what to use.
INSTEAD: dict[str, tuple[Any, str]] = {
    "input": (None, "pass the prompt as the first argument"),
    "top_k": (None, _LOGITS),
    "top_p": (None, _LOGITS),
    "freq_penalty": (0.0, _LOGITS),
    "repetition_penalty": (1.0, _LOGITS),
    "forced_bos_token_id": (None, _LOGITS),
    "stop": (None, "name the texts at which it stops stop_strings="),
    "stopping_criteria": (None, "cut the text that is returned"),
    "padding_side": (None, "texts of several lengths are padded as the model needs"),
    "output_logits": (False, _WITH_CACHE),
    "return_cache": (False, _WITH_CACHE),
    "names_filter": (None, _WITH_CACHE),
    "return_input_tokens": (False, "the tokens that are returned begin with the prompt"),
    "device": (None, "move the model"),
    "pixel_values": (None, "these models read text only"),
}


def refuse_others(given: Mapping[str, Any]) -> None:
    """Raise a `TypeError` that says what to use for arguments of `INSTEAD`, unless they have their default there."""
    refused = []
    for name, value in given.items():
        default, instead = INSTEAD[name]
        if value is not default and not (isinstance(value, int | float) and value == default):
            refused.append(f"{name}: {instead}")
    if refused:
        raise TypeError(f"generate does not take {'; '.join(refused)}")


def temperature_of(do_sample: bool | None, temperature: SupportsFloat | None) -> float:
    """The temperature of the loop."""
    given = None if temperature is None else not_negative("temperature", temperature)
    if do_sample is None:
        return given or 0.0
    if check_bool("do_sample", do_sample):
        if given == 0:
            raise ValueError(
                "do_sample=True needs a temperature above 0; leave do_sample out to take the likeliest token"
            )
        return 1.0 if given is None else given
    if given:
        raise ValueError(
            f"do_sample=False takes the likeliest token, so temperature={given} has no effect; leave one out"
        )
    return 0.0


def end_tokens(model: Any, given: SupportsIndex | Sequence[SupportsIndex] | None) -> list[int]:
    """The ids at which a text ends: those that are given, or the tokenizer's end token, if it has one."""
    if given is None:
        given = getattr(model.tokenizer, "eos_token_id", None)
    ends = [] if given is None else whole_numbers("eos_token_id", given)
    if unknown := [end for end in ends if not 0 <= end < model.cfg.d_vocab]:
        raise ValueError(f"eos_token_id={unknown[0]} is not among the {model.cfg.d_vocab} tokens of the model")
    return ends


def ended_positions(
    model: Any, trajectory: Trajectory, ends: Sequence[int], stop_strings: str | Sequence[str] | None
) -> Bool[Tensor, "batch pos"]:
    """The positions that the run wrote from the first end token of a stretch on, and after a token that completes a
    stop string."""
    written = ~trajectory.given & trajectory.real
    n_ends = torch.isin(trajectory.tokens, torch.tensor(ends, dtype=torch.long)).cumsum(dim=1)
    n_before_stretch = n_ends.masked_fill(written, 0).cummax(dim=1).values
    ended: Tensor = n_ends > n_before_stretch
    stops = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or ())
    if "" in stops:
        raise ValueError("stop_strings contains an empty text, at which every text would end")
    for row, tokens in enumerate(trajectory.tokens if stops else ()):
        stretch: list[int] = []
        for position in written[row].nonzero().flatten().tolist():
            stretch = [*stretch, position] if stretch and stretch[-1] == position - 1 else [position]
            before = ended[row, position - 1] if len(stretch) > 1 else False
            ended[row, position] |= before or any(stop in model.to_string(tokens[stretch[:-1]]) for stop in stops)
    return ended


def filled_with_ends(
    model: Any, trajectory: Trajectory, ended: Bool[Tensor, "batch pos"], ends: Sequence[int]
) -> Int[Tensor, "batch pos"]:
    """The tokens, with an end token wherever a text has ended."""
    if not ended.any():
        return trajectory.tokens
    if not (ends := ends or end_tokens(model, None)):
        raise ValueError(
            f"a text has ended, and {model.cfg.model_name!r} has no end token for the positions after it: pass "
            "eos_token_id=, or take return_type='str'"
        )
    return trajectory.tokens.masked_fill(ended, ends[0])


def text_of(model: Any, trajectory: Trajectory, row: int, kept: Bool[Tensor, "pos"]) -> str:
    """The text of some positions of one row, without a given BOS at the beginning."""
    shown = (trajectory.real[row] & kept).nonzero().flatten()
    bos = require_tokenizer(model).bos_token_id
    if len(shown) and int(trajectory[row][shown[0]]) == bos and bool(trajectory.given[row, shown[0]]):
        shown = shown[1:]
    return str(model.to_string(trajectory[row][shown]))
