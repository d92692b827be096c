"""The passes that edge and node attribution share: runs on a path between two inputs, and the metric's gradients."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.batching import reserved
from diffusion_lens.analysis.circuits.graph import Graph, by_part
from diffusion_lens.analysis.circuits.sides import on_one_metric, require_same_positions
from diffusion_lens.analysis.kept_run import KeptRun, NetworkInput
from diffusion_lens.analysis.patching.runs import Side
from diffusion_lens.hook_names import Hook
from diffusion_lens.settings import Whole, at_least

PATHS = ("inputs", "nodes")


@dataclass(frozen=True)
class IntegrationPath:
    """The runs over which gradients are averaged.

    Attributes:
        n_runs: Number m of runs; 1 is the corrupted run alone.
        kind: "inputs" moves the embeddings of all positions, at k/m for k = 1 ... m; "nodes" moves the output of one
            writer at a time, at (k - 1/2)/m.

    Raises:
        ValueError: There are no runs, or the kind is unknown.
    """

    n_runs: Whole
    kind: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_runs", at_least(1, "ig_steps", self.n_runs))
        if self.kind not in PATHS:
            raise ValueError(f"path={self.kind!r}; it must be 'inputs' or 'nodes'")

    def runs(self, points: Mapping[str, range]) -> Iterator["MovedRun"]:
        """The runs for these writers."""
        m = int(self.n_runs)
        moved = points.items() if self.kind == "nodes" else [("hook_embed", points["hook_embed"])]
        offset = 0.5 if self.kind == "nodes" else 0.0
        shares = [0.0] if m == 1 else [(k - offset) / m for k in range(1, m + 1)]
        return (MovedRun(name, row, share) for name, rows in moved for row in rows for share in shares)


@dataclass(frozen=True)
class MovedRun:
    """A corrupted run in which the output of one writer is moved towards the clean run.

    Attributes:
        name: Hook point of the writer.
        writer: Its index among all writers.
        share: How far the output is moved; 0 is the corrupted one, 1 the clean one.
    """

    name: str
    writer: int
    share: float


class Passes(ABC):
    """The passes of one pair of inputs.

    Raises:
        ValueError: The inputs have other positions, or the budget is too small for one run.
    """

    optional: ClassVar[Mapping[str, bool]]  # the flags under which the hook points pass

    def __init__(self, graph: Graph, clean: Side, corrupted: Side, max_bytes: int) -> None:
        require_same_positions(clean, corrupted)
        self.graph, self.given = graph, corrupted.input
        one_run = reserved(self.given.model.cfg, self.given.graph_bytes + self._copy_bytes(), of_graph=True)
        stored = wide_bytes(self.given, self.writer_points) + 2 * self.given.stream_bytes
        self.runs_at_once = (max_bytes - stored) // one_run
        if self.runs_at_once < 1:
            raise ValueError(f"max_bytes={max_bytes:,} is too small: one run takes {stored + one_run:,} bytes")
        self.clean, self.corrupted = on_one_metric(clean, corrupted)

    def scores(self, path: IntegrationPath, progress: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The scores, and the metric of both runs."""
        # 1. Compute both runs, and the difference that each writer makes.
        embeddings = [side.input.embed() for side in (self.clean, self.corrupted)]
        runs = [
            side.input.run(self.writer_points, embedded)
            for side, embedded in zip((self.clean, self.corrupted), embeddings, strict=True)
        ]
        self._store_change(*runs)
        clean_score, corrupted_score = (
            torch.tensor(float(side.reading(run.logits)), dtype=torch.float64)
            for side, run in zip((self.clean, self.corrupted), runs, strict=True)
        )
        del runs

        # 2. Average the gradients over the path, and contract them with the differences.
        moved_runs = list(path.runs(self.writer_points))
        total: Any = 0.0
        blocks = [moved_runs[i : i + self.runs_at_once] for i in range(0, len(moved_runs), self.runs_at_once)]
        for block in tqdm(blocks, desc="attribution", unit="pass", disable=not progress):
            total = total + self._scores_of(path, block, self._gradients(embeddings[1], block))
        return (total / int(path.n_runs)).cpu(), clean_score, corrupted_score

    def _scores_of(self, path: IntegrationPath, block: Sequence[MovedRun], gradients: dict[str, Tensor]) -> Tensor:
        """The sum of the scores that the runs of one pass give."""
        if path.kind == "inputs":
            summed = {
                name: gradient.unflatten(0, (len(block), -1)).sum(dim=0, dtype=wider(gradient.dtype))
                for name, gradient in gradients.items()
            }
            return self._contracted(summed, None)
        by_copy = {name: gradient.split(self.given.n_rows) for name, gradient in gradients.items()}
        parts = [
            self._contracted({name: copies[i] for name, copies in by_copy.items()}, run) for i, run in enumerate(block)
        ]
        return torch.stack(parts).sum(dim=0)

    @property
    @abstractmethod
    def writer_points(self) -> dict[str, range]:
        """The writers of each hook point, as indices, in the order in which a pass reaches them."""

    @property
    @abstractmethod
    def gradient_points(self) -> Sequence[str]:
        """The hook points at which the metric is differentiated."""

    def _copy_bytes(self) -> int:
        """Bytes that a run keeps for its gradients at optional hook points."""
        return 0

    @abstractmethod
    def _store_change(self, clean: KeptRun, corrupted: KeptRun) -> None:
        """Keep the difference of every writer's output, clean minus corrupted, in float32 at least."""

    @abstractmethod
    def _change_of(self, run: MovedRun) -> Float[Tensor, "batch pos *rest"]:
        """The difference of the output of the writer that a run moves."""

    @abstractmethod
    def _contracted(self, gradients: Mapping[str, Tensor], run: MovedRun | None) -> Float[Tensor, "*rest"]:
        """The differences times the gradients, of all writers or of the one that a run moves."""

    def _gradients(self, corrupted: Float[Tensor, "batch pos d_model"], block: Sequence[MovedRun]) -> dict[str, Tensor]:
        """The gradient of the metric at every gradient point, for copies of the corrupted rows."""
        model, given, n_rows = self.given.model, self.given, self.given.n_rows
        # 1. Move the embeddings, and collect the moves of later writers by hook point.
        embedded = corrupted.repeat(len(block), 1, 1)
        moves: dict[str, list[tuple[slice, int, Tensor]]] = {}
        for copy, run in enumerate(block):
            rows, step = slice(copy * n_rows, (copy + 1) * n_rows), run.share * self._change_of(run)
            if run.name == "hook_embed":
                embedded[rows] = (corrupted.to(step.dtype) + step).to(corrupted.dtype)
            else:
                head = run.writer - self.writer_points[run.name].start
                moves.setdefault(run.name, []).append((rows, head, step.to(corrupted.dtype)))

        # 2. Run the copies, and differentiate the sum of their metrics.
        leaf = embedded.requires_grad_()
        stored: dict[str, Tensor] = {"hook_embed": leaf}

        def store(activation: Tensor, hook: Any) -> None:
            stored[hook.name] = activation

        hooks = [(name, _mover(of_point)) for name, of_point in moves.items()]
        hooks += [(name, store) for name in self.gradient_points if name != "hook_embed"]
        with torch.enable_grad(), given.at_step(len(block)), model.hooks(fwd_hooks=hooks):
            logits = model(leaf, start_at_layer=0, attention_mask=given.mask(len(block)), logits_at=given.rows)
            by_copy = [self.corrupted.reading(part) for part in logits.split(n_rows)]
            if not all(score.requires_grad for score in by_copy):
                raise ValueError(
                    "the metric has no gradient: compute it from the logits with torch, without .item(), .detach() or "
                    "argmax"
                )
            points = [stored[name] for name in self.gradient_points]
            gradients = torch.autograd.grad(torch.stack(by_copy).sum(), points)
        return dict(zip(self.gradient_points, gradients, strict=True))


def _mover(moves: Sequence[tuple[slice, int, Tensor]]) -> Hook:
    """A hook that moves the output of one writer in each copy of the rows."""

    def move(activation: Tensor, hook: Any) -> Tensor:
        moved = activation.clone()
        for rows, head, step in moves:
            by_part(moved)[rows, :, head] += step.to(moved.device)
        return moved

    return move


def wide_bytes(given: NetworkInput, names: Iterable[str]) -> int:
    """Bytes of the activations at these hook points in float32 at least."""
    size = given.model.cfg.dtype.itemsize
    return given.stored_bytes(names) * max(size, 4) // size


def wider(dtype: torch.dtype) -> torch.dtype:
    """The type of numbers in which differences and gradients are multiplied and added: float32 at least."""
    return torch.promote_types(dtype, torch.float32)
