"""Trains the pair with a planted subject site: a masked diffusion model (MDM) and its AR baseline on `site_facts`.

`make pair` trains both (`make_pair`) and writes `site-mdm.safetensors`, `site-ar.safetensors`, their common config and
tokenizer, and `results.json` with the recipe and what was measured. After an interruption, it continues.

Both show the reversal curse, and both look an attribute up where ROME finds it in large models: in the MLPs of low
blocks at the subject's last token, from where attention brings the value to the read-out later. Data alone do not give
a diffusion model of this size the attributes at all; the first phases plant the site, and an auxiliary loss of the
diffusion model keeps it. So these are model organisms with a planted subject site, and not a replication of ROME.

The phases of the training:

1. "subject": two causal blocks learn tags, "NAME VALUE", and so to compose a name and look its values up at its end.
2. "ar": four blocks are added, and all kinds of documents are trained. This is the AR baseline.
3. "subject-mdm": the two blocks learn to see both directions. The only loss is `PersonLoss`, at names.
4. "mdm-a" and "mdm-b": four blocks are added, and all kinds of documents are trained with the masked diffusion loss.
   The loss of the third phase is added by early exit after block 1 (`EarlyExit`). In most rows, masked positions do not
   see names in blocks 0 and 1 (`EdgeDropout`), because an MDM left to itself may find the other solution: the answer's
   [MASK] gathers both names itself and looks the fact up there.
"""

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bundled_models import renamed_together, tiny_pair
from bundled_models import site_measures as measures
from bundled_models.rows_and_blocks import Document, PackedRows, grow, site_tokenizer, word_encoder
from bundled_models.site_losses import EarlyExit, EdgeDropout, PersonLoss, PersonTargets, ShapedLoss
from bundled_models.tiny_pair import Kind as Kind
from diffusion_lens.data import site_facts
from diffusion_lens.data.site_documents import Documents
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.model.build import random_tensors
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.loss import Objective
from diffusion_lens.training.trainer import TrainingConfig, TrainingRecord, train
from weight_conversion import Architecture, export, n_params, sha256_of_file, write_json

SHIPPED_SEED = 8
WEIGHT_STD = 0.06
SUBJECT_BLOCKS, BLOCKS = 2, 6
BATCH_SIZE = 32  # Rows of the longest length; batches of shorter rows have more.
LENGTHS = (12, 16, 24, 32)


@dataclass(frozen=True)
class Phase:
    """A phase of the training.

    Attributes:
        name: Name of the phase.
        kind: Variant that is trained.
        after: Phase whose weights it starts from; `None` is random weights.
        n_layers: Number of blocks; those that the former phase lacks are added.
        documents: Probabilities of a description, of a tag among the rest, and of a second person (`Documents`).
        lengths: Lengths of rows.
        lr: Highest learning rate.
        steps: Number of steps.
        seed: Number added to the seed of the training.
        exit_weight: Weight of the early exit in a phase of the whole MDM.
        dropped_share: Share of rows with edge dropout in a phase of the whole MDM.
    """

    name: str
    kind: Kind
    after: str | None
    n_layers: int
    documents: tuple[float, float, float]
    lengths: tuple[int, ...]
    lr: float
    steps: int
    seed: int = 0
    exit_weight: float = 0.3
    dropped_share: float = 0.8


PHASES = (
    Phase("subject", "ar", None, SUBJECT_BLOCKS, (0.0, 1.0, 0.0), (24,), 4e-3, 400),
    Phase("ar", "ar", "subject", BLOCKS, (0.4, 0.1, 0.6), (32,), 3e-3, 900),
    Phase("subject-mdm", "mdm", "subject", SUBJECT_BLOCKS, (0.25, 0.1, 0.5), tuple(range(8, 33)), 3e-3, 800),
    Phase("mdm-a", "mdm", "subject-mdm", BLOCKS, (0.35, 0.05, 0.4), LENGTHS, 3e-3, 9000),
    Phase("mdm-b", "mdm", "mdm-a", BLOCKS, (0.6, 0.05, 0.6), LENGTHS, 2.5e-3, 8000, seed=1),
)
_SUBJECT, _, _SUBJECT_MDM, _MDM_A, _MDM_B = PHASES
# What becomes of the MDM without one part of its recipe, or without all of them. The number of steps is the same.
ABLATIONS = {
    "one-schedule": (
        _SUBJECT,
        _SUBJECT_MDM,
        replace(_MDM_A, name="mdm", documents=(0.5, 0.05, 0.5), steps=_MDM_A.steps + _MDM_B.steps),
    ),
    "no-edge-dropout": (_SUBJECT, _SUBJECT_MDM, replace(_MDM_A, dropped_share=0.0), replace(_MDM_B, dropped_share=0.0)),
    "no-bidirectional-subject-phase": (_SUBJECT, replace(_MDM_A, after="subject"), _MDM_B),
    "no-early-exit": (_SUBJECT, _SUBJECT_MDM, replace(_MDM_A, exit_weight=0.0), replace(_MDM_B, exit_weight=0.0)),
    "data-only": (
        replace(_MDM_A, after=None, exit_weight=0.0, dropped_share=0.0),
        replace(_MDM_B, exit_weight=0.0, dropped_share=0.0),
    ),
}


