"""A dictionary, such as a sparse autoencoder (SAE), in the place of an activation.

A dictionary encodes an activation x as features, most of which are zero, and decodes them to an approximation of x. A
splice replaces x by this reconstruction, to which it adds the error term, the difference between x and the
reconstruction, unless told otherwise (Marks et al. 2024, arXiv 2403.19647):

    without error term    decode(edit(encode(x)))
    with error term       decode(edit(encode(x))) + (x - decode(encode(x)))

With the error term, a splice without an edit changes nothing, and a splice with an edit has the effect of the edit
alone. For gradients the error term is a constant, as with `use_error_term` of SAELens: the gradient of a metric reaches
the features, and through the encoder the layers below.

A `SparseDictionary` that writes another hook point than it reads, such as a transcoder, is spliced at both: the one
hook keeps x where it is read, and replaces y where it is written.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffusion_lens.analysis.dictionaries.sparse import SparseDictionary
from diffusion_lens.analysis.engine.inputs import check_vectors
from diffusion_lens.hooks.names import Hook
from diffusion_lens.model.config import reached
from diffusion_lens.model.shapes import PosMask
from diffusion_lens.records.identity import names_its_hook
from diffusion_lens.settings import checked_arguments

Edit = Callable[[Tensor, Any], Tensor | None]


@runtime_checkable
class Dictionary(Protocol):
    """Any object with these two methods, such as an SAE of SAELens or of dictionary_learning.

    `encode` takes Float[batch pos d] and returns Float[batch pos feature]; `decode` takes these features and returns
    Float[batch pos d].
    """

    def encode(self, x: Any) -> Any: ...

    def decode(self, features: Any) -> Any: ...


@checked_arguments
@names_its_hook
def splice(
    dictionary: Dictionary,
    *,
    error_term: bool = True,
    edit: Edit | None = None,
    share: float | Float[Tensor, "batch"] | None = None,
) -> Hook:
    """A hook that puts a dictionary's reconstruction in the place of the activation.

    It works like the hooks of `interventions`: at any hook point [batch pos ...], in `run_with_hooks` and in the loop,
    inside `at_steps`, `while_masked` and `on_branch`. Axes of heads are flattened, so that the width d of a dictionary
    at `attn.hook_z` is head times d_head. A dictionary that is a module computes in the dtype of its weights; the
    result has the dtype of the activation. The name of the hook in records contains a hash of the weights.

    A dictionary gets copies, into which it may write. It may keep what `encode` has seen until the next `decode`, as
    SAEs of SAELens with `normalize_activations="layer_norm"` do: each `decode` follows an `encode` of its own.

    Args:
        dictionary: Object with `encode` and `decode`. Attach the hook of a transcoder to both of its hook points:
            `fwd_hooks=[(dictionary.reads, hook), (dictionary.writes, hook)]`.
        error_term: Whether the error of the unedited reconstruction is added.
        edit: Function `edit(features, hook)` that returns new features, or writes into those that it gets, which are a
            copy. In the loop, `hook.step` is the step. To get the gradient of a metric with respect to the features,
            let this function call `features.retain_grad()` and keep the features.
        share: Share of masked positions of each canvas, for a conditioned dictionary. By default that of the canvas of
            `hook.step`, which there is in the loop.

    Raises:
        TypeError: The dictionary lacks a method, or one returns something else than a tensor.
        ValueError: The dictionary reshapes heads itself, as SAEs of SAELens for hook_z do. When the hook is called: the
            dictionary has another width than the activation, or is on another device; or the hook point has no vector
            for each position, such as one of attention patterns.
    """
    check_dictionary(dictionary)
    kept: dict[str | None, Tensor] = {}  # x of a transcoder between its hook points, by branch of guidance

    def hook_fn(activation: Tensor, hook: Any) -> Tensor | None:
        # 1. Features and their reconstruction, in the dictionary's dtype.
        x = y = vectors(activation, hook)
        if isinstance(dictionary, SparseDictionary) and dictionary.reads != dictionary.writes:
            branch = None if hook.step is None else hook.step.branch
            if hook.name == dictionary.reads:
                kept[branch] = x
                return None
            if hook.name != dictionary.writes or branch not in kept:
                raise ValueError(
                    f"this dictionary reads {dictionary.reads!r} and writes {dictionary.writes!r}; attach its splice "
                    f"to both, and not to {hook.name!r} alone"
                )
            x = kept.pop(branch)
        given = _given_share(dictionary, share, hook)
        features = _encoded(dictionary, x, hook, given)
        edited = features if edit is None else _edited(edit, features, hook)
        unedited = reconstruction = _decoded(dictionary, edited, y, hook)
        # 2. The error term. Without an edit the difference is exactly 0 in value, and carries the gradient of the
        #    features.
        if error_term:
            if edit is not None:
                with torch.no_grad():
                    _encoded(dictionary, x, hook, given)  # for what a dictionary keeps until `decode`
                    unedited = _decoded(dictionary, features, y, hook)
            reconstruction = y.detach() + (reconstruction - unedited.detach())
        return reconstruction.to(activation.dtype).reshape(activation.shape)

    return hook_fn


def check_dictionary(dictionary: Any) -> None:
    """Raise a `TypeError` unless an object has `encode` and `decode`; a `ValueError` if it reshapes heads itself."""
    missing = [name for name in ("encode", "decode") if not callable(getattr(dictionary, name, None))]
    if missing:
        raise TypeError(
            f"a {type(dictionary).__name__} is no dictionary: it has no method {' and no '.join(missing)}. Give an "
            "object with encode(x) and decode(features)"
        )
    if getattr(dictionary, "hook_z_reshaping_mode", False):
        raise ValueError(
            f"this {type(dictionary).__name__} flattens heads itself, and a splice gives it flattened ones: call "
            "dictionary.turn_off_forward_pass_hook_z_reshaping()"
        )


def vectors(activation: Tensor, hook: Any) -> Float[Tensor, "batch pos d"]:
    """An activation with one vector for each position: heads are flattened."""
    check_vectors(hook)
    if activation.dim() < 3 or not activation.is_floating_point():
        raise ValueError(
            f"{hook.name!r} is {activation.dtype} {list(activation.shape)}, and a dictionary needs a vector for each "
            "position: use a hook point such as hook_resid_post"
        )
    return activation.flatten(2)


def only_at(hook_fn: Hook, positions: PosMask) -> Hook:
    """The hook, with its effect at some positions [batch pos] only."""

    def wrapped(activation: Tensor, hook: Any) -> Tensor:
        new = hook_fn(activation, hook)
        return torch.where(positions.view(*positions.shape, *[1] * (activation.dim() - 2)), new, activation)

    return wrapped


def _given_share(dictionary: Dictionary, share: Any, hook: Any) -> tuple[Any, ...]:
    """What `encode` of a conditioned dictionary gets beside x: the share of masked positions [batch 1]."""
    if not isinstance(dictionary, SparseDictionary) or not dictionary.conditioned:
        return ()
    if share is None and hook.step is not None:
        step, blank = hook.step, dictionary.record["architecture"]["mask_token_id"]
        inside = reached(step.tokens) if step.real is None else reached(step.tokens) & step.real
        hidden = step.tokens == blank if step.branch == "conditional" else (step.tokens == blank) | step.given
        share = (hidden & inside).sum(dim=1) / inside.sum(dim=1)
    return (share[:, None] if isinstance(share, Tensor) else share,)


def _encoded(dictionary: Dictionary, x: Tensor, hook: Any, share: tuple[Any, ...]) -> Tensor:
    given = x
    stored = chain(dictionary.parameters(), dictionary.buffers()) if isinstance(dictionary, nn.Module) else ()
    weight = next((each for each in stored if each.is_floating_point()), None)
    if weight is not None:
        if weight.device != x.device:
            raise ValueError(
                f"the dictionary is on {weight.device}, and the activation at {hook.name!r} on {x.device}: call "
                f"dictionary.to('{x.device}')"
            )
        given = x.to(weight.dtype)
    features = _called(dictionary, "encode", given, x, hook, share)
    if features.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"encode of {type(dictionary).__name__} returned {list(features.shape)} for an activation {list(x.shape)} "
            f"at {hook.name!r}; it must return [batch, pos, number of features]"
        )
    return features


def _decoded(dictionary: Dictionary, features: Tensor, x: Tensor, hook: Any) -> Tensor:
    decoded = _called(dictionary, "decode", features, x, hook)
    if decoded.shape != x.shape:
        raise ValueError(
            f"decode of {type(dictionary).__name__} returned {list(decoded.shape)} for an activation {list(x.shape)} "
            f"at {hook.name!r}: the dictionary must have the width {x.shape[-1]} there"
        )
    return decoded


def _edited(edit: Edit, features: Tensor, hook: Any) -> Tensor:
    copy = features.clone()
    returned: Any = edit(copy, hook)
    if returned is None:
        return copy
    if not isinstance(returned, Tensor) or returned.shape != features.shape:
        given = list(returned.shape) if isinstance(returned, Tensor) else type(returned).__name__
        raise ValueError(f"edit returned {given}; it must return features of the shape {list(features.shape)}, or None")
    return returned


def _called(
    dictionary: Dictionary, method: str, given: Tensor, x: Tensor, hook: Any, share: tuple[Any, ...] = ()
) -> Tensor:
    """What a method of the dictionary returns for a copy; an error of shapes names the hook point and its width."""
    called = f"{method} of {type(dictionary).__name__}"
    try:
        returned = getattr(dictionary, method)(given.clone(), *share)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ValueError(
            f"{called} failed at {hook.name!r}, whose activation is {x.dtype} {list(x.shape)} (heads are flattened): "
            f"{error}. The dictionary must have the width {x.shape[-1]} there"
        ) from error
    if not isinstance(returned, Tensor):
        raise TypeError(f"{called} returned {type(returned).__name__}; it must return a tensor: wrap the dictionary")
    return returned
