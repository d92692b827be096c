"""Forward passes of a job, and what they cost.

A job is described by the passes that it runs: the rows of a batch, the positions and blocks that are computed, and the
rows of the logits. The sizes of the network turn them into numbers:

    token-layers   rows times positions, summed over the blocks
    operations     2 for each weight of a block and position, 4 d_head for each head and pair of positions, and
                   2 d_model d_vocab for each row of the logits; a gradient takes once (states) or twice (weights too)
                   as many again
    bytes          weights that a pass reads, whatever the number of its rows

A device takes the sum of these times for a pass: that of its operations at the rate that it reaches with so many
positions; that of its weights through the memory, which in part overlaps, so that a device may be twice as fast; that
of the probabilities from its logits; and those of Python around a block, a pass, and a pass into which states are
written. To this come the times of a step of the loop, and of naming the network in a result.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import torch

from diffusion_lens.analysis.batching import reserved
from diffusion_lens.config import DiffusionConfig
from diffusion_lens.cost.devices import Device, Number
from weight_conversion import Architecture, tensor_shapes


@dataclass(frozen=True)
class Pass:
    """One forward pass.

    Attributes:
        rows: Rows of the batch.
        positions: Positions that are computed in each row.
        start: First block that is computed.
        stop: One past the last block.
        read: Rows of the logits that are computed, in each row of the batch; 0 stops before the head.
        past: Earlier positions, whose keys and values are cached.
        whole: Whether the last block computes every position; otherwise those that are read, besides keys and values.
        gradient: Which gradients follow: none, those of the states, or those of the weights too.
        patched: Whether states are written into copies of a kept run, of which the pass is one.
    """

    rows: int
    positions: int
    start: int
    stop: int
    read: Number = 0
    past: int = 0
    whole: bool = False
    gradient: Literal["", "states", "weights"] = ""
    patched: bool = False

    @property
    def token_layers(self) -> int:
        """Rows times positions, summed over the blocks."""
        return self.rows * self.positions * (self.stop - self.start)


class Work(NamedTuple):
    """What one pass computes, the backward pass left out.

    Attributes:
        in_blocks: Operations of the blocks with their weights.
        of_pairs: Operations of the blocks with pairs of positions.
        at_head: Operations of the head.
        read: Bytes of weights that are read.
    """

    in_blocks: Number
    of_pairs: Number
    at_head: Number
    read: Number


@dataclass(frozen=True, eq=False)
class Cost:
    """The cost of a job, which `+` and `*` join and repeat.

    Attributes:
        cfg: Config of the model: its sizes and dtype.
        passes: Number of times that each pass runs.
        batch_bytes: Bytes of the tensors that the job has at once in addition to the weights, at most.
        weight_copies: Copies of the weights in memory, those of an optimizer included.
        float64_flops: Operations in float64 outside the network.
        outside_flops: Those in the dtype of the model, of products with as many rows as the widest pass has positions.
        steps: Steps of the denoising loop or of a search, and batches of texts.
        records: Number of results that name their network, by the hash of its weights.
        metrics: Number of scores by a metric, and of weight gradients that are compared, each of which is taken to take
            the time around a block.
    """

    cfg: DiffusionConfig
    passes: Mapping[Pass, Number]
    batch_bytes: int = 0
    weight_copies: int = 1
    float64_flops: Number = 0
    outside_flops: Number = 0
    steps: Number = 0
    records: Number = 0
    metrics: Number = 0

    def __add__(self, other: "Cost") -> "Cost":
        """Both jobs, one after the other, on one model."""
        if other.cfg.architecture != self.cfg.architecture:
            raise ValueError(
                f"the costs are those of {self.cfg.model_name!r} and {other.cfg.model_name!r}: add their seconds"
            )
        both = dict.fromkeys([*self.passes, *other.passes])
        passes = {each: self.passes.get(each, 0) + other.passes.get(each, 0) for each in both}
        return Cost(
            self.cfg,
            passes,
            max(self.batch_bytes, other.batch_bytes),
            max(self.weight_copies, other.weight_copies),
            self.float64_flops + other.float64_flops,
            self.outside_flops + other.outside_flops,
            self.steps + other.steps,
            self.records + other.records,
            self.metrics + other.metrics,
        )

    def __mul__(self, times: Number) -> "Cost":
        """The job done this many times."""
        passes = {each: of_each * times for each, of_each in self.passes.items()}
        names = ("float64_flops", "outside_flops", "steps", "records", "metrics")
        return replace(self, passes=passes, **{name: times * getattr(self, name) for name in names})

    @property
    def forward_passes(self) -> Number:
        """Passes of one row; one through part of the network counts in proportion."""
        depth = self.cfg.n_layers
        return sum(times * each.rows * (each.stop - each.start) / depth for each, times in self.passes.items())

    @property
    def backward_passes(self) -> Number:
        """Those of them after which gradients are computed."""
        depth = self.cfg.n_layers
        graded = ((each, times) for each, times in self.passes.items() if each.gradient)
        return sum(times * each.rows * (each.stop - each.start) / depth for each, times in graded)

    @property
    def positions(self) -> int:
        """Positions of the longest row, cached ones included."""
        return max((each.positions + each.past for each in self.passes), default=0)

    @property
    def token_layers(self) -> Number:
        """Rows times positions, summed over the blocks of all forward passes."""
        return sum(times * each.token_layers for each, times in self.passes.items())

    @property
    def flops(self) -> Number:
        """Operations, those of gradients included."""
        of_passes: Number = 0
        for each, times in self.passes.items():
            work = self.work(each)
            of_passes += times * _BACKWARD[each.gradient] * (work.in_blocks + work.of_pairs + work.at_head)
        return of_passes + self.float64_flops + self.outside_flops

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, and of what an optimizer keeps for them."""
        return self.weight_copies * _sizes(self.cfg.architecture).weights * self.cfg.dtype.itemsize

    @property
    def peak_bytes(self) -> int:
        """Bytes of weights and other tensors at once, at most."""
        return self.weight_bytes + self.batch_bytes

    @property
    def process_bytes(self) -> int:
        """Bytes of the device that a process should be given: those of the weights, and what an allocator takes for the
        other tensors (`batching.reserved`). Python and its libraries take memory of the host beside it."""
        of_graph = bool(self.passes) and all(each.gradient for each in self.passes)
        return self.weight_bytes + reserved(self.cfg, self.batch_bytes, of_graph)

    def seconds(self, device: Device, workers: int = 1, hashed: bool = False) -> Number:
        """Time on a device, or on several that share the work equally.

        Args:
            workers: Number of processes, each with a device of its own.
            hashed: Whether each process has hashed the weights before, so that only changes are looked for.

        Raises:
            ValueError: The rate of the device in the dtype of the model is unknown, or `workers` is not positive.
        """
        if workers < 1:
            raise ValueError(f"workers={workers}; at least one has to do the work")
        dtype = self.cfg.dtype
        n_bytes = _sizes(self.cfg.architecture).weights * dtype.itemsize
        total = sum(times * self._of_pass(each, device) for each, times in self.passes.items())
        total += self.steps * device.step_seconds + self.metrics * device.block_seconds
        total += self.records * (self.cfg.n_layers * device.record_seconds + n_bytes / device.comparing)
        if self.float64_flops:
            total += self.float64_flops / device.peak(torch.float64)
        if self.outside_flops:
            total += self.outside_flops / device.rate(dtype, max(each.rows * each.positions for each in self.passes))
        return total / workers + (n_bytes / device.hashing if self.records and not hashed else 0)

    def _of_pass(self, each: Pass, device: Device) -> Number:
        """Seconds of a pass, and of the probabilities from its logits."""
        work, dtype, read = self.work(each), self.cfg.dtype, each.rows * each.read
        numbers = work.in_blocks / device.rate(dtype, each.rows * each.positions) + work.of_pairs / device.pairs(dtype)
        if read:
            numbers += work.at_head / device.rate(dtype, read) + read * self.cfg.d_vocab_out * device.logit_seconds
        numbers += work.read / device.bandwidth
        fixed = (each.stop - each.start) * device.block_seconds + device.pass_seconds
        fixed += device.patch_seconds if each.patched else 0
        if not each.gradient:
            return numbers + fixed
        # The gradients of the weights take as many operations as those of the states.
        weights = (device.gradient - 1) if each.gradient == "weights" else 0
        return numbers * (device.gradient + weights) + fixed * device.gradient_fixed

    def work(self, each: Pass) -> Work:
        """What a pass computes, and the bytes of weights that it reads."""
        cfg, sizes, itemsize = self.cfg, _sizes(self.cfg.architecture), self.cfg.dtype.itemsize
        seen = each.past + each.positions
        pair = 4 * cfg.n_heads * cfg.d_head
        in_blocks: Number = 0
        of_pairs: Number = 0
        read: Number = itemsize * cfg.d_model * cfg.d_vocab_out if each.read else 0
        for block in range(each.start, each.stop):
            active, key_value = sizes.active[block], sizes.key_value
            cut = block == cfg.n_layers - 1 and not each.whole and 4 * each.read <= 3 * each.positions
            computed = each.read if cut and each.read else each.positions
            in_blocks += 2 * each.rows * (key_value * each.positions + computed * (active - key_value))
            of_pairs += each.rows * computed * pair * seen
            read += itemsize * sizes.touched(block, each.rows * each.positions)
        return Work(in_blocks, of_pairs, 2.0 * each.rows * each.read * cfg.d_model * cfg.d_vocab_out, read)


