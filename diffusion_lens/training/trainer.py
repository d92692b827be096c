"""The trainer: AdamW, warm-up and cosine, every draw from one seed, on one device or many.

An update asks one question of the whole batch, drawn from the run's own generator, and cuts it into parts: one for each
process and accumulation. A part keeps its weights in the whole's mean, so its losses and gradients add up to those of
the batch: neither the number of processes nor of parts changes a number, but for the rounding of sums. On a CPU, with
one number of threads, a seed gives the same weights bit for bit, interrupted or not, and nobody else's random numbers
move.

A run that diverges ends there: a loss, a gradient or a weight that is not finite is a `FloatingPointError`, raised
before anything of that step is kept, so the checkpoint on disk is the last good one.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.losses import LossQuestion, Objective
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import load_result, provenance, save_result
from diffusion_lens.training.batches import RowOrder, TrainingRows
from diffusion_lens.training.devices import Accelerator, accelerated, plain_forward
from diffusion_lens.training.recipes import TrainingConfig
from diffusion_lens.training.run_folder import RunFolder, RunState, describe_run

Evaluate = Callable[[DiffusionTransformer], Mapping[str, float]]


@dataclass(frozen=True, eq=False)
class TrainingRecord:
    """What a run did.

    Attributes:
        config: its recipe.
        losses: Float[step], the loss of every step.
        record: seconds, threads, processes, model, hashes of the data and of the weights before and after, versions;
            under "starts" the steps at which it was begun and gone on with, and where.
        evaluations: what `evaluate` said, each with the number of steps done.
    """

    config: TrainingConfig
    losses: Float[Tensor, "step"]
    record: dict[str, Any]
    evaluations: tuple[dict[str, Any], ...] = ()

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        settings = {"config": asdict(self.config), "record": self.record, "evaluations": self.evaluations}
        return save_result(path, "training record", {"losses": self.losses}, settings)

    @classmethod
    def load(cls, path: str | Path) -> "TrainingRecord":
        """Read what `save` wrote."""
        tensors, settings = load_result(path, "training record")
        config = TrainingConfig(**{**settings["config"], "betas": tuple(settings["config"]["betas"])})
        return cls(config, tensors["losses"], settings["record"], tuple(settings.get("evaluations", ())))


def train(
    model: DiffusionTransformer,
    tokens: Int[Tensor, "row pos"] | TrainingRows,
    config: TrainingConfig,
    *,
    objective: Objective | None = None,
    folder: str | Path | None = None,
    checkpoint_every: int = 500,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 500,
    progress: bool = True,
) -> TrainingRecord:
    """Train `model` in place on rows of tokens.

    The model comes back in the mode it came in (training or evaluation) and without gradients, exception or not. Under
    `accelerate launch` it moves to its process's device, and every process returns the same.

    Args:
        tokens: rows that all count to their ends, or rows of their own lengths.
        objective: loss of (model, batch, generator), of one's own; it sees the whole batch, so it goes with one process
            and `accumulate=1`. By default the model's own loss.
        folder: where the run keeps `run.json` and its checkpoint. A run that was begun there goes on; one that is
            complete is only read.
        checkpoint_every: steps between checkpoints; the last step always leaves one.
        evaluate: numbers to follow, such as recall. Called without gradients and in evaluation mode, in each process.
        evaluate_every: steps between two calls of it; the last step always has one.
        progress: show a progress bar.

    Raises:
        ValueError: a folder with another run; fewer rows in a batch than parts; a precision that does not fit.
        FloatingPointError: a loss, a gradient or weights that are not finite; the last good checkpoint is kept.
    """
    rows = tokens if isinstance(tokens, TrainingRows) else TrainingRows(tokens)
    for name, steps in (("checkpoint_every", checkpoint_every), ("evaluate_every", evaluate_every)):
        if steps < 1:
            raise ValueError(f"{name} is {steps}; it must be at least 1")
    with accelerated(model, config.mixed_precision) as accelerator, _training(model):
        run = _Run(model, rows, config, objective, accelerator)
        home = None if folder is None else RunFolder(Path(folder))
        if home is not None:
            home.start(run.identity, write=accelerator.is_main_process)
            home.resume(run.state)
            accelerator.wait_for_everyone()
        done = len(run.state.losses)
        if home is not None and done:
            run.saved = home.checkpoint, done
        run.start(done)
        hidden = not (progress and accelerator.is_main_process)
        with tqdm(total=config.steps, initial=done, desc=model.cfg.model_name, disable=hidden) as bar:
            for step in range(done, config.steps):
                run.update(step)
                last = step + 1 == config.steps
                if last or (step + 1) % checkpoint_every == 0:
                    run.require_weights(step)
                if evaluate is not None and (last or (step + 1) % evaluate_every == 0):
                    run.evaluate(evaluate, step + 1)
                if home is not None and (last or (step + 1) % checkpoint_every == 0) and accelerator.is_main_process:
                    run.save(home.checkpoint, step + 1)
                bar.update()
                bar.set_postfix(run.shown, refresh=False)
        return run.record()


class _Run:
    """One training: what it works with, and its steps."""

    def __init__(
        self,
        model: DiffusionTransformer,
        rows: TrainingRows,
        config: TrainingConfig,
        objective: Objective | None,
        accelerator: Accelerator,
    ) -> None:
        self.model, self.rows, self.config, self.objective = model, rows, config, objective
        self.accelerator = accelerator
        self.saved: tuple[Path, int] | None = None  # the last checkpoint, and the steps in it
        n_parts = accelerator.num_processes * config.accumulate
        if objective is not None and n_parts > 1:
            raise ValueError(
                f"an objective of one's own sees the whole batch; it cannot be cut into {n_parts} parts: take one "
                "process and accumulate=1"
            )
        if n_parts > config.batch_size:
            raise ValueError(
                f"a batch of {config.batch_size} rows cannot be cut into {n_parts} parts ({accelerator.num_processes} "
                f"processes, accumulate={config.accumulate}); take a larger batch_size"
            )
        self.identity = describe_run(model, rows, config, objective)
        several = accelerator.num_processes > 1
        self.network = accelerator.prepare_model(model, device_placement=several)
        optimizer = torch.optim.AdamW(_groups(model, config), lr=config.lr, betas=config.betas)
        self.optimizer = accelerator.prepare_optimizer(optimizer)
        order = RowOrder(len(rows), torch.Generator().manual_seed(config.seed))
        self.state = RunState(dict(model.named_parameters()), optimizer, order, accelerator.scaler)

    def start(self, step: int) -> None:
        """Note where the run is begun, or gone on with."""
        self._begun = time.perf_counter() - self.state.seconds
        if step < self.config.steps:
            here = {"threads": torch.get_num_threads(), "processes": self.accelerator.num_processes}
            self.state.starts.append({"step": step, **here, "device": str(self.model.cfg.device)})

    def update(self, step: int) -> None:
        """One step: a batch, its gradient, AdamW."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr_at(step)
        self.optimizer.zero_grad()
        generator = self.state.order.generator
        batch = self.rows.pick(self.state.order.take(self.config.batch_size), self.model.cfg.device)
        if self.objective is None:
            loss = self._answer(batch.ask(self.model, generator))
        else:
            loss = self.objective(self.model, batch.tokens, generator)
            self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip)
        number = loss.item()
        self._require_finite("the loss", number, step)
        if self.accelerator.scaler is None:  # which leaves out the steps whose float16 gradients overflow
            self._require_finite("the norm of the gradient", float(norm), step)
        self.optimizer.step()
        self.state.losses.append(number)

    def require_weights(self, step: int) -> None:
        """Raise a `FloatingPointError` unless all weights are finite."""
        for name, weight in self.model.named_parameters():
            if not bool(weight.isfinite().all()):
                self._require_finite(f"the largest entry of {name}", float(weight.detach().abs().max()), step)

    def _require_finite(self, what: str, number: float, step: int) -> None:
        if math.isfinite(number):
            return
        kept = "no checkpoint was saved before"
        if self.saved is not None:
            kept = f"{self.saved[0]} holds the last good one, after {self.saved[1]} steps"
        raise FloatingPointError(
            f"{what} is {number} in step {step} of {self.config.steps}: the training has diverged, and nothing of this "
            f"step is saved ({kept}). Try a smaller lr (it is {self.config.lr_at(step):g} in this step) or a lower "
            "clip in a new folder, or look for damaged weights or data; this run, begun again, would end here again"
        )

    def evaluate(self, evaluate: Evaluate, step: int) -> None:
        """Ask the model as its user would meet it: in evaluation mode, without autocast."""
        self.model.eval()
        with torch.no_grad(), plain_forward(self.model):
            numbers = {name: float(number) for name, number in evaluate(self.model).items()}
        self.model.train()
        self.state.evaluations.append({"step": step, **numbers})

    def save(self, path: Path, done: int) -> None:
        """Leave a checkpoint of the steps done."""
        self.saved = path, done
        self.state.seconds = time.perf_counter() - self._begun
        self.state.save(path)

    @property
    def shown(self) -> dict[str, str]:
        """What the progress bar says."""
        numbers = {"loss": self.state.losses[-1], **(self.state.evaluations[-1] if self.state.evaluations else {})}
        return {name: f"{number:.3f}" for name, number in numbers.items() if name != "step"}

    def record(self) -> TrainingRecord:
        """What the run did, once it is over."""
        record = {
            "seconds": time.perf_counter() - self._begun,
            "threads": torch.get_num_threads(),
            "processes": self.accelerator.num_processes,
            "starts": self.state.starts,
            "rows": self.identity["rows"],
            "data_sha256": self.identity["data_sha256"],
            "started_from_sha256": self.identity["weights_sha256"],
            **provenance(self.model, self.model.cfg),
        }
        return TrainingRecord(self.config, torch.tensor(self.state.losses), record, tuple(self.state.evaluations))

    def _answer(self, asked: LossQuestion) -> Tensor:
        """Loss of the whole batch; this process's parts of it leave their gradients."""
        processes, accumulate = self.accelerator.num_processes, self.config.accumulate
        n_parts, n_rows = processes * accumulate, len(asked.tokens)
        first = self.accelerator.process_index * accumulate
        losses = []
        for i in range(first, first + accumulate):
            part = asked if n_parts == 1 else asked.part(i * n_rows // n_parts, (i + 1) * n_rows // n_parts)
            last = i == first + accumulate - 1
            with nullcontext() if last else self.accelerator.no_sync(self.network):
                whole = self.model.whole(part.tokens)
                loss = part.loss(self.network(part.tokens, attention_mask=whole, logits_at=part.rows))
                # Processes average their gradients, and the parts are meant to be added.
                self.accelerator.backward(loss * processes)
            losses.append(loss.detach())
        total: Tensor = self.accelerator.reduce(torch.stack(losses).sum(), "sum")
        return total


def _groups(model: DiffusionTransformer, config: TrainingConfig) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": config.weight_decay if config.decay_norms else 0.0},
    ]


@contextmanager
def _training(model: DiffusionTransformer) -> Iterator[None]:
    was_training = model.training
    model.train()
    try:
        with torch.enable_grad():
            yield
    finally:
        model.zero_grad()
        model.train(was_training)
