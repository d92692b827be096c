"""The trainer: AdamW with warm-up and cosine decay, one seed for all random numbers, one or several devices.

An update samples the noise of the whole batch from the training's own generator, then divides the batch into one part
per process and accumulation step. Each term keeps its weight in the mean over the whole batch, so the losses and
gradients of the parts add up to those of the batch. The number of processes and parts therefore changes results only by
the rounding of sums. On a CPU with a fixed number of threads, a seed gives bit-identical weights, whether or not the
run was interrupted. The trainer does not touch the global random state.

A run that diverges stops. A loss, gradient or weight that is not finite raises a `FloatingPointError` before that step
is saved, so the checkpoint on disk is the last good one.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.display import Result, Table
from diffusion_lens.loss_batch import LossBatch
from diffusion_lens.losses import Objective
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import as_dataclass, load_result, provenance, save_result
from diffusion_lens.training.batches import RowOrder, RowSource, TrainingRows
from diffusion_lens.training.devices import Accelerator, accelerated, plain_forward
from diffusion_lens.training.evaluation_steps import evaluation_steps
from diffusion_lens.training.recipes import TrainingConfig
from diffusion_lens.training.run_folder import RunFolder, RunState, describe_run

Evaluate = Callable[[DiffusionTransformer], Mapping[str, float]]


@dataclass(frozen=True, eq=False, repr=False)
class TrainingRecord(Result):
    """The record of a training.

    Columns of the data frame: step, loss.

    Attributes:
        config: Recipe of the training.
        losses: Float[step], the loss of every step.
        record: Seconds, threads, processes, model, hashes of the data and of the weights before and after, and
            versions. The entry "starts" lists the step and the device of each start and resumption.
        evaluations: Results of `evaluate`, each with the number of completed steps.
    """

    config: TrainingConfig
    losses: Float[Tensor, "step"]
    record: dict[str, Any]
    evaluations: tuple[dict[str, Any], ...] = ()

    def _table(self) -> Table:
        return Table({"step": range(1, len(self.losses) + 1), "loss": self.losses})

    def save(self, path: str | Path) -> Path:
        """Write everything to one `.safetensors` file."""
        settings = {"config": asdict(self.config), "record": self.record, "evaluations": self.evaluations}
        return save_result(path, "training record", {"losses": self.losses}, settings)

    @classmethod
    def load(cls, path: str | Path) -> "TrainingRecord":
        """Read what `save` wrote."""
        tensors, settings = load_result(path, "training record")
        config = as_dataclass(TrainingConfig, settings["config"])
        return as_dataclass(cls, {**tensors, **settings, "config": config})


def train(
    model: DiffusionTransformer,
    tokens: Int[Tensor, "batch pos"] | RowSource,
    config: TrainingConfig,
    *,
    objective: Objective | None = None,
    folder: str | Path | None = None,
    checkpoint_every: int = 500,
    evaluate: Evaluate | None = None,
    evaluate_every: int | Collection[int] = 500,
    progress: bool = True,
) -> TrainingRecord:
    """Train `model` in place on rows of tokens.

    Afterwards the model has the mode it had before (training or evaluation) and no gradients, also after an exception.
    Under `accelerate launch` the model moves to the device of its process, and every process returns the same record.

    Args:
        model: Model to train.
        tokens: Rows of tokens. In `TrainingRows` each row may have its own length; `PackedRows` draws documents afresh.
        config: Recipe of the training.
        objective: Custom loss, a function of model, tokens and generator. It receives the whole batch, so it requires
            one process and `accumulate=1`. Default: the model's own loss.
        folder: Folder for `run.json` and the checkpoint. An incomplete training in this folder is resumed; a complete
            one is only read.
        checkpoint_every: Number of steps between checkpoints. The last step always writes one.
        evaluate: Function that returns metrics to track, such as recall. Each process calls it without gradients and
            in evaluation mode.
        evaluate_every: Number of steps between evaluations, or the steps after which there is one. The last step always
            has one.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: The folder contains another training, a batch has fewer rows than parts, the precision does not
            fit, or `evaluate_every` has an entry that is no step of the training.
        FloatingPointError: A loss, a gradient or a weight is not finite. The last good checkpoint remains.
    """
    rows = tokens if isinstance(tokens, RowSource) else TrainingRows(tokens)
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every is {checkpoint_every}; it must be at least 1")
    evaluated = evaluation_steps(evaluate_every, config.steps)
    with accelerated(model, config.mixed_precision) as accelerator, _training_mode(model):
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
                if evaluate is not None and step + 1 in evaluated:
                    run.evaluate(evaluate, step + 1)
                if home is not None and (last or (step + 1) % checkpoint_every == 0) and accelerator.is_main_process:
                    run.save(home.checkpoint, step + 1)
                bar.update()
                bar.set_postfix(run.shown, refresh=False)
        return run.record()


class _Run:
    """A training and its steps."""

    def __init__(
        self,
        model: DiffusionTransformer,
        rows: RowSource,
        config: TrainingConfig,
        objective: Objective | None,
        accelerator: Accelerator,
    ) -> None:
        self.model, self.rows, self.config, self.objective = model, rows, config, objective
        self.accelerator = accelerator
        self.saved: tuple[Path, int] | None = None  # Path of the last checkpoint, and its number of steps.
        n_parts = accelerator.num_processes * config.accumulate
        if objective is not None and n_parts > 1:
            raise ValueError(
                f"a custom objective takes the whole batch, which cannot be divided into {n_parts} parts: take one "
                "process and accumulate=1"
            )
        if n_parts > config.batch_size:
            raise ValueError(
                f"a batch of {config.batch_size} rows cannot be divided into {n_parts} parts "
                f"({accelerator.num_processes} processes, accumulate={config.accumulate}); use a larger batch_size"
            )
        self.identity = describe_run(model, rows, config, objective)
        self.network = accelerator.prepare_model(model, device_placement=accelerator.num_processes > 1)
        optimizer = torch.optim.AdamW(_parameter_groups(model, config), lr=config.lr, betas=config.betas)
        self.optimizer = accelerator.prepare_optimizer(optimizer)
        order = RowOrder(rows.n_rows, torch.Generator().manual_seed(config.seed))
        self.state = RunState(dict(model.named_parameters()), optimizer, order, accelerator.scaler)

    def start(self, step: int) -> None:
        """Record a start or resumption at this step."""
        self._started = time.perf_counter() - self.state.seconds
        if step < self.config.steps:
            self.state.starts.append(
                {
                    "step": step,
                    "threads": torch.get_num_threads(),
                    "processes": self.accelerator.num_processes,
                    "device": str(self.model.cfg.device),
                }
            )

    def update(self, step: int) -> None:
        """Do one update: select a batch, compute its gradient, step AdamW."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr_at(step)
        self.optimizer.zero_grad()
        generator = self.state.order.generator
        batch = self.rows.next_batch(self.state.order, self.config.batch_size, self.model.cfg.device)
        if self.objective is None:
            loss = self._backward(batch.question(self.model, generator))
        else:
            loss = self.objective(self.model, batch.tokens, generator)
            self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip)
        loss_value = loss.item()
        self._require_finite("the loss", loss_value, step)
        if self.accelerator.scaler is None:  # A scaler skips steps whose float16 gradients overflow.
            self._require_finite("the norm of the gradient", float(norm), step)
        self.optimizer.step()
        self.state.losses.append(loss_value)

    def require_weights(self, step: int) -> None:
        """Raise a `FloatingPointError` unless all weights are finite."""
        for name, weight in self.model.named_parameters():
            if not bool(weight.isfinite().all()):
                self._require_finite(f"the largest entry of {name}", float(weight.detach().abs().max()), step)

    def _require_finite(self, what: str, number: float, step: int) -> None:
        if math.isfinite(number):
            return
        checkpoint = "no checkpoint was saved before"
        if self.saved is not None:
            checkpoint = f"{self.saved[0]} contains the last good one, after {self.saved[1]} steps"
        raise FloatingPointError(
            f"{what} is {number} in step {step} of {self.config.steps}: the training has diverged, and this step is "
            f"not saved ({checkpoint}). Try a smaller lr (it is {self.config.lr_at(step):g} in this step) or a lower "
            "clip in a new folder, or look for damaged weights or data; resuming would stop at this step again"
        )

    def evaluate(self, evaluate: Evaluate, step: int) -> None:
        """Evaluate the model as users call it, in evaluation mode and without autocast."""
        self.model.eval()
        with torch.no_grad(), plain_forward(self.model):
            metrics = {name: float(value) for name, value in evaluate(self.model).items()}
        self.model.train()
        self.state.evaluations.append({"step": step, **metrics})

    def save(self, path: Path, n_steps: int) -> None:
        """Write a checkpoint of the training after `n_steps` steps."""
        self.saved = path, n_steps
        self.state.seconds = time.perf_counter() - self._started
        self.state.save(path)

    @property
    def shown(self) -> dict[str, str]:
        """Metrics on the progress bar."""
        metrics = {"loss": self.state.losses[-1], **(self.state.evaluations[-1] if self.state.evaluations else {})}
        return {name: f"{value:.3f}" for name, value in metrics.items() if name != "step"}

    def record(self) -> TrainingRecord:
        """The record of the complete training."""
        record = {
            "seconds": time.perf_counter() - self._started,
            "threads": torch.get_num_threads(),
            "processes": self.accelerator.num_processes,
            "starts": self.state.starts,
            "rows": self.identity["rows"],
            "data_sha256": self.identity["data_sha256"],
            "started_from_sha256": self.identity["weights_sha256"],
            **provenance(self.model, self.model.cfg),
        }
        return TrainingRecord(self.config, torch.tensor(self.state.losses), record, tuple(self.state.evaluations))

    def _backward(self, question: LossBatch) -> Tensor:
        """Loss of the whole batch. Adds the gradients of this process's parts."""
        processes, accumulate = self.accelerator.num_processes, self.config.accumulate
        n_parts, n_rows = processes * accumulate, len(question.tokens)
        first = self.accelerator.process_index * accumulate
        losses = []
        for i in range(first, first + accumulate):
            part = question if n_parts == 1 else question.part(i * n_rows // n_parts, (i + 1) * n_rows // n_parts)
            last = i == first + accumulate - 1
            with nullcontext() if last else self.accelerator.no_sync(self.network):
                whole = self.model.all_real(part.tokens)
                loss = part.loss(self.network(part.tokens, attention_mask=whole, logits_at=part.rows, **part.beside))
                # Accelerate averages gradients over processes, but the parts must add up.
                self.accelerator.backward(loss * processes)
            losses.append(loss.detach())
        total: Tensor = self.accelerator.reduce(torch.stack(losses).sum(), "sum")
        return total


def _parameter_groups(model: DiffusionTransformer, config: TrainingConfig) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": config.weight_decay if config.decay_norms else 0.0},
    ]


@contextmanager
def _training_mode(model: DiffusionTransformer) -> Iterator[None]:
    was_training = model.training
    model.train()
    try:
        with torch.enable_grad():
            yield
    finally:
        model.zero_grad()
        model.train(was_training)