# Operations of a pass with its gradients, in units of the forward pass.
_BACKWARD = {"": 1, "states": 2, "weights": 3}


def total(costs: Iterable[Cost]) -> Cost:
    """The cost of several jobs on one model.

    Raises:
        ValueError: There is no job.
    """
    joined: Cost | None = None
    for cost in costs:
        joined = cost if joined is None else joined + cost
    if joined is None:
        raise ValueError("there is no job to add up")
    return joined


@dataclass(frozen=True)
class _Sizes:
    """Numbers of weights in the matrices of a network.

    Attributes:
        weights: All weights, embeddings and vectors included.
        active: Weights that one position meets in each block.
        key_value: Those of them that make keys and values.
        experts: Weights of all experts that a router chooses among, in each block.
        chosen: Share of them that one position meets.
    """

    weights: int
    active: tuple[int, ...]
    key_value: int
    experts: tuple[int, ...]
    chosen: Number

    def touched(self, block: int, tokens: int) -> Number:
        """Weights that this many positions read, if every position chooses its experts independently."""
        experts = self.experts[block]
        always = self.active[block] - self.chosen * experts
        return always + experts * (1 - (1 - self.chosen) ** tokens)


@cache
def _sizes(architecture: Architecture) -> _Sizes:
    n_layers, experts = architecture.n_layers, architecture.experts
    chosen: Number = 1 if experts is None else experts.n_chosen / experts.n_experts
    always, routed = [0] * n_layers, [0] * n_layers
    weights = 0
    for name, shape in tensor_shapes(architecture).items():
        size = 1
        for side in shape:
            size *= side
        weights += size
        part, _, rest = name.partition(".")
        # The matrix that turns the time into scales and shifts is used once a row, not once a position.
        if part != "blocks" or len(shape) != 2 or ".modulation." in name:
            continue
        block = int(rest.partition(".")[0])
        (routed if ".mlp.experts." in name else always)[block] += size
    active = tuple(round(own + chosen * of_experts) for own, of_experts in zip(always, routed, strict=True))
    key_value = 2 * architecture.n_key_value_heads * architecture.d_head * architecture.d_model
    return _Sizes(weights, active, key_value, tuple(routed), chosen)
