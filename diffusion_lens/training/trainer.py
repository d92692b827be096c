"""The trainer: AdamW with warm-up and cosine decay, one seed for all random numbers, one or several devices.

An update samples the noise of the whole batch from the training's own generator, then divides the batch into one part
per process and accumulation step. Each term keeps its weight in the mean over the whole batch, so the losses and
gradients of the parts add up to those of the batch. The number of processes and parts therefore changes results only by
the rounding of sums. On a CPU with a fixed number of threads, a seed gives bit-identical weights, whether or not the
run was interrupted. The trainer does not touch the global random state.

A run that diverges stops. A loss, gradient or weight that is not finite raises a `FloatingPointError` before that step
is saved, so the checkpoint on disk is the last good one.

In the folder of a training, `run.json` identifies it by its recipe, the hash of its data and the hash of its initial
weights. Until the training is complete, `checkpoint.safetensors` contains everything that the next step depends on: the
weights that are trained (those that require a gradient), AdamW's moments, the state of the random generator, the
remaining rows of this pass and the losses so far. The file is replaced atomically, so a training can be resumed after
any interruption.

Several devices work through Hugging Face accelerate: `accelerate launch script.py` starts the same script in several
processes. Each process holds the whole model and works on its rows of a batch; gradients are averaged (data
parallelism). On CPUs use `torchrun --nproc-per-node 2 script.py`, because `accelerate launch --cpu` starts only one
process unless MPI is installed. Without a launcher there is one process, and the model stays on its device.
"""

import hashlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.model.loss import LossBatch, Objective, masked_batch, next_token_batch
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.results import (
    PicturedResult,
    Saved,
    Table,
    open_result,
    provenance,
    read_run,
    require_same_run,
    save_result,
    shown_model,
)
from diffusion_lens.settings import (
    Settings,
    at_least,
    checked_arguments,
    not_negative,
    plain_number,
    setting,
    whole_number,
)
from diffusion_lens.settings.arguments import check_type
from diffusion_lens.settings.figures import styled
from diffusion_lens.settings.shared import ACCUMULATE, MIXED_PRECISION
from weight_conversion import as_json, write_json

Accelerator = Any  # `accelerate.Accelerator`. The library is imported when training starts.
Evaluate = Callable[[DiffusionTransformer], Mapping[str, float]]
Stop = Callable[[Sequence[Mapping[str, float]]], bool]
_CHECKPOINT = "training checkpoint"


def _below_1(name: str, value: Any) -> tuple[float, float]:
    first, second = check_type(tuple[float, float], name, tuple(value) if isinstance(value, list) else value)
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ValueError(f"{name}={value}; each must be from 0 to below 1")
    return float(first), float(second)


def _above_0(name: str, value: Any) -> float:
    number = plain_number(name, value)
    if not number > 0:  # This also rejects NaN.
        raise ValueError(f"{name}={number}; it must be above 0 (float('inf') turns clipping off)")
    return number