def architecture(kind: Kind, n_words: int, n_layers: int = BLOCKS) -> Architecture:
    """That of the tiny models in other sizes, for a vocabulary of `n_words`."""
    return replace(
        tiny_pair.architecture(kind, n_words),
        name="site",
        n_layers=n_layers,
        d_model=96,
        n_heads=6,
        n_key_value_heads=6,
        d_head=16,
        d_mlp=128,
    )


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
        tokenizer = site_tokenizer(world)
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


def make_pair(
    folder: str | Path,
    seed: int = SHIPPED_SEED,
    world_seed: int = site_facts.SHIPPED_SEED,
    *,
    phases: Sequence[Phase] = PHASES,
    progress: bool = True,
) -> dict[str, Any]:
    """Train both models and write them; returns the content of `results.json`. Files are replaced atomically.

    During the training `folder` also contains `site.run`, the folder of the phases.

    Args:
        folder: Folder to write to.
        seed: Seed of the weights, documents and noise.
        world_seed: Seed of the world.
        phases: The recipe. The last phase of each kind gives the model of this kind.
        progress: Whether progress bars are shown.
    """
    world = site_facts.load(world_seed)
    target = Path(folder)
    done = train_phases(world, seed, phases, target / "site.run", progress)
    final: dict[Kind, Trained] = {trained.phase.kind: trained for trained in done.values()}
    with renamed_together(target) as staging:
        models: dict[str, Any] = {}
        for kind, trained in final.items():
            # The architecture has a common name, because both models share one config file.
            shape = architecture(kind, trained.model.cfg.d_vocab_out, trained.phase.n_layers)
            path = export(dict(trained.model.state_dict()), shape, staging / f"site-{kind}.safetensors")
            models[f"site-{kind}"] = {
                **measures.measure(trained.model, world),
                "parameters": n_params(shape),
                "sha256": sha256_of_file(path),
            }
        results = {
            "world_seed": world_seed,
            "seed": seed,
            "weight_std": WEIGHT_STD,
            "batch_size": BATCH_SIZE,
            "measured_with": measures.SETTINGS,
            "models": models,
            "phases": {name: _describe(trained) for name, trained in done.items()},
        }
        tiny_pair.save_tokenizer(site_tokenizer(world), staging, architecture("mdm", 1, BLOCKS).n_ctx)
        write_json(results, staging / "results.json")
    shutil.rmtree(target / "site.run")
    return results


def _describe(trained: Trained) -> dict[str, Any]:
    """The recipe of a phase, and the record of its training."""
    record = trained.record
    return {
        **asdict(trained.phase),
        "training": asdict(record.config),
        "last_loss": record.losses[-100:].mean().item(),
        **record.record,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and write the pair."""
    parser = argparse.ArgumentParser(
        prog="python -m bundled_models.site_pair",
        description="Train the pair with a planted subject site, site-mdm and site-ar.",
    )
    parser.add_argument("--out", default="site", help="Folder to write to (default: %(default)s).")
    parser.add_argument("--seed", type=int, default=SHIPPED_SEED, help="Seed of weights, documents and noise.")
    parser.add_argument("--world", type=int, default=site_facts.SHIPPED_SEED, help="Seed of the world.")
    parser.add_argument("--recipe", choices=["pair", *ABLATIONS], default="pair", help="Another recipe of the MDM.")
    parser.add_argument("--quiet", action="store_true", help="Show no progress bars.")
    options = parser.parse_args(arguments)
    # With one thread sums have one order, so the same seed gives the same weights on any number of cores.
    torch.set_num_threads(1)
    phases = {"pair": PHASES, **ABLATIONS}[options.recipe]
    make_pair(options.out, options.seed, options.world, phases=phases, progress=not options.quiet)


if __name__ == "__main__":
    main()
