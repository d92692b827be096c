"""Trains and measures the pair, and writes its files."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diffusion_lens.data import site_facts
from diffusion_lens.data.word_tokenizer import save_tokenizer
from diffusion_lens.site_pair import measures
from diffusion_lens.site_pair.phases import Trained, train_phases
from diffusion_lens.site_pair.recipe import (
    BATCH_SIZE,
    BLOCKS,
    PHASES,
    SHIPPED_SEED,
    WEIGHT_STD,
    Kind,
    Phase,
    architecture,
)
from weight_conversion import export, n_params, renamed_together, sha256_of_file, write_json


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
        save_tokenizer(site_facts.build_tokenizer(world), staging, architecture("mdm", 1, BLOCKS).n_ctx)
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