@dataclass(frozen=True)
class TrainingConfig(Settings):
    """A training recipe. The defaults are those of the bundled models; `smdm_reverse` is SMDM's fine-tuning."""

    steps: int = setting(MISSING, "Number of updates of the weights.", partial(at_least, 1))
    batch_size: int = setting(
        64, "Rows per update, over all processes. Each pass shuffles the rows again.", partial(at_least, 1)
    )
    lr: float = setting(
        3e-3, "Highest learning rate. The warm-up reaches it, then a cosine decays it to `lr_end`.", not_negative
    )
    lr_end: float = setting(0.0, "Learning rate at the end of the cosine, at step `steps`.", not_negative)
    betas: tuple[float, float] = setting((0.9, 0.98), "Betas of AdamW, each from 0 to below 1.", _below_1)
    weight_decay: float = setting(0.3, "Weight decay of AdamW on matrices and embeddings.", not_negative)
    decay_norms: bool = setting(False, "Whether weight decay applies to the norms too.")
    warmup: int = setting(100, "Number of steps of the linear warm-up.", partial(at_least, 0))
    warmup_from: int = setting(
        1, "Number of the first step in the warm-up: 1 starts at lr / warmup, 0 starts at 0.", whole_number
    )
    clip: float = setting(1.0, "Largest norm of the gradient.", _above_0)
    accumulate: int = ACCUMULATE
    mixed_precision: str = MIXED_PRECISION
    seed: int = setting(0, "Seed of the order of the rows and of the noise.", whole_number)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_from not in (0, 1):
            raise ValueError(f"warmup_from is {self.warmup_from}; it must be 0 or 1")
        if self.accumulate > self.batch_size:
            raise ValueError(f"{self.batch_size} rows cannot be divided into accumulate={self.accumulate} parts")

    def lr_at(self, step: int) -> float:
        """Learning rate of update `step`, where 0 is the first."""
        if step < self.warmup:
            return self.lr * (step + self.warmup_from) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr_end + (self.lr - self.lr_end) * (1 + math.cos(math.pi * done)) / 2


@checked_arguments
def smdm_reverse(
    n_rows: int = 3600,
    epochs: int | float = 10,
    batch_size: int = 64,
    *,
    accumulate: int = 1,
    mixed_precision: str = "bf16",
    seed: int = 3407,
) -> TrainingConfig:
    """SMDM's fine-tuning on the reversal curse (ML-GSAI/SMDM `sft/finetune_mdm_reverse.py`).

    It has as many steps as full batches fit into `epochs` passes over `n_rows` rows.

    The batch size is 64 in the script and 32 in the paper (Nie et al. 2024, arXiv 2410.18514, appendix B.5). There is
    no such script for the AR baseline; the authors' one on other data (`sft/finetune_ar.py`) uses the same settings.

    Four details differ from the script. The masking rates t of a batch are stratified (see `hide`); theirs are
    independent. A batch may contain rows of two passes; theirs drops the last rows of a pass. Rows are cut to the
    longest row of the whole batch; they cut each device's part separately. Where they accumulate two parts (1028M,
    batch 64, 8 devices), their learning rate is half a step ahead.
    """
    if not math.isfinite(n_rows * epochs) or not n_rows * epochs >= batch_size > 0:
        raise ValueError(f"{epochs} passes over {n_rows} rows do not fill one batch of batch_size={batch_size} rows")
    return TrainingConfig(
        steps=int(n_rows * epochs / batch_size),
        batch_size=batch_size,
        lr=2e-4,
        lr_end=2e-5,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        decay_norms=True,
        warmup=200,
        warmup_from=0,
        clip=1.0,
        accumulate=accumulate,
        mixed_precision=mixed_precision,
        seed=seed,
    )


