"""Bytes of the tensors of passes, and of what studies of cells keep beside them."""

import math
from collections.abc import Iterable

from diffusion_lens.analysis.batching import graph_row_bytes, key_value_row_bytes, row_bytes
from diffusion_lens.analysis.causal_tracing.restoration import Restoration, points_of
from diffusion_lens.analysis.kept_run import keys_and_values, stored_bytes, stream_entering
from diffusion_lens.analysis.patching.runs import stored_points
from diffusion_lens.analysis.patching.sites import Sweep
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.cost.cells import Canvas
from diffusion_lens.cost.passes import Pass


def kept_by_trace(canvas: Canvas, restoration: Restoration, spans: Iterable[range]) -> int:
    """Bytes that the clean and the corrupted run of a trace keep, as `RestoredRuns` counts them."""
    cfg, spans = canvas.cfg, list(spans)
    starts = sorted({span.start for span in spans})
    clean = {point for span in spans for block in span for point in points_of(restoration.kind, block, cfg)}
    streams = {stream_entering(block) for start in starts for block in (start, start + 1)}
    if restoration.severed:
        above = range(starts[0] + 1, cfg.n_layers)
        streams |= {point for block in above for point in points_of(restoration.severed, block, cfg)}
    restored = 0 if restoration.kind == "resid" else len(starts)
    stream = canvas.positions * cfg.d_model * cfg.dtype.itemsize
    of_samples = canvas.rows * (len(streams) + restored) * stream + _past_bytes(canvas)
    return len(clean) * stream + of_samples + (1 + canvas.rows) * _logits_bytes(canvas)


def kept_by_grid(canvas: Canvas, n_clean: int, sweeps: Iterable[Sweep], method: str) -> int:
    """Bytes that both runs of a patch grid keep, as `patching.runs.cell_budgets` counts them."""
    cfg, sweeps = canvas.cfg, list(sweeps)
    points, names = stored_points(_past_points(canvas), sweeps, method)
    of_corrupted = stored_bytes(cfg, names, 1, canvas.positions)
    gradients = stored_bytes(cfg, points, 1, canvas.positions) if method == "attribution" else 0
    moved = max(len(sweep.layers) * sweep.site.moves_to_block_end for sweep in sweeps)
    streams = moved * canvas.positions * cfg.d_model * cfg.dtype.itemsize
    return stored_bytes(cfg, points, 1, n_clean) + of_corrupted + gradients + streams + _logits_bytes(canvas)


def widest(cfg: DiffusionConfig, passes: Iterable[Pass]) -> int:
    """Bytes of the tensors of the widest of these passes."""
    return max((pass_bytes(cfg, each) for each in passes), default=0)


def pass_bytes(cfg: DiffusionConfig, each: Pass) -> int:
    """Bytes of the tensors of a pass."""
    n_read, n_blocks = math.ceil(each.read), each.stop - each.start
    # The last block computes no more than the keys and values of positions that are not read.
    is_cut = each.stop == cfg.n_layers and n_read and 4 * n_read <= 3 * each.positions and not each.whole
    if each.gradient:
        of_read = graph_row_bytes(cfg, n_read, 0, n_blocks=1) if is_cut else 0
        return each.rows * (graph_row_bytes(cfg, each.positions, n_read, n_blocks=n_blocks - bool(is_cut)) + of_read)
    if is_cut and n_blocks == 1:
        return each.rows * key_value_row_bytes(cfg, each.positions, n_read, each.past)
    return each.rows * row_bytes(cfg, each.positions, n_read, each.past)


def _past_points(canvas: Canvas) -> list[str]:
    blocks = range(canvas.cfg.n_layers) if canvas.resumes else ()
    return [name for block in blocks for name in keys_and_values(block)]


def _past_bytes(canvas: Canvas) -> int:
    return stored_bytes(canvas.cfg, _past_points(canvas), canvas.rows, canvas.positions)


def _logits_bytes(canvas: Canvas) -> int:
    return len(canvas.read) * canvas.cfg.d_vocab_out * canvas.cfg.dtype.itemsize
