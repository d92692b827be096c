"""The cost of passes, recall, second moments, stored activations, signatures and training."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from diffusion_lens.analysis.batching import row_bytes
from diffusion_lens.analysis.signatures.batches import pair_bytes
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.cost.devices import Number
from diffusion_lens.cost.loop import denoising
from diffusion_lens.cost.memory import widest
from diffusion_lens.cost.passes import Cost, Pass, total
from diffusion_lens.evaluation.batches import by_length
from diffusion_lens.evaluation.recall_by_steps import RecallSettings
from diffusion_lens.settings import pick_indices
from weight_conversion import tensor_shapes


def forward(cfg: DiffusionConfig, rows: int, positions: int, read: int | None = None) -> Cost:
    """The cost of `model(tokens, logits_at=...)`.

    Args:
        cfg: Config of the model.
        rows, positions: Shape of the tokens.
        read: Number of rows of the logits in each row of the batch; by default all.
    """
    n_read = positions if read is None else read
    passes = {Pass(rows, positions, 0, cfg.n_layers, n_read): 1}
    # The logits stand beside the stream before and after the last norm.
    size = cfg.dtype.itemsize
    at_head = n_read * cfg.d_vocab_out * size + 2 * positions * cfg.d_model * size
    return Cost(cfg, passes, rows * max(row_bytes(cfg, positions, 0), at_head))


def recall(cfg: DiffusionConfig, prompts: Sequence[int], settings: RecallSettings) -> Cost:
    """The cost of `recall_facts(...)`.

    Args:
        cfg: Config of the model.
        prompts: Number of tokens of the prompt of each fact.
        settings: Settings of the study, with the length of the canvas.

    Raises:
        ValueError: There is no prompt, or the settings do not have a length.
    """
    if settings.length is None:
        raise ValueError("the cost depends on the length of the canvas: give RecallSettings(length=...)")
    batches = by_length(prompts, int, settings.loop.facts_together(cfg), mixed=not cfg.grows)
    shapes = Counter((len(batch), round(sum(batch) / len(batch))) for batch in batches)
    return total(
        denoising(cfg, settings.length, given, replace(settings.loop.denoise, steps=column), rows) * times
        for (rows, given), times in shapes.items()
        for column in settings.columns(cfg)
    )


def up_to(cfg: DiffusionConfig, rows: int, positions: int, layer: int) -> Cost:
    """The cost of the blocks up to a layer on rows of one length."""
    return Cost(cfg, {Pass(rows, positions, 0, layer + 1): 1}, rows * row_bytes(cfg, positions, 0))


def up_to_layer(cfg: DiffusionConfig, lengths: Sequence[int], layer: int, batch_size: int = 16) -> Cost:
    """The cost of reading states of texts up to a layer, as `activations(...)` of a hook point does.

    Args:
        cfg: Config of the model.
        lengths: Number of tokens of each text, in the order of the batches.
        layer: Layer of the last hook point that is read.
        batch_size: Number of texts in one pass, which are padded to the longest.

    Raises:
        ValueError: There is no text, or no such layer.
    """
    layer = pick_indices("layer", [layer], cfg.n_layers)[0]
    # Beside a clean text, a network that attends by blocks reads twice as many positions.
    copies = 1 if cfg.causal_block is None else 2
    batches = (lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size))
    shapes = Counter((len(batch), copies * max(batch)) for batch in batches)
    return total(up_to(cfg, rows, positions, layer) * times for (rows, positions), times in shapes.items())


def second_moment(cfg: DiffusionConfig, lengths: Sequence[int], layer: int, batch_size: int = 16) -> Cost:
    """The cost of `second_moment(...)`: the states up to the layer, and the products of its keys in float64.

    The arguments are those of `up_to_layer`.
    """
    n_keys, width = sum(lengths), cfg.d_mlp or 0
    products = 2 * width * (n_keys * width + sum(length**2 for length in lengths))
    read = up_to_layer(cfg, lengths, layer, batch_size)
    # The sum stands beside a product of as many numbers and the keys, by text and joined, or beside a pass.
    matrix, keys = 8 * width**2, max(each.rows * each.positions for each in read.passes) * width
    summed = matrix + max(matrix + keys * (16 + cfg.dtype.itemsize), read.batch_bytes + keys * cfg.dtype.itemsize)
    return replace(
        read,
        float64_flops=products,
        batch_bytes=summed,
        steps=-(-len(lengths) // batch_size),
        records=1,
    )


def signatures(cfg: DiffusionConfig, n_pairs: int, positions: int, together: int = 32, n_candidates: int = 0) -> Cost:
    """The cost of `reversal_signatures(...)`.

    Its passes are those of `signature_passes`. Gradients of weights are sums of outer products, which are multiplied
    with each other: those of all pairs of positions of the batch, and of those of a canvas.

    Args:
        cfg: Config of the model.
        n_pairs: Number of pairs.
        positions: Number of positions of a canvas.
        together: Number of pairs in one batch.
        n_candidates: Number of candidates among which an answer is ranked.
    """
    depth, together = cfg.n_layers, max(1, min(together, n_pairs))
    batches = n_pairs / together
    passes: dict[Pass, Number] = {Pass(together, positions, 0, depth, 1, whole=True): batches}
    for layer in range(depth):
        # Each layer is cut from one side and from the other: there at the reader, behind it at all positions.
        passes[Pass(together, 1, layer, layer + 1, past=positions - 1, patched=True)] = 2 * batches
        passes[Pass(together, positions, layer + 1, depth, 1, patched=True)] = 2 * batches
    passes[Pass(together, positions, 0, depth, 1, whole=True, gradient="states")] = 2 * batches
    matrices = [shape for name, shape in tensor_shapes(cfg.architecture).items() if _is_matrix(name, shape)]
    outer = 2 * together * positions**2 * sum(map(sum, matrices)) * (together + 3)
    n_bytes = together * pair_bytes(cfg, positions, together, n_candidates)
    return Cost(cfg, passes, n_bytes, outside_flops=outer * batches, records=1, metrics=len(matrices) * batches)


def _is_matrix(name: str, shape: Sequence[int]) -> bool:
    return len(shape) == 2 and (".attn." in name or ".mlp." in name)


def training(cfg: DiffusionConfig, updates: int, rows: int, positions: int, parts: int = 1) -> Cost:
    """The cost of training with AdamW in float32: weights, gradients and two averages of them.

    Args:
        cfg: Config of the model.
        updates: Number of updates.
        rows: Number of texts in an update.
        positions: Number of positions of a text.
        parts: Number of parts into which an update is divided.
    """
    per_part = -(-rows // parts)
    passes = Counter({Pass(per_part, positions, 0, cfg.n_layers, positions, gradient="weights"): updates * parts})
    return Cost(cfg, passes, widest(cfg, passes), weight_copies=4)
