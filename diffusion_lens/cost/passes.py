"""Forward passes of a job, and what they cost.

A job is described by the passes that it runs: the rows of a batch, the positions and blocks that are computed, and the
rows of the logits. The sizes of the network turn them into numbers:

    token-layers   rows times positions, summed over the blocks
    operations     2 for each weight of a block and position, 4 d_head for each head and pair of positions, and
                   2 d_model d_vocab for each row of the logits; a gradient takes once (states) or twice (weights too)
                   as many again
    bytes          weights that a pass reads, whatever the number of its rows

A device takes the sum of two times for a pass: that of its operations at the rate that it reaches, and that of its
weights through the memory. The two overlap in part, so a device is at most twice as fast. To this come the times of
Python, and of the hash of the weights by which a result names its model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import torch

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
    """

    rows: int
    positions: int
    start: int
    stop: int
    read: Number = 0
    past: int = 0
    whole: bool = False
    gradient: Literal["", "states", "weights"] = ""

    @property
    def token_layers(self) -> int:
        """Rows times positions, summed over the blocks."""
        return self.rows * self.positions * (self.stop - self.start)


class Work(NamedTuple):
    """Operations and bytes of weights of one pass, in its blocks and at its head."""

    in_blocks: Number
    of_blocks: Number
    at_head: Number
    of_head: Number


@dataclass(frozen=True, eq=False)
class Cost:
    """The cost of a job, which `+` and `*` join and repeat.

    Attributes:
        cfg: Config of the model: its sizes and dtype.
        passes: Number of times that each pass runs.
        batch_bytes: Bytes that the job uses in addition to the weights, at most.
        weight_copies: Copies of the weights in memory, those of an optimizer included.
        float64_flops: Operations in float64 outside the network.
        steps: Steps of the denoising loop.
        identified: Whether the weights are hashed, so that the result names them.
    """

    cfg: DiffusionConfig
    passes: Mapping[Pass, Number]
    batch_bytes: int = 0
    weight_copies: int = 1
    float64_flops: Number = 0
    steps: Number = 0
    identified: bool = True

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
            self.steps + other.steps,
            self.identified or other.identified,
        )

    def __mul__(self, times: Number) -> "Cost":
        """The job done this many times."""
        passes = {each: of_each * times for each, of_each in self.passes.items()}
        return replace(self, passes=passes, float64_flops=times * self.float64_flops, steps=times * self.steps)

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
        works = ((self.work(each), times) for each, times in self.passes.items())
        return self.float64_flops + sum(times * (work.in_blocks + work.at_head) for work, times in works)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, and of what an optimizer keeps for them."""
        return self.weight_copies * _sizes(self.cfg.architecture).weights * self.cfg.dtype.itemsize

    @property
    def peak_bytes(self) -> int:
        """Bytes in memory, at most."""
        return self.weight_bytes + self.batch_bytes

    def seconds(self, device: Device, workers: int = 1) -> Number:
        """Time on a device, or on several that share the work equally.

        Args:
            workers: Number of processes, each with a device of its own.

        Raises:
            ValueError: The rate of the device in the dtype of the model is unknown, or `workers` is not positive.
        """
        if workers < 1:
            raise ValueError(f"workers={workers}; at least one has to do the work")
        rate = device.rate(self.cfg.dtype)
        total: Number = self.steps * device.step_seconds
        for each, times in self.passes.items():
            work = self.work(each)
            numbers = (work.in_blocks + work.at_head) / rate + (work.of_blocks + work.of_head) / device.bandwidth
            fixed = (each.stop - each.start) * device.block_seconds + device.pass_seconds
            total += times * (numbers + fixed * (2 if each.gradient else 1))
        if self.float64_flops:
            total += self.float64_flops / device.peak(torch.float64)
        hashed = _sizes(self.cfg.architecture).weights * self.cfg.dtype.itemsize / device.hashing
        return total / workers + (hashed if self.identified else 0)

    def work(self, each: Pass) -> Work:
        """Operations and bytes of weights of a pass."""
        cfg, sizes, itemsize = self.cfg, _sizes(self.cfg.architecture), self.cfg.dtype.itemsize
        seen = each.past + each.positions
        pair = 4 * cfg.n_heads * cfg.d_head
        in_blocks: Number = 0
        of_blocks: Number = 0
        for block in range(each.start, each.stop):
            active, key_value = sizes.active[block], sizes.key_value
            cut = block == cfg.n_layers - 1 and not each.whole and 4 * each.read <= 3 * each.positions
            computed = each.read if cut and each.read else each.positions
            of_row = 2 * key_value * each.positions + computed * (2 * (active - key_value) + pair * seen)
            in_blocks += each.rows * of_row
            of_blocks += itemsize * sizes.touched(block, each.rows * each.positions)
        at_head = 2.0 * each.rows * each.read * cfg.d_model * cfg.d_vocab_out
        of_head = itemsize * cfg.d_model * cfg.d_vocab_out if each.read else 0
        times = {"": 1, "states": 2, "weights": 3}[each.gradient]
        reads = {"": 1, "states": 2, "weights": 3}[each.gradient]
        return Work(times * in_blocks, reads * of_blocks, times * at_head, reads * of_head)


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
