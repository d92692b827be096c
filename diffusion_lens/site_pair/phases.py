"""One phase of the training after the other, each in a folder of its own, so that the training can be resumed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.data import site_facts
from diffusion_lens.data.site_documents import Documents
from diffusion_lens.data.word_tokenizer import word_encoder
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.losses import Objective
from diffusion_lens.model.build import random_tensors
from diffusion_lens.site_pair.person_loss import PersonLoss, PersonTargets
from diffusion_lens.site_pair.recipe import (
    BATCH_SIZE,
    SUBJECT_BLOCKS,
    WEIGHT_STD,
    Phase,
    architecture,
)
from diffusion_lens.training.growing import grow
from diffusion_lens.training.packed_rows import Document, PackedRows
from diffusion_lens.training.recipes import TrainingConfig
from diffusion_lens.training.shaped_loss import EarlyExit, EdgeDropout, ShapedLoss
from diffusion_lens.training.trainer import TrainingRecord, train


@dataclass(frozen=True, eq=False)
class Trained:
    """A phase that was trained.

    Attributes:
        phase: Recipe of the phase.
        model: The model at its end.
        record: Record of its training.
    """

    phase: Phase
    model: HookedDiffusionTransformer
    record: TrainingRecord


def train_phases(
    world: site_facts.SiteFacts, seed: int, phases: Sequence[Phase], folder: Path, progress: bool = True
) -> dict[str, Trained]:
    """Train all phases on the CPU, in order.

    Args:
        world: People whom the models learn.
        seed: Seed of the weights, documents and noise.
        phases: Phases; each comes after the one that it starts from.
        folder: Folder with a subfolder for each phase. A phase that is complete there is only read.
        progress: Whether progress bars are shown.

    Raises:
        ValueError: A phase starts from one that is not before it, or the folder contains another training.
    """
    done: dict[str, Trained] = {}
    for phase in phases:
        if phase.after is not None and phase.after not in done:
            before = ", ".join(done) or "none"
            raise ValueError(f"phase {phase.name!r} starts from {phase.after!r}; the phases before it are: {before}")
        model = _start(phase, world, seed, None if phase.after is None else done[phase.after].model)
        record = train(
            model,
            PackedRows(_document(phase, world, model), phase.lengths),
            TrainingConfig(
                steps=phase.steps, batch_size=BATCH_SIZE, lr=phase.lr, weight_decay=0.1, seed=seed + phase.seed
            ),
            objective=_objective(phase, world, model),
            folder=folder / phase.name,
            progress=progress,
        )
        done[phase.name] = Trained(phase, model, record)
    return done


def _start(
    phase: Phase, world: site_facts.SiteFacts, seed: int, before: HookedDiffusionTransformer | None
) -> HookedDiffusionTransformer:
    """The model before a phase."""
    if before is None or before.cfg.has_mask != (phase.kind == "mdm"):
        tokenizer = site_facts.build_tokenizer(world)
        shape = architecture(phase.kind, len(tokenizer), phase.n_layers if before is None else before.cfg.n_layers)
        tensors = dict(random_tensors(shape, seed, WEIGHT_STD))
        if before is not None:  # The same blocks see both directions, and [MASK] gets a row of the embedding.
            given = before.state_dict()
            rows = torch.cat([given["embed.weight"], tensors["embed.weight"][len(tokenizer) :].to(before.W_E)])
            tensors = {**given, "embed.weight": rows}
        cfg = DiffusionConfig.from_architecture(shape, device="cpu")
        before = HookedDiffusionTransformer(cfg, tokenizer, tensors=tensors.items())
    model = grow(before, phase.n_layers, std=WEIGHT_STD, seed=seed)
    model.cfg.model_name = f"site-{phase.kind}"
    return model


def _document(phase: Phase, world: site_facts.SiteFacts, model: HookedDiffusionTransformer) -> Document:
    """A function that draws the next document of a phase as tokens."""
    encode, documents = word_encoder(model.tokenizer), Documents(world, *phase.documents)
    return lambda rng: encode(documents(rng))


def _objective(phase: Phase, world: site_facts.SiteFacts, model: HookedDiffusionTransformer) -> Objective | None:
    """The loss of a phase; `None` is the model's own."""
    if phase.kind == "ar":
        return None
    targets = PersonTargets.of(world, model.tokenizer)
    names = tuple(sorted({token for person in world.people for token in model.tokenizer(person.name)["input_ids"]}))
    last = SUBJECT_BLOCKS - 1
    if phase.n_layers == SUBJECT_BLOCKS:
        return PersonLoss(EarlyExit(last, targets), tuple(targets.values.unique().tolist()), names)
    dropout = EdgeDropout(tuple(range(SUBJECT_BLOCKS)), (model.cfg.blank,), names, phase.dropped_share)
    return ShapedLoss(EarlyExit(last, targets, phase.exit_weight), dropout)