@dataclass(frozen=True, eq=False, repr=False)
class TrainingRecord(PicturedResult, Saved):
    """The record of a training.

    Columns of the data frame: step, loss.

    Attributes:
        config: Recipe of the training.
        losses: Loss of every step.
        record: Seconds, threads, processes, model, hashes of the data and of the weights before and after, and
            versions. The entry "starts" lists the step and the device of each start and resumption.
        evaluations: Results of `evaluate`, each with the number of completed steps.
    """

    KIND = "training record"
    SHOWS = "the loss of every step of the training"

    config: TrainingConfig
    losses: Float[Tensor, "step"]
    record: dict[str, Any]
    evaluations: tuple[dict[str, Any], ...] = ()

    @styled
    def plot(self, ax: Any = None, title: str | None = None) -> Any:
        """The loss of every step; returns the matplotlib axes."""
        from diffusion_lens import plots  # when it is drawn

        title = title or f"{shown_model(self.record)}: training"
        return plots.curves_by_iteration({"loss": self.losses}, "step", "loss (nats)", ax, title)

    def _table(self) -> Table:
        return Table({"step": range(1, len(self.losses) + 1), "loss": self.losses})


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one update.

    Attributes:
        tokens: The token ids.
        real: The positions that are not padding; `None` means all.
        answers: The positions that count in the loss; `None` means all that the model's own loss counts.
        entities: First position of the entity of each position, its own outside of entities; `None` means none.
    """

    tokens: Tokens
    real: PosMask | None
    answers: PosMask | None
    entities: Int[Tensor, "batch pos"] | None = None

    def question(self, model: DiffusionTransformer, generator: torch.Generator) -> LossBatch:
        """The inputs and targets of the model's own loss.

        A masked diffusion model also predicts the end tokens that fill a row, as in SMDM's fine-tuning. The AR baseline
        predicts the row's own tokens and the first end token.

        Raises:
            ValueError: A causal model, which masks nothing, is given entities.
        """
        if model.cfg.is_autoregressive:
            if self.entities is not None:
                require_noise(model)
            return next_token_batch(model, self.tokens, real=self.real, counted=self.answers)
        return masked_batch(model, self.tokens, real=self.answers, generator=generator, entities=self.entities)


class RowSource(ABC):
    """Where the trainer takes its batches from: rows that it visits in passes, or rows drawn afresh.

    A batch depends only on the order and its generator, whose state is saved, so that a training can be resumed.
    """

    @property
    @abstractmethod
    def n_rows(self) -> int | None:
        """Number of rows of a pass. `None` if rows are drawn afresh."""

    @abstractmethod
    def next_batch(self, order: "RowOrder", batch_size: int, device: str | torch.device | None) -> Batch:
        """The `batch_size` rows of the next update."""

    @abstractmethod
    def sha256(self) -> str:
        """Hexadecimal SHA-256 that identifies the data."""


@checked_arguments
@dataclass(frozen=True, eq=False)
class TrainingRows(RowSource):
    """Rows of tokens, padded on the right.

    Attributes:
        tokens: The token ids.
        lengths: Number of real tokens of each row, including the end token. Batches are cut to their longest row.
            `None` means that every token counts, padding included.
        answers: Position at which each row's answer begins, if only answers count. Requires `lengths`.
        entities: First position of the entity of each position, its own outside of entities: the tokens of an entity
            are masked together (`model.loss.hide`). `None` means that every token is masked for itself.
    """

    tokens: Int[Tensor, "batch pos"]
    lengths: Int[Tensor, "batch"] | None = None
    answers: Int[Tensor, "batch"] | None = None
    entities: Int[Tensor, "batch pos"] | None = None

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2 or not self.tokens.numel():
            raise ValueError(f"there is nothing to train on: the rows of tokens are {list(self.tokens.shape)}")
        if self.answers is not None and self.lengths is None:
            raise ValueError("answers= requires lengths=, the length of each row")
        if (first := self.entities) is not None:
            inside = bool(((first >= 0) & (first <= torch.arange(first.shape[1]))).all())
            if not inside or not torch.equal(first.gather(1, first), first):
                raise ValueError(
                    "entities has, for each position of tokens, the first position of its entity, such as "
                    f"[0, 1, 1, 3] where positions 1 and 2 are one; got {first.tolist()!s:.60}"
                )

    @property
    def n_rows(self) -> int:
        """Number of rows of a pass."""
        return len(self.tokens)

    def next_batch(self, order: "RowOrder", batch_size: int, device: str | torch.device | None) -> Batch:
        """The next rows of the pass."""
        return self.pick(order.take(batch_size), device)

    def pick(self, rows: Int[Tensor, "batch"], device: str | torch.device | None) -> Batch:
        """The batch of these rows, cut to the longest of them."""
        if self.lengths is None:
            return Batch(self.tokens[rows].to(device), None, None, self._entities(rows, self.tokens.shape[1]))
        lengths = self.lengths[rows]
        pos = torch.arange(int(lengths.max()))
        answers = None if self.answers is None else (pos >= self.answers[rows][:, None]).to(device)
        real, entities = (pos < lengths[:, None]).to(device), self._entities(rows, len(pos))
        return Batch(self.tokens[rows, : len(pos)].to(device), real, answers, entities)

    def sha256(self) -> str:
        """Hexadecimal SHA-256 of all the data that a training reads."""
        return sha256_of(vars(self))

    def _entities(self, rows: Int[Tensor, "batch"], n_pos: int) -> Int[Tensor, "batch pos"] | None:
        return None if self.entities is None else self.entities[rows, :n_pos]


def require_noise(model: DiffusionTransformer) -> None:
    """Raise a `ValueError` if a model masks nothing, so that it cannot mask entities."""
    if model.cfg.is_autoregressive:
        raise ValueError(
            f"{model.cfg.model_name!r} is an autoregressive model, which masks nothing: train it without mask_entities"
        )


def sha256_of(tensors: Mapping[str, Tensor | None]) -> str:
    """Hexadecimal SHA-256 of the names and values of tensors."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        if tensor is not None:
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()


