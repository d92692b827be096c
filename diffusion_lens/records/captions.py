"""Captions: what a picture shows, of which model and with which settings, in words, from the record of its result.

Every setting that decides the numbers is said, those that readers look for first, and nothing that only says how the
computation went, such as the time it took or the size of a batch.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from diffusion_lens.model.config import name_with_mode

_HASH = 12  # digits of a hash
_LONGEST = 60  # characters of a text that is said
_LISTED = 4  # numbers or hooks that are listed one by one
# Settings in the order in which they are said. Others follow, in the order of the record.
_FIRST = (
    "kind",
    "site",
    "severed",
    "corruption",
    "swap",
    "noise",
    "window",
    "samples",
    "facts",
    "occurrence",
    "length",
    "n_masks",
    "first_tokens",
    "sampler",
    "steps",
    "cfg_scale",
    "temperature",
    "seed",
    "seeds",
    "canvas",
    "replay",
    "hooks",
)
# Entries that say which model it is, which is said elsewhere, or how the computation went.
_NOT_SAID = (
    "model",
    "mode",
    "weights_sha256",
    "tokenizer_sha256",
    "device",
    "corpus",
    "key",
    "blank",
    "first_step",
    "seconds",
    "forward_passes",
    "batch_size",
    "max_bytes",
    "compared_from",
    "replayed_from",
    "n_steps",
    "other",
)
_LOOKS = ("ax", "title", "limits", "folded", "cmap", "size", "font_size", "label", "against")  # of arguments of `plot`
_COUNTED = {"facts": "fact", "deltas": "delta"}
_NUMBERS = ("steps", "seeds", "layers", "swap")  # settings that may be lists of numbers
_GROUPS = ("sampler", "loaded_with")  # settings with options of their own


def shown_model(record: Mapping[str, Any]) -> str:
    """The name of the model of a record, with its mode, `name@mode`, where one checkpoint is several models."""
    return name_with_mode(str(record["model"]), record.get("mode"))


def say_settings(record: Mapping[str, Any]) -> str:
    """Model, settings and hash of the weights in one line, from a record; empty for an empty record."""
    hashes = _each(record, _hash_of)
    return ", ".join([*_models(record), *_said(record), *(f"weights {sha256}" for sha256 in hashes)])


def caption_of(shows: str, record: Mapping[str, Any]) -> str:
    """The caption of a picture that shows this, from the record of its result.

    Of a record that has that of a second run as "other", both models are named and what differs in their settings.
    """
    models, settings, hashes = _models(record), _said(record), _each(record, _hash_of)
    said = []
    if settings:
        said.append(f"{'the settings are' if len(settings) > 1 else 'the setting is'} {', '.join(settings)}")
    if hashes:
        said.append(
            f"the SHA-256 of the weights {'begins' if len(hashes) == 1 else 'begin'} with {' and '.join(hashes)}"
        )
    second = "; ".join(said)
    of = f"For {' and '.join(models)}, the figure" if models else "The figure"
    return f"{of} shows {shows}." + (f" {second[0].upper()}{second[1:]}." if second else "")


def selection_of(plot: Callable[..., Any], selected: Mapping[str, Any]) -> str:
    """The arguments of `plot` that choose what is drawn, in words; a `TypeError` if it takes no such argument."""
    fitting = [name for name in signature(plot).parameters if name not in _LOOKS]
    if unknown := [name for name in selected if name not in fitting]:
        takes = f"plot takes {', '.join(fitting)}" if fitting else "this picture has nothing to choose"
        raise TypeError(f"caption() got {unknown[0]!r}, which does not choose what is drawn; {takes}")
    words = [f"{name.replace('_', ' ')} {value}" for name, value in selected.items() if value is not None]
    return f", {' and '.join(words)}" if words else ""


def _each(record: Mapping[str, Any], say: Any) -> list[str]:
    """What `say` says of the record, and of that of the second run if it says something else."""
    records = [record, record["other"]] if isinstance(record.get("other"), dict) else [record]
    return list(dict.fromkeys(filter(None, map(say, records))))


def _models(record: Mapping[str, Any]) -> list[str]:
    return _each(record, lambda each: shown_model(each) if each.get("model") else "")


def _hash_of(record: Mapping[str, Any]) -> str:
    return str(record.get("weights_sha256") or "")[:_HASH]


def _said(record: Mapping[str, Any]) -> list[str]:
    """The settings in words; of two runs those that they share, and then those of each."""
    first = _in_words(record)
    if not isinstance(record.get("other"), dict):
        return list(first.values())
    second = _in_words(record["other"])
    shared = [words for name, words in first.items() if second.get(name) == words]
    for which, own, other in (("first", first, second), ("second", second, first)):
        different = [words for name, words in own.items() if other.get(name) != words]
        different += [f"no {name}" for name in ("hooks", "replay") if name in other and name not in own]
        if different:
            shared.append(f"in the {which} run {' and '.join(different)}")
    return shared


def _in_words(record: Mapping[str, Any]) -> dict[str, str]:
    """Each setting in words, by its name."""
    loop = record["loop"] if isinstance(record.get("loop"), dict) else {}
    # Settings of the loop have names of their own, unless the analysis has one of the same name.
    entries = {**{f"{name} of the loop" if name in record else name: x for name, x in loop.items()}, **record}
    said = sorted(
        (name for name in entries if name.removesuffix(" of the loop") not in _NOT_SAID),
        key=lambda name: _FIRST.index(plain) if (plain := name.removesuffix(" of the loop")) in _FIRST else len(_FIRST),
    )
    both = {"seeds": "seeds of the run"} if "seed" in record else {}
    words = {name: _setting(both.get(name, name).replace("_", " "), name, entries[name]) for name in said}
    return {name: each for name, each in words.items() if each}


def _setting(spoken: str, name: str, value: Any) -> str:
    """A setting in words; empty for one that is not set, or takes more than a few."""
    if isinstance(value, bool):
        return spoken if value else f"no {spoken}"
    if isinstance(value, int | float):
        return f"{spoken} {value:.4g}" if isinstance(value, float) else f"{spoken} {value}"
    if isinstance(value, str):
        return f"{spoken} {value}" if 0 < len(value) <= _LONGEST else ""
    if not value:
        return ""
    if name in _COUNTED:
        return f"{len(value):,} {spoken if len(value) > 1 else _COUNTED[name]}"
    if name == "hooks" and isinstance(value, dict):
        return _hooks(value)
    if isinstance(value, dict):
        return f"{spoken} {_group(value)}" if name.removesuffix(" of the loop") in _GROUPS else ""
    numbers = list(value) if isinstance(value, list | tuple) and name in _NUMBERS else []
    if not numbers or not all(isinstance(number, int) for number in numbers):
        return ""
    if len(numbers) == 1 and spoken.startswith("seeds"):
        return f"{spoken.replace('seeds', 'seed', 1)} {numbers[0]}"
    return f"{spoken} {_listed(numbers)}"


def _listed(numbers: list[int]) -> str:
    """Numbers one by one, as a range, or, where they are many, the ends and how many there are."""
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{numbers[0]} to {numbers[-1]}"
    if len(numbers) <= 2 * _LISTED:
        return " ".join(map(str, numbers))
    return f"{' '.join(map(str, numbers[:_LISTED]))} … {numbers[-1]} ({len(numbers)} of them)"


def _group(options: Mapping[str, Any]) -> str:
    """The name of a group of settings, and those that are set."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= value if isinstance(value, dict) else {name: value}
    words = [
        _setting(name.replace("_", " "), name, value)
        for name, value in flat.items()
        if name != "name" and value is not None and value is not False
    ]
    own = [*map(str, filter(None, [options.get("name")])), *([f"({', '.join(filter(None, words))})"] if words else [])]
    return " ".join(own)


def _hooks(attached: Mapping[str, Any]) -> str:
    """The hook points with functions of the user, by name if they are few."""
    named = ", ".join(attached) if len(attached) <= _LISTED else f"{', '.join([*attached][:_LISTED])} …"
    return f"{len(attached)} {'hook' if len(attached) == 1 else 'hooks'} ({named})"
