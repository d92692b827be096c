"""Predictions that other programs recorded, as rows of which `Predictions.read` makes one batch.

JSON lines: the plain format that `Predictions.read` describes.

Prophet: the .pt files of `save_question_histories` in pixeli99/Prophet (commit 460afe41,
`analysis/collect_decoding_traj_gsm8k.py`), as in the data set YefanZhou98/DLM-Decoding-Analysis. For each block,
`x0_history` has the likeliest token at every position of the canvas, also where a token is written already, and
`true_indices_history` the positions that each step wrote. Probabilities are not kept, nor the tokens of the prompt.

Step maps: responses of sglang with `return_step_maps` (sgl-project/sglang, pull request 27943). Beside the tokens of a
response, `meta_info.step_maps` has the step that wrote each, from 1, counted anew in every block. Blocks begin at
multiples of their length on the whole text, prompt included. What the network predicted at other steps is not kept.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffusion_lens.settings import Whole, at_least
from diffusion_lens.settings.arguments import kind_of

_FIELDS = ("written", "steps", "first_step", "revealed_at", "words", "model")
_FIELDS_OF_A_STEP = ("pos", "tokens", "probabilities", "entropy")
_ROUNDING = 1e-3  # of numbers that other programs may have rounded
UNKNOWN = -1  # the token of a position that a file does not know, and the step that wrote it


class RecordedRow(NamedTuple):
    """One run. Its predictions are in the order of step and position.

    Attributes:
        name: Where it was read, for messages.
    """

    name: str
    first_step: int
    written: Int[Tensor, "pos"]
    revealed_at: Int[Tensor, "pos"]
    masked: Bool[Tensor, "step pos"]
    tokens: Int[Tensor, "entry top"]
    probabilities: Float[Tensor, "entry top"]
    entropy: Float[Tensor, "entry"]
    words: dict[int, str]
    model: str | None


def read_rows(source: Any, block_length: Whole | None) -> list[RecordedRow]:
    """The runs in a file or in data that was read already."""
    rows = [_row(_Fields(name, data), block_length) for name, data in _entries(source)]
    if not rows:
        raise ValueError(f"{source} contains no run")
    sizes = {row.tokens.shape[1]: row.name for row in rows if len(row.tokens)}
    if len(sizes) > 1:
        said = ", ".join(f"{size} in {name}" for size, name in sizes.items())
        raise ValueError(f"tokens: the number of tokens at a position differs ({said}); record the same number in all")
    models = {row.model: row.name for row in rows if row.model is not None}
    if len(models) > 1:
        said = ", ".join(f"{model!r} in {name}" for model, name in models.items())
        raise ValueError(f"model: the runs are of different models ({said}); read those of each by themselves")
    return rows


def joined(rows: Sequence[RecordedRow]) -> dict[str, Any]:
    """The runs as one batch, filled at the end: arguments of `Predictions.of` without words and record."""
    n_pos, top = max(len(row.written) for row in rows), max(row.tokens.shape[1] for row in rows)
    first = min(row.first_step for row in rows)
    steps = range(first, max(row.first_step + len(row.masked) for row in rows))
    masked = torch.zeros(len(steps), len(rows), n_pos, dtype=torch.bool)
    written = torch.full((len(rows), n_pos), UNKNOWN)
    revealed_at = torch.full_like(written, UNKNOWN)
    tokens = torch.zeros(*masked.shape, top, dtype=torch.long)
    probabilities, entropy = torch.zeros(*masked.shape, top), torch.zeros(masked.shape)
    for i, row in enumerate(rows):
        own, n = slice(row.first_step - first, row.first_step - first + len(row.masked)), len(row.written)
        masked[own, i, :n], written[i, :n], revealed_at[i, :n] = row.masked, row.written, row.revealed_at
        for table, entries in ((tokens, row.tokens), (probabilities, row.probabilities), (entropy, row.entropy)):
            table[own, i, :n][row.masked] = entries
    return {
        "tokens": tokens[masked],
        "probabilities": probabilities[masked],
        "entropy": entropy[masked],
        "masked": masked,
        "steps": list(steps),
        "written": written,
        "revealed_at": revealed_at,
        "n_steps": torch.tensor([row.first_step + len(row.masked) for row in rows]),
    }


class _Fields:
    """The fields of one run, which are checked as they are read; messages say where it is and which field."""

    def __init__(self, name: str, data: Any) -> None:
        self.name, self.data = name, data
        if not isinstance(data, Mapping):
            raise ValueError(f"{name}: a run is a mapping of its fields, and this is {kind_of(data)}")

    def fail(self, field: str, said: str) -> NoReturn:
        raise ValueError(f"{self.name}: {field} {said}")

    def get(self, field: str) -> Any:
        """The value of a field that must be there."""
        if field not in self.data:
            self.fail(field, "is missing")
        return self.data[field]

    def table(self, field: str, value: Any, shape: tuple[int | None, ...], whole: bool) -> Any:
        """Numbers as an array of this shape, with `None` for any size; `null` is NaN where they need not be whole."""
        try:
            array = np.asarray(value, None if whole else np.float64)
        except (ValueError, TypeError):
            array = np.empty(0, object)
        if array.size == 0 and (0 in shape or shape == (None,)):  # an empty list has no type, and no second axis
            array = np.zeros([size or 0 for size in shape], np.int64 if whole else np.float64)
        of_shape = len(shape) == array.ndim and all(a in (None, b) for a, b in zip(shape, array.shape, strict=True))
        if not of_shape or array.dtype.kind not in ("iu" if whole else "f"):
            first, second = (["", ""] + ["" if size is None else f"{size} " for size in shape])[-2:]
            kind = "whole number" if whole else "number"
            words = (f"a {kind}", f"a list of {second}{kind}s", f"{first}lists of {second}{kind}s, as many in each")
            self.fail(field, f"must be {words[len(shape)]}")
        return array

    def known(self, field: str, given: Iterable[str], names: Sequence[str]) -> None:
        """Refuse fields with other names, which may be misspelt."""
        if others := [name for name in given if name not in names]:
            self.fail(f"{field}{others[0]}", f"is no field of the format, which has {', '.join(names)}")


def _entries(source: Any) -> Iterable[tuple[str, Any]]:
    """The runs of a source as they are, each with the place where it was."""
    if isinstance(source, Mapping):
        yield "the run", source
    elif not isinstance(source, str | Path):
        yield from ((f"run {i}", each) for i, each in enumerate(source))
    elif not Path(source).is_file():
        raise FileNotFoundError(f"source={str(source)!r}: there is no such file")
    elif Path(source).suffix == ".pt":
        yield str(source), torch.load(source, map_location="cpu", weights_only=True)
    else:
        for number, line in enumerate(Path(source).read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            name = f"{source}, line {number}"
            try:
                data = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{name}: this is no JSON ({error}); each line is one run") from error
            several = data if isinstance(data, list) else [data]
            yield from ((name if len(several) == 1 else f"{name}, entry {i}", each) for i, each in enumerate(several))


def _row(fields: _Fields, block_length: Whole | None) -> RecordedRow:
    if "meta_info" in fields.data:
        return _of_step_maps(fields, block_length)
    if block_length is not None:
        raise ValueError(f"block_length= belongs to step maps, and {fields.name} has none: leave it out")
    return _of_prophet(fields) if "x0_history" in fields.data else _of_plain(fields)


def _of_plain(fields: _Fields) -> RecordedRow:
    fields.known("", fields.data, _FIELDS)
    written = fields.table("written", fields.get("written"), (None,), whole=True)
    steps, n_pos = fields.get("steps"), len(written)
    if not isinstance(steps, list) or not steps:
        fields.fail("steps", "must be a list with an entry for each step")
    first_step = fields.table("first_step", fields.data.get("first_step", 0), (), whole=True).item()
    masked, parts = np.zeros((len(steps), n_pos), dtype=bool), []
    for i, step in enumerate(steps):
        parts.append(_of_step(fields, f"steps[{i}]", step, n_pos))
        masked[i, parts[-1][0]] = True
    top = {part[1].shape[1] for part in parts if len(part[0])}
    if len(top) > 1:
        fields.fail("steps", f"have {min(top)} and {max(top)} tokens at a position; record the same number at all")
    last = np.where(masked, np.arange(len(steps))[:, None], UNKNOWN - first_step).max(axis=0) + first_step
    given = fields.data.get("revealed_at")
    revealed_at = last if given is None else fields.table("revealed_at", given, (n_pos,), whole=True)
    end = first_step + len(steps) - 1
    if first_step < 0:
        fields.fail("first_step", f"is {first_step}, and steps count from 0")
    if ((revealed_at < UNKNOWN) | (revealed_at > end)).any():
        fields.fail("revealed_at", f"must be steps up to {end}, or -1")
    words, model = fields.data.get("words", {}), fields.data.get("model")
    if not isinstance(words, Mapping) or not all(
        str(key).removeprefix("-").isdecimal() and isinstance(text, str) for key, text in words.items()
    ):
        fields.fail("words", 'must map ids to texts, {"12": " the"}')
    if not isinstance(model, str | None):
        fields.fail("model", "must be a name")
    tokens, probabilities, entropy = (
        torch.from_numpy(np.concatenate([part[i] for part in parts if len(part[0])] or [parts[0][i]]))
        for i in (1, 2, 3)
    )
    return RecordedRow(
        fields.name,
        int(first_step),
        torch.from_numpy(written).long(),
        torch.from_numpy(revealed_at).long(),
        torch.from_numpy(masked),
        tokens.long(),
        probabilities.float(),
        entropy.float(),
        {int(key): text for key, text in words.items()},
        model,
    )


def _of_step(fields: _Fields, name: str, step: Any, n_pos: int) -> tuple[Any, Any, Any, Any]:
    """Positions, tokens, probabilities and entropies of one step, in the order of the positions."""
    if not isinstance(step, Mapping):
        fields.fail(name, "must have the fields pos and tokens")
    fields.known(f"{name}.", step, _FIELDS_OF_A_STEP)
    for needed in ("pos", "tokens"):
        if needed not in step:
            fields.fail(f"{name}.{needed}", "is missing")
    pos = fields.table(f"{name}.pos", step["pos"], (None,), whole=True)
    if len(set(pos.tolist())) < len(pos) or (len(pos) and not 0 <= pos.min() <= pos.max() < n_pos):
        fields.fail(f"{name}.pos", f"must be different positions from 0 to {n_pos - 1}")
    tokens = fields.table(f"{name}.tokens", step["tokens"], (len(pos), None), whole=True)
    if tokens.size and tokens.min() < 0:
        fields.fail(f"{name}.tokens", f"has {tokens.min()}, which is no id")
    if (np.diff(np.sort(tokens, axis=1), axis=1) == 0).any():
        fields.fail(f"{name}.tokens", "must be different at each position")
    shapes = {"probabilities": tokens.shape, "entropy": pos.shape}
    numbers = {
        key: fields.table(f"{name}.{key}", step[key], shape, whole=False)
        if step.get(key) is not None
        else np.full(shape, np.nan)
        for key, shape in shapes.items()
    }
    p = numbers["probabilities"]
    if (p < 0).any() or (np.nansum(p, axis=1) > 1 + _ROUNDING * p.shape[1]).any() or (np.diff(p, axis=1) > 0).any():
        fields.fail(f"{name}.probabilities", "must be from 0 to 1, also their sum, the likeliest token first")
    if ((numbers["entropy"] < -_ROUNDING) | np.isinf(numbers["entropy"])).any():
        fields.fail(f"{name}.entropy", "must be 0 or more, in nats")
    order = np.argsort(pos)
    return pos[order], tokens[order], p[order], numbers["entropy"][order]


def _of_prophet(fields: _Fields) -> RecordedRow:
    blocks, n_given = fields.get("x0_history"), int(fields.get("prompt_token_len"))
    try:
        likeliest = torch.cat([torch.as_tensor(block) for block in blocks])
    except (TypeError, RuntimeError, ValueError):
        fields.fail("x0_history", "must have a tensor [step, pos] for each block")
    if likeliest.dim() != 2 or likeliest.is_floating_point():
        fields.fail("x0_history", "must have a tensor [step, pos] of ids for each block")
    n_steps, n_pos = likeliest.shape
    writes = [torch.as_tensor(step) for block in fields.get("true_indices_history") for step in block]
    if len(writes) != n_steps or not all(step.dim() == 2 and step.shape[1] == 2 for step in writes):
        fields.fail("true_indices_history", f"must have a tensor [index, 2] for each of the {n_steps} steps")
    ids = fields.table("gen_ids", fields.get("gen_ids"), (n_pos - n_given,), whole=True)
    written = torch.cat([torch.full((n_given,), UNKNOWN), torch.from_numpy(ids).long()])
    revealed_at = torch.full((n_pos,), UNKNOWN)
    for step, indices in reversed(list(enumerate(writes))):  # a position that is listed again was written before
        revealed_at[indices[:, 1]] = step
    # What no step writes was given: the prompt, and tokens to which the run was constrained.
    masked = (revealed_at >= torch.arange(n_steps)[:, None]) & (torch.arange(n_pos) >= n_given)
    tokens = likeliest.long()[masked][:, None]
    nothing = torch.full(tokens.shape, torch.nan)
    return RecordedRow(fields.name, 0, written, revealed_at, masked, tokens, nothing, nothing[:, 0], {}, None)


def _of_step_maps(fields: _Fields, block_length: Whole | None) -> RecordedRow:
    if block_length is None:
        raise ValueError(
            f"{fields.name} has step maps, which count the steps of each block: pass block_length=, the block size of "
            "the server, or the length of the text if they count the steps of the whole response"
        )
    size, about = (
        at_least(1, "block_length", block_length),
        _Fields(f"{fields.name}, meta_info", fields.get("meta_info")),
    )
    name = "output_ids" if "output_ids" in fields.data else "token_ids"
    written = fields.table(name, fields.get(name), (None,), whole=True)
    of_block = about.table("step_maps", about.get("step_maps"), (len(written),), whole=True)
    if not len(written) or of_block.min() < 1:
        about.fail("step_maps", "must have a step, from 1, for each token of the response")
    n_given = int(about.table("prompt_tokens", about.get("prompt_tokens"), (), whole=True))
    blocks = (np.arange(len(written)) + n_given) // size
    blocks -= blocks[0]
    lengths = np.array([of_block[blocks == block].max() for block in range(blocks[-1] + 1)])
    before = np.concatenate([[0], lengths.cumsum()])[blocks]
    steps = np.arange(lengths.sum())[:, None]
    revealed_at = torch.from_numpy(before + of_block - 1).long()
    masked = torch.from_numpy((steps >= before) & (steps <= revealed_at.numpy()))
    n = int(masked.sum())
    return RecordedRow(
        fields.name,
        0,
        torch.from_numpy(written).long(),
        revealed_at,
        masked,
        torch.zeros(n, 0, dtype=torch.long),
        torch.zeros(n, 0),
        torch.full((n,), torch.nan),
        {},
        None,
    )
