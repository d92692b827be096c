"""The cost of keys and of the search for v*, as `analysis.rome` computes them without hooks of the caller.

The blocks up to the layer run once. Those above it run in every iteration, at the positions that the edited one changes
and a row that is read depends on; keys and values of other positions come from one pass (`rome.blocks_above`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from diffusion_lens.analysis.rome.search import ValueSettings
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.cost.memory import widest
from diffusion_lens.cost.passes import Cost, Pass, total
from diffusion_lens.cost.vectors import up_to
from diffusion_lens.facts import Query
from diffusion_lens.model.packing import rows_of_least_work
from diffusion_lens.readout import READOUTS
from diffusion_lens.settings import pick_indices

_CANVASES = 64  # that one search has at most, by default (`optimize_values`)


class _Canvas(NamedTuple):
    """Numbers of positions of a canvas: in all, computed in every iteration, computed once, and read."""

    length: int
    moved: int
    known: int
    read: int


def keys_and_values(
    cfg: DiffusionConfig,
    requests: Sequence[Sequence[Query]],
    layers: Iterable[int] | None = None,
    settings: ValueSettings | None = None,
    essences: Sequence[Query] | None = None,
    batch_size: int = 32,
) -> Cost:
    """The cost of k* and v* of requests at every layer, as in `study_keys_and_values(...)`, if no search stops early.

    Args:
        cfg: Config of the model.
        requests: The plain prompt of each request, and the prompt after each prefix.
        layers: Layers; by default all but the last.
        settings: Settings of the search.
        essences: The essence of each request; by default the subject and two more tokens.
        batch_size: Number of requests searched together.

    Raises:
        ValueError: There is no request.
    """
    search = settings or ValueSettings()
    chosen = pick_indices("layers", range(cfg.n_layers - 1) if layers is None else layers, cfg.n_layers)
    of_requests = []
    for index, request in enumerate(requests):
        essence = None
        if search.kl_factor:
            essence = _default_essence(cfg, request[0]) if essences is None else essences[index]
        of_requests.append(_canvases(cfg, request, essence, search.over_states))
    starts = range(0, len(of_requests), batch_size)
    searched = total(
        _of_batch(cfg, of_requests[start : start + batch_size], search, layer) for start in starts for layer in chosen
    )
    # The keys and the values of a batch name their network.
    return replace(searched, records=2 * len(starts) * len(chosen))


def _of_batch(
    cfg: DiffusionConfig, batch: Sequence[tuple[list[_Canvas], int]], search: ValueSettings, layer: int
) -> Cost:
    """The keys of some requests, and their searches."""
    prompts = [canvas.length for canvases, n_prompts in batch for canvas in canvases[:n_prompts]]
    together = max(1, _CANVASES // max(len(canvases) for canvases, _ in batch))
    cost = up_to(cfg, len(prompts), max(prompts), layer)
    for start in range(0, len(batch), together):
        cost += _search(
            cfg, [each for canvases, _ in batch[start : start + together] for each in canvases], search, layer
        )
    return cost


def _search(cfg: DiffusionConfig, canvases: Sequence[_Canvas], search: ValueSettings, layer: int) -> Cost:
    """The search for requests with these canvases; the last iteration needs no gradient."""
    depth, n_read = cfg.n_layers, sum(canvas.read for canvas in canvases)
    passes: Counter[Pass] = Counter()
    longest = max(canvas.length for canvas in canvases)
    passes[Pass(len(canvases), longest, 0, layer + 1)] += 1
    if any(canvas.known for canvas in canvases) and layer + 1 < depth:
        rows, columns = _packed(cfg, [canvas.known for canvas in canvases])
        passes[Pass(rows, columns, layer + 1, depth)] += 1
    rows, columns = _packed(cfg, [canvas.moved for canvas in canvases])
    above = Pass(rows, columns, layer + 1, depth, n_read / rows)
    passes[above] += 1
    passes[replace(above, gradient="states")] += search.steps - 1
    return Cost(cfg, passes, widest(cfg, passes), steps=search.steps)


def _packed(cfg: DiffusionConfig, lengths: Sequence[int]) -> tuple[int, int]:
    """Rows and columns in which positions of several canvases stand side by side."""
    lengths = [length for length in lengths if length]
    of_maps = 4 * cfg.d_model**2 + 3 * cfg.d_model * (cfg.d_mlp or 0)
    rows = rows_of_least_work(lengths, of_maps, 2 * cfg.n_heads * cfg.d_head)
    columns: Counter[int] = Counter()
    for row, length in zip(rows, lengths, strict=True):
        columns[row] += length
    return len(columns), max(columns.values())


def _canvases(
    cfg: DiffusionConfig, request: Sequence[Query], essence: Query | None, over_states: str
) -> tuple[list[_Canvas], int]:
    """The canvases of a request, and the number of its prompts, which come first."""
    objects = []
    for query in request:
        n_tokens = len(query.answer_tokens)
        states = 1 if cfg.grows or over_states == "masked" else 2 * n_tokens - 1
        objects += [_canvas(cfg, query)] * states
    return objects + ([] if essence is None else [_canvas(cfg, essence)]), len(request)


def _canvas(cfg: DiffusionConfig, query: Query) -> _Canvas:
    length, edited = len(query.tokens), query.subject[1] - 1
    positions = torch.tensor(query.answer_positions or (length - (not cfg.grows),), dtype=torch.long)
    rows: list[int] = READOUTS[cfg.readout].rows(positions).tolist()
    size = cfg.block_size
    if size is None or size >= length or cfg.counts_from_prompt:
        return _Canvas(length, length, 0, len(rows))
    # Nothing before the block of the edited position changes, and nothing behind that of the last row is read.
    first = edited // size * size
    end = min(max(*rows, edited) // size * size + size, length)
    return _Canvas(length, end - first, first, len(rows))


def _default_essence(cfg: DiffusionConfig, query: Query) -> Query:
    """ "{subject} is a", and a position to read where the text does not grow."""
    n_subject = query.subject[1] - query.subject[0]
    n_tokens = n_subject + 2 + (not cfg.grows)
    return Query(torch.zeros(n_tokens, dtype=torch.long), (0, n_subject), (), ())
