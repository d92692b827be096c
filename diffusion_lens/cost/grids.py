"""The cost of causal traces, of their averages over facts, and of patch grids."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from diffusion_lens.analysis.average_effects.token_roles import token_roles
from diffusion_lens.analysis.average_effects.trace_settings import TraceSettings
from diffusion_lens.analysis.causal_tracing.corruption import Corruption
from diffusion_lens.analysis.causal_tracing.restoration import Restoration
from diffusion_lens.analysis.patching.patch_settings import PatchSettings
from diffusion_lens.analysis.selection import Selection
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.cost.cells import Canvas, CellAt
from diffusion_lens.cost.devices import Number
from diffusion_lens.cost.loop import denoising
from diffusion_lens.cost.memory import kept_by_grid, kept_by_trace, widest
from diffusion_lens.cost.passes import Cost, Pass, total
from diffusion_lens.denoising.denoise_settings import DenoiseSettings
from diffusion_lens.facts import Query
from diffusion_lens.readout import READOUTS


def trace(
    cfg: DiffusionConfig,
    query: Query,
    restoration: Restoration,
    corruption: Corruption,
    selection: Selection | None = None,
    max_bytes: int = 2**30,
) -> Cost:
    """The cost of `trace_query(model, query, ...)` with the same arguments.

    Args:
        cfg: Config of the model.
    """
    n_positions = len(query.tokens)
    positions, layers = (selection or Selection()).within(n_positions, cfg.n_layers)
    canvas = Canvas(cfg, corruption.rows, n_positions, _rows_read(cfg, query), max_bytes)
    return _grid(canvas, query.subject, restoration, positions, layers)


def trajectory_trace(
    cfg: DiffusionConfig,
    query: Query,
    loop: DenoiseSettings,
    restoration: Restoration,
    corruption: Corruption,
    selection: Selection | None = None,
    canvas: str = "forced",
    canvases: Number | None = None,
) -> Cost:
    """The cost of a denoising run, and of `trace_steps(...)` along it.

    It is an upper bound for a model that writes by blocks, of whose canvases common beginnings are computed once.

    Args:
        cfg: Config of the model.
        loop: Settings of the run.
        canvas: "forced" or "free".
        canvases: Number of different canvases that are traced, from the step that reveals the answer's first token to
            the one that reveals the last. By default the number to expect if positions are revealed in random order.
    """
    length, given = _of_run(cfg, query)
    written = denoising(cfg, length, given, loop)
    whole = replace(query, tokens=torch.zeros(length, dtype=torch.long))
    if canvases is None:
        canvases = expected_canvases(cfg, loop.steps or 32, len(query.answer_tokens), length - given)
    # Where a text grows, the canvases of a forced run differ in the answer at most, and are traced as one.
    canvases = 1 if cfg.grows and canvas == "forced" else canvases
    of_step = trace(cfg, whole, restoration, corruption, selection)
    if loop.cfg_scale:
        rows = 1 if canvas == "forced" else 1 + corruption.rows
        of_step += Cost(cfg, Counter({Pass(rows, length, 0, cfg.n_layers, len(query.answer_positions)): 1}))
    cost = written + replace(of_step * canvases, records=1)
    return cost if canvas == "forced" else cost + denoising(cfg, length, given, loop, corruption.rows, hooked=True)


def expected_canvases(cfg: DiffusionConfig, steps: int, n_answer: int, n_written: int) -> Number:
    """Number of steps from the first token of an answer to its last, if positions are revealed in random order.

    Args:
        steps: Number of denoising steps.
        n_answer: Number of tokens of the answer.
        n_written: Number of positions that the run writes.
    """
    if cfg.grows:
        return n_answer
    if cfg.rewrites:
        return steps
    revealing = min(steps, n_written)
    return 1 + (revealing - 1) * (n_answer - 1) / (n_answer + 1)


def temporal_effect(
    cfg: DiffusionConfig,
    query: Query,
    loop: DenoiseSettings,
    restoration: Restoration,
    corruption: Corruption,
    selection: Selection | None = None,
    steps: Iterable[int] | None = None,
) -> Cost:
    """The cost of a denoising run, and of `restore_in_loop(...)` along it: at most, because branches that end alike
    are not told apart before they are run.

    Args:
        cfg: Config of the model.
        loop: Settings of the run.
        steps: Steps at which states are restored; by default all.
    """
    length, given = _of_run(cfg, query)
    of_samples = denoising(cfg, length, given, loop, corruption.rows, hooked=True)
    cost = denoising(cfg, length, given, loop) + replace(of_samples, records=1)
    in_order = sorted(of_samples.passes, key=lambda each: -each.read)
    passes = [each for each in in_order for _ in range(round(of_samples.passes[each]))]
    whole = replace(query, tokens=torch.zeros(length, dtype=torch.long))
    positions, layers = (selection or Selection()).within(length, cfg.n_layers)
    branches = len(positions) * len(layers)
    for step in range(len(passes)) if steps is None else steps:
        cost += replace(trace(cfg, whole, restoration, corruption, selection), records=0)
        cost += Cost(cfg, Counter(passes[step + 1 :])) * branches
    return cost


def average_effect(cfg: DiffusionConfig, queries: Sequence[Query], settings: TraceSettings) -> Cost:
    """The cost of `average_facts(...)`, if the model knows every fact.

    Args:
        cfg: Config of the model.
        queries: The facts on their canvases.
        settings: Settings of the traces.

    Raises:
        ValueError: There is no query.
    """
    shapes = [(len(query.tokens), query.subject, query.answer_positions, _of_run(cfg, query)) for query in queries]
    examples = dict(zip(shapes, queries, strict=True))
    return total(_of_fact(cfg, examples[shape], settings) * times for shape, times in Counter(shapes).items())


def _of_fact(cfg: DiffusionConfig, query: Query, settings: TraceSettings) -> Cost:
    chosen = set(settings.roles or ())
    positions = [position for position, role in enumerate(token_roles(query)) if role in chosen]
    selection = Selection(positions or [query.subject[0]], settings.layers)
    loop = None if settings.loop is None else settings.loop.denoise.fitted_to(cfg)
    if settings.canvas is not None:
        assert loop is not None
        return trajectory_trace(cfg, query, loop, settings.restoration, settings.corruption, selection, settings.canvas)
    read = len(query.answer_positions)
    known = Cost(cfg, Counter({Pass(1, len(query.tokens), 0, cfg.n_layers, read): 1}))
    if settings.known.rule == "recalled" and loop is not None:
        known += denoising(cfg, *_of_run(cfg, query), loop)
    traced = trace(cfg, query, settings.restoration, settings.corruption, selection, settings.max_bytes)
    return known + traced


def patch_grid(
    cfg: DiffusionConfig,
    clean: Int[Tensor, "pos"],
    corrupted: Int[Tensor, "pos"],
    settings: PatchSettings,
    read: Sequence[int] | None = None,
    max_bytes: int = 2**30,
) -> Cost:
    """The cost of `patch_grid(model, clean, corrupted, ...)` on one pair of prompts.

    Args:
        cfg: Config of the model.
        clean, corrupted: Tokens of the two prompts.
        settings: Sites, positions, layers and heads.
        read: Rows of the logits that the metric reads; by default all.
    """
    n_positions = len(corrupted)
    rows = tuple(range(n_positions) if read is None else (row % n_positions for row in read))
    canvas = Canvas(cfg, 1, n_positions, rows, max_bytes)
    passes = Counter({Pass(1, len(clean), 0, cfg.n_layers, len(rows), whole=True): 1})
    n_cells = 0
    sweeps = settings.sweeps(len(clean), n_positions, cfg)
    canvas = replace(canvas, kept_bytes=kept_by_grid(canvas, len(clean), sweeps, settings.method))
    if settings.method == "attribution":
        passes[replace(canvas.run(), gradient="states")] += 1
        n_exact = min(settings.check, n_positions)
        # The cells with the largest estimates may be anywhere: in the middle on average.
        passes[Pass(n_exact, n_positions, cfg.n_layers // 2, cfg.n_layers, len(rows))] += len(sweeps)
        return Cost(cfg, passes, canvas.kept_bytes + widest(cfg, passes), records=1)
    passes[canvas.run()] += 1
    # Where no position sees all others, nothing changes before the block of the first token that differs.
    first = canvas.seen_from(_first_difference(clean, corrupted)) if canvas.resumes else 0
    for sweep in sweeps:
        cells: list[CellAt] = []
        # One pass of a block in which every position is patched moves such cells to its end (`patching.block_ends`).
        pairs = {pair for group in sweep.groups for pair in group}
        moves = sweep.site.moves_to_block_end and len(pairs) == len({target for _, target in pairs})
        for layer in sweep.layers:
            of_layer: list[CellAt] = []
            for group in sweep.groups:
                targets = [target for _, target in group]
                reads_itself = layer == 0 and sweep.site.name in ("resid_pre", "q", "k", "v")
                if reads_itself:
                    targets = [target for source, target in group if clean[source] != corrupted[target]]
                targets = [target for target in targets if target >= first]
                if not targets:
                    continue
                in_last = layer == cfg.n_layers - 1 and not sweep.site.ends_block
                whole = in_last and (not sweep.site.is_local or not set(rows).isdisjoint(targets))
                entry = layer + sweep.site.ends_block
                of_layer += [CellAt(entry, min(targets), whole)] * len(sweep.heads or [0])
            if moves and any(map(canvas.reaches, of_layer)):
                passes[Pass(1, n_positions, layer, layer + 1, whole=True, patched=True)] += 1
                of_layer = [CellAt(layer + 1, cell.position) for cell in of_layer]
            cells += of_layer
        passes.update(canvas.cells(cells))
        n_cells += len(cells)
    n_bytes = canvas.kept_bytes + widest(cfg, passes)
    return Cost(cfg, passes, n_bytes, records=1, metrics=n_cells)


def _first_difference(clean: Tensor, corrupted: Tensor) -> int:
    if len(clean) != len(corrupted):
        return 0
    differing = (clean != corrupted).nonzero()
    return int(differing[0]) if len(differing) else len(corrupted)


def _grid(
    canvas: Canvas, subject: tuple[int, int], restoration: Restoration, positions: Sequence[int], layers: Sequence[int]
) -> Cost:
    """The clean and the corrupted run, and the cells of a trace."""
    cfg, depth = canvas.cfg, canvas.cfg.n_layers
    if canvas.resumes:
        # Nothing behind the last row that is read and the subject is computed.
        size = cfg.block_size or 1
        end = max(*canvas.read, subject[1] - 1) // size * size + size
        canvas = replace(canvas, positions=min(end, canvas.positions))
    passes = Counter({canvas.run(1): 1})
    passes[canvas.run()] += 1
    touched = canvas.seen_from(subject[0]) if canvas.resumes else 0
    spans = dict.fromkeys(restoration.span(layer, depth) for layer in layers)
    canvas = replace(canvas, kept_bytes=kept_by_trace(canvas, restoration, spans))
    if restoration.kind != "resid":
        # The first block of each span with every position restored.
        for start in dict.fromkeys(span.start for span in spans):
            passes[Pass(canvas.rows, canvas.positions, start, start + 1, patched=True)] += 1
    cells = []
    for position in positions:
        for span in spans:
            if touched <= position < canvas.positions:
                in_last = (span.stop == depth and len(span) > 1) or bool(restoration.severed)
                cells.append(CellAt(span.start + 1, position, in_last and position in canvas.read))
    passes.update(canvas.cells(cells))
    return Cost(cfg, passes, canvas.kept_bytes + widest(cfg, passes), records=1)


def _rows_read(cfg: DiffusionConfig, query: Query) -> tuple[int, ...]:
    positions = torch.tensor(query.answer_positions, dtype=torch.long)
    rows: list[int] = READOUTS[cfg.readout].rows(positions).tolist()
    return tuple(rows)


def _of_run(cfg: DiffusionConfig, query: Query) -> tuple[int, int]:
    """Number of positions of a denoising run of the query, and of those that its prompt fills."""
    length = max(len(query.tokens), max(query.answer_positions) + 1)
    if not cfg.has_mask:
        return length, min(query.answer_positions)
    masked = query.tokens.eq(cfg.blank).sum().item()
    return length, len(query.tokens) - max(int(masked), len(query.answer_positions))