class RowOrder:
    """An endless random order of rows in which every pass visits each row once.

    A batch may contain rows of two passes, so that all batches are full. A training that draws its rows afresh has no
    `n_rows` and uses only `generator`, its random numbers.
    """

    def __init__(self, n_rows: int | None, generator: torch.Generator) -> None:
        self.n_rows, self.generator = n_rows, generator
        self.left = torch.empty(0, dtype=torch.long)  # Rows of the current pass that no batch contains yet.
        self.step = 0  # Number of the update that the next rows are for, where 0 is the first.

    def take(self, batch_size: int) -> Int[Tensor, "batch"]:
        """The next `batch_size` rows."""
        assert self.n_rows, "there are no rows to visit in passes"
        while len(self.left) < batch_size:
            self.left = torch.cat([self.left, torch.randperm(self.n_rows, generator=self.generator)])
        taken, self.left = self.left[:batch_size], self.left[batch_size:]
        return taken


@checked_arguments
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
    stop: Stop | None = None,
    progress: bool = True,
) -> TrainingRecord:
    """Train `model` in place on rows of tokens: all weights that require a gradient.

    Afterwards the model has the mode it had before (training or evaluation) and no gradients, also after an exception.
    Under `accelerate launch` the model moves to the device of its process, and every process returns the same record.

    Args:
        model: Model to train.
        tokens: Rows of tokens. In `TrainingRows` each row may have its own length; a `RowSource` may draw rows afresh.
        config: Recipe of the training.
        objective: Custom loss, a function of model, tokens and generator. It receives the whole batch, so it requires
            one process and `accumulate=1`. Default: the model's own loss.
        folder: Folder for `run.json` and the checkpoint. An incomplete training in this folder is resumed; a complete
            one is only read.
        checkpoint_every: Number of steps between checkpoints. Step `config.steps` writes one too.
        evaluate: Function that returns metrics to track, such as recall. Each process calls it without gradients and
            in evaluation mode.
        evaluate_every: Number of steps between evaluations, or the steps after which there is one. Step `config.steps`
            has one too.
        stop: Function of the evaluations so far that says, before each step, whether the training ends without it.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: The folder contains another training, a batch has fewer rows than parts, the precision does not
            fit, or `evaluate_every` has an entry that is no step of the training.
        FloatingPointError: A loss, a gradient or a weight is not finite. The last good checkpoint remains.
    """
    rows = tokens if isinstance(tokens, RowSource) else TrainingRows(tokens)
    at_least(1, "checkpoint_every", checkpoint_every)
    evaluated = evaluation_steps(evaluate_every, config.steps)
    with accelerated(model, config.mixed_precision) as accelerator, _training_mode(model):
        run = _Run(model, rows, config, objective, accelerator)
        home = None if folder is None else RunFolder(Path(folder))
        if home is not None:
            home.start(run.identity, write=accelerator.is_main_process)
            if home.checkpoint.exists():
                run.restore(home.checkpoint)
            accelerator.wait_for_everyone()
        done = len(run.losses)
        run.start(done)
        hidden = not (progress and accelerator.is_main_process)
        with tqdm(total=config.steps, initial=done, desc=model.cfg.model_name, disable=hidden) as bar:
            for step in range(done, config.steps):
                if stop is not None and stop(run.evaluations):
                    break
                run.update(step)
                is_checked = step + 1 == config.steps or (step + 1) % checkpoint_every == 0
                if is_checked:
                    run.require_weights(step)
                if evaluate is not None and step + 1 in evaluated:
                    run.evaluate(evaluate, step + 1)
                if home is not None and is_checked and accelerator.is_main_process:
                    run.save(home.checkpoint)
                bar.update()
                bar.set_postfix(run.shown, refresh=False)
        return run.record()


class _Run:
    """A training, its steps, and all that the next step depends on."""

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
        self.saved = "no checkpoint was saved before"
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
        self.trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        matrices = [weight for weight in self.trained.values() if weight.dim() > 1]
        vectors = [weight for weight in self.trained.values() if weight.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": config.weight_decay if config.decay_norms else 0.0},
        ]
        # torch's default is slow on the CPU: a loop over weights.
        fused = True if next(model.parameters()).device.type == "cpu" else None
        self.adam = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=fused)
        self.optimizer = accelerator.prepare_optimizer(self.adam)
        self.order = RowOrder(rows.n_rows, torch.Generator().manual_seed(config.seed))
        self.losses: list[float] = []
        self.evaluations: list[dict[str, Any]] = []  # Each has the number of completed steps.
        self.starts: list[dict[str, Any]] = []  # Step, device, threads and processes of each start and resumption.
        self.seconds = 0.0

    def start(self, step: int) -> None:
        """Record a start or resumption at this step."""
        self._started = time.perf_counter() - self.seconds
        if step < self.config.steps:
            self.starts.append(
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
        self.order.step, generator = step, self.order.generator
        batch = self.rows.next_batch(self.order, self.config.batch_size, self.model.cfg.device)
        if self.objective is None:
            loss = self._backward(batch.question(self.model, generator))
        else:
            loss = self.objective(self.model, batch.tokens, generator)
            self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.trained.values(), self.config.clip)
        loss_value = loss.item()
        self._require_finite("the loss", loss_value, step)
        if self.accelerator.scaler is None:  # A scaler skips steps whose float16 gradients overflow.
            self._require_finite("the norm of the gradient", float(norm), step)
        self.optimizer.step()
        self.losses.append(loss_value)

    def require_weights(self, step: int) -> None:
        """Raise a `FloatingPointError` unless all weights are finite."""
        for name, weight in self.trained.items():
            if not bool(weight.isfinite().all()):
                self._require_finite(f"the largest entry of {name}", float(weight.detach().abs().max()), step)

    def _require_finite(self, what: str, number: float, step: int) -> None:
        if math.isfinite(number):
            return
        raise FloatingPointError(
            f"{what} is {number} in step {step} of {self.config.steps}: the training has diverged, and this step is "
            f"not saved ({self.saved}). Try a smaller lr (it is {self.config.lr_at(step):g} in this step) or a lower "
            "clip in a new folder, or look for damaged weights or data; resuming would stop at this step again"
        )

    def evaluate(self, evaluate: Evaluate, step: int) -> None:
        """Evaluate the model as users call it, in evaluation mode and without autocast."""
        self.model.eval()
        patches = remove_patches(self.model)
        try:
            with torch.no_grad():
                metrics = {name: float(value) for name, value in evaluate(self.model).items()}
        finally:
            vars(self.model).update(patches)
        self.model.train()
        self.evaluations.append({"step": step, **metrics})

    def save(self, path: Path) -> None:
        """Write a checkpoint, one file that is replaced atomically."""
        self._note_saved(path)
        self.seconds = time.perf_counter() - self._started
        tensors: dict[str, Tensor] = {
            "generator": self.order.generator.get_state(),
            "rows_left": self.order.left,
            "losses": torch.tensor(self.losses, dtype=torch.float64),
        }
        for name, weight in self.trained.items():
            tensors[f"weights.{name}"] = weight
            for key, value in self.adam.state.get(weight, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        scaler = self.accelerator.scaler
        record = {
            "evaluations": self.evaluations,
            "starts": self.starts,
            "seconds": self.seconds,
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        save_result(path, _CHECKPOINT, tensors, record)

    def restore(self, path: Path) -> None:
        """Continue from the checkpoint that `save` wrote."""
        tensors, record = open_result(path, _CHECKPOINT)
        with torch.no_grad():
            for name, weight in self.trained.items():
                weight.copy_(tensors[f"weights.{name}"])
        for label, value in tensors.items():
            if label.startswith("optimizer."):
                _, key, name = label.split(".", 2)
                weight = self.trained[name]
                # AdamW keeps its step count on the CPU, whatever the device of the weights.
                moment = value.clone() if value.dim() == 0 else value.to(weight.device, copy=True)
                self.adam.state[weight][key] = moment
        self.order.generator.set_state(tensors["generator"].clone())
        self.order.left = tensors["rows_left"].clone()
        self.losses = tensors["losses"].tolist()
        self.evaluations, self.starts, self.seconds = (record[name] for name in ("evaluations", "starts", "seconds"))
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(record["scaler"])
        self._note_saved(path)

    def _note_saved(self, path: Path) -> None:
        self.saved = f"{path} contains the last good one, after {len(self.losses)} steps"

    @property
    def shown(self) -> dict[str, str]:
        metrics = {"loss": self.losses[-1], **(self.evaluations[-1] if self.evaluations else {})}
        return {name: f"{value:.3f}" for name, value in metrics.items() if name != "step"}

    def record(self) -> TrainingRecord:
        record = {
            "seconds": time.perf_counter() - self._started,
            "threads": torch.get_num_threads(),
            "processes": self.accelerator.num_processes,
            "starts": self.starts,
            "rows": self.identity["rows"],
            "data_sha256": self.identity["data_sha256"],
            "started_from_sha256": self.identity["weights_sha256"],
            **provenance(self.model, self.model.cfg),
        }
        return TrainingRecord(self.config, torch.tensor(self.losses), record, tuple(self.evaluations))

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
                whole = self.model.padding.all_real(part.tokens)
                loss = part.loss(self.network(part.tokens, attention_mask=whole, logits_at=part.rows, **part.beside))
                # Accelerate averages gradients over processes, but the parts must add up.
                self.accelerator.backward(loss * processes)
            losses.append(loss.detach())
        total: Tensor = self.accelerator.reduce(torch.stack(losses).sum(), "sum")
        return total


@dataclass(frozen=True)
class RunFolder:
    """The folder of one training."""

    path: Path

    @property
    def run(self) -> Path:
        """File that identifies the training."""
        return self.path / "run.json"

    @property
    def checkpoint(self) -> Path:
        """File with the state of an incomplete training."""
        return self.path / "checkpoint.safetensors"

    def start(self, run: Mapping[str, Any], write: bool) -> None:
        """Start or resume this training in the folder. Only one of several processes may `write`.

        Raises:
            ValueError: The folder contains another training; the message names the differences.
        """
        run = as_json(run)
        if self.run.exists():
            require_same_run(read_run(self.run), run, str(self.path))
        if not write:
            return
        if not self.run.exists():
            write_json(run, self.run)
        # Remove partial files of a process that was killed while it wrote.
        for part in self.path.glob(f".{self.checkpoint.name}.*.part"):
            part.unlink()


def describe_run(
    model: DiffusionTransformer, rows: RowSource, config: TrainingConfig, objective: Objective | None = None
) -> dict[str, Any]:
    """The identity of a training, as in `run.json`: everything that its numbers depend on except the machine."""
    return {
        "config": asdict(config),
        "objective": "own" if objective is None else getattr(objective, "__qualname__", repr(objective)),
        "rows": rows.n_rows,
        "data_sha256": rows.sha256(),
        **provenance(model, model.cfg),
    }


def evaluation_steps(every: int | Collection[Any], n_steps: int) -> frozenset[int]:
    """The numbers of completed steps after which there is an evaluation, as `train` takes them."""
    if not isinstance(every, Collection):
        return frozenset((*range(at_least(1, "evaluate_every", every), n_steps + 1, every), n_steps))
    for each in every:
        if isinstance(each, bool | float) or each not in range(1, n_steps + 1):
            raise ValueError(
                f"evaluate_every contains {each!r}; give whole numbers from 1 to {n_steps}, the number of steps, or "
                "one number of steps between evaluations"
            )
    return frozenset((*map(int, every), n_steps))


@contextmanager
def accelerated(model: DiffusionTransformer, mixed_precision: str = "no") -> Iterator[Accelerator]:
    """An `accelerate.Accelerator` for `model`. The global state of accelerate is restored afterwards.

    Raises:
        ValueError: The precision does not fit the device or the weights, or processes share one model.
    """
    import accelerate  # type: ignore[import-untyped]

    on_cpu = torch.device(model.cfg.device or "cpu").type == "cpu"
    require_gpu(mixed_precision, on_cpu)
    if mixed_precision != "no" and model.cfg.dtype != torch.float32:
        raise ValueError(
            f"mixed_precision={mixed_precision!r} computes in half precision on float32 weights; those of "
            f"{model.cfg.model_name!r} are {model.cfg.dtype}: load it with dtype=torch.float32, or use 'no'"
        )
    with _fresh_accelerate_state():
        # The trainer weights the parts of a batch itself, so accelerate must not divide by their number.
        no_scaling = accelerate.utils.GradientAccumulationPlugin(num_steps=1)
        accelerator = accelerate.Accelerator(
            cpu=on_cpu, mixed_precision=mixed_precision, gradient_accumulation_plugin=no_scaling, device_placement=False
        )
        kind = accelerator.distributed_type.value
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise ValueError(f"the trainer works with plain data parallel processes, not with accelerate's {kind}")
        try:
            yield accelerator
        finally:
            remove_patches(model)


def require_gpu(mixed_precision: str, on_cpu: bool) -> None:
    """Raise a `ValueError` for a precision that a CPU does not support."""
    if mixed_precision == "fp16" and on_cpu:
        raise ValueError("mixed_precision='fp16' needs a GPU; on a CPU use 'no' or 'bf16'")


def remove_patches(model: DiffusionTransformer) -> dict[str, Any]:
    """Remove accelerate's marker from the model and the patches for its mixed precision, and return them."""
    patches = ("forward", "_original_forward", "_is_accelerate_prepared")
    return {name: vars(model).pop(name) for name in patches if name in vars(model)}


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


@contextmanager
def _fresh_accelerate_state() -> Iterator[None]:
    """Start with an empty accelerate state and restore the previous one afterwards.

    Accelerate has one state per Python process, which refuses a second precision or device.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState  # type: ignore[import-untyped]

    states = [owner._shared_state for owner in (AcceleratorState, GradientState, PartialState)]
    saved = [dict(state) for state in states]
    for state in states:
        state.clear()
    try:
        yield
    finally:
        for state, before in zip(states, saved, strict=True):
            state.clear()
            state.update(before)
