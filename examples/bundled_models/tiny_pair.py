"""Trains the bundled models: a masked diffusion model and its AR baseline ("twin"), on the toy facts from one seed.

`make tiny` trains both (about a quarter of an hour on one core). It writes
`tiny-mdm.safetensors`, `tiny-ar.safetensors`, their common config and tokenizer, and `results.json` with the recipe and
their recall. The models show the reversal curse: queried in the direction that was left out of training, the MDM
answers and the AR baseline does not (Berglund et al. 2023, arXiv 2309.12288; Nie et al. 2024, arXiv 2410.18514). After
an interruption, the same command continues the training.
"""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerFast

from bundled_models import renamed_together
from bundled_models.rows_and_blocks import toy_rows, toy_tokenizer
from diffusion_lens.data import toy_facts
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.model.build import random_tensors
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.training.trainer import TrainingConfig, TrainingRecord, train
from weight_conversion import Architecture, export, n_params, sha256_of_file, write_json

Kind = Literal["mdm", "ar"]

SHIPPED_SEED = 0
WEIGHT_STD = 0.06
# An MDM recalls facts in the trained direction early, and begins to learn the reverse after about 2000 steps.
STEPS: dict[Kind, int] = {"mdm": 8000, "ar": 1500}
DENOISING_STEPS = 8


def architecture(kind: Kind, n_words: int) -> Architecture:
    """The architecture of one model for a vocabulary of `n_words`; only the MDM has a row for [MASK]."""
    masked = kind == "mdm"
    return Architecture(
        family="lit_gpt",
        name="tiny",
        n_layers=4,
        d_model=128,
        n_heads=4,
        n_key_value_heads=4,
        d_head=32,
        d_mlp=352,
        d_vocab=n_words + masked,
        d_vocab_out=n_words,
        n_ctx=64,
        attention_dir="bidirectional" if masked else "causal",
        readout="in_place" if masked else "shifted",
        mask_token_id=n_words if masked else None,
        norm_eps=1e-5,
        rotary_base=10000.0,
        rotary_dtype="bfloat16",
    )


def train_model(
    kind: Kind,
    facts: toy_facts.ToyFacts,
    config: TrainingConfig,
    progress: bool = True,
    folder: str | Path | None = None,
) -> tuple[HookedDiffusionTransformer, TrainingRecord]:
    """Train one of the two models on the CPU.

    Args:
        kind: "mdm" or "ar".
        facts: Toy facts to train on.
        config: Settings of the training; its seed is also the seed of the initial weights.
        progress: Whether a progress bar is shown.
        folder: Folder of the training's checkpoint, from which an interrupted training continues.
    """
    tokenizer = toy_tokenizer(facts)
    sentences = toy_rows(facts.sentences(), tokenizer)
    shape = architecture(kind, len(tokenizer))
    model = HookedDiffusionTransformer(
        DiffusionConfig.from_architecture(shape, device="cpu", model_name=f"tiny-{kind}"),
        tokenizer,
        tensors=random_tensors(shape, config.seed, std=WEIGHT_STD),
    )
    return model, train(model, sentences, config, folder=folder, progress=progress)


def measure(model: HookedDiffusionTransformer, facts: toy_facts.ToyFacts) -> list[dict[str, Any]]:
    """Exact match on held-out queries about people trained in one direction, for each (trained, queried) direction."""
    queried = [*facts.facts("p2d"), *facts.facts("d2p")]
    recall = recall_by_steps(model, queried, [DENOISING_STEPS], length=toy_facts.SENTENCE_LENGTH, cfg_scale=0.0)
    return [
        {"trained": trained, "asked": direction, "accuracy": share.mean}
        for (trained, direction), row in recall.table("exact").items()
        for share in row.values()
    ]


def make_pair(
    folder: str | Path,
    seed: int = SHIPPED_SEED,
    corpus_seed: int = toy_facts.SHIPPED_SEED,
    *,
    steps: Mapping[Kind, int] | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Train both models and write them; returns the content of `results.json`. Files are replaced atomically.

    During the training `folder` also contains `tiny-mdm.run` and `tiny-ar.run`, the folders of the two trainings.

    Args:
        folder: Folder to write to.
        seed: Seed of weights, batches and noise.
        corpus_seed: Seed of the toy facts.
        steps: Number of training steps of each model; by default those of the recipe.
        progress: Whether progress bars are shown.
    """
    facts = toy_facts.load(corpus_seed)
    target = Path(folder)
    with renamed_together(target) as staging:
        models: dict[str, Any] = {}
        for kind, n_steps in (steps or STEPS).items():
            config = TrainingConfig(steps=n_steps, seed=seed)
            model, training = train_model(kind, facts, config, progress, target / f"tiny-{kind}.run")
            # The architecture has a common name, because both models share one config file.
            shape = architecture(kind, model.cfg.d_vocab_out)
            path = export(dict(model.state_dict()), shape, staging / f"tiny-{kind}.safetensors")
            models[f"tiny-{kind}"] = {
                "recall": measure(model, facts),
                "training": asdict(training.config),
                "last_loss": training.losses[-100:].mean().item(),
                "parameters": n_params(shape),
                "sha256": sha256_of_file(path),
                **training.record,
            }
        results = {
            "corpus_seed": corpus_seed,
            "seed": seed,
            "sentences": len(facts.sentences()),
            "weight_std": WEIGHT_STD,
            "measured_with": {"length": toy_facts.SENTENCE_LENGTH, "steps": DENOISING_STEPS, "cfg_scale": 0.0},
            "models": models,
        }
        save_tokenizer(toy_tokenizer(facts), staging, architecture("mdm", 1).n_ctx)
        write_json(results, staging / "results.json")
    for kind in steps or STEPS:
        shutil.rmtree(target / f"tiny-{kind}.run")
    return results


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path, n_ctx: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, for models with a context of `n_ctx` positions."""
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    # Written here, because transformers 4 does not know the class name that transformers 5 would save.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<eos>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": n_ctx,
    }
    write_json(settings, folder / "tokenizer_config.json")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bundled_models.tiny_pair", description="Train the bundled models, tiny-mdm and tiny-ar."
    )
    parser.add_argument("--out", default="tiny", help="Folder to write to (default: %(default)s).")
    parser.add_argument("--seed", type=int, default=SHIPPED_SEED, help="Seed of weights, batches and noise.")
    parser.add_argument("--corpus-seed", type=int, default=toy_facts.SHIPPED_SEED, help="Seed of the toy facts.")
    parser.add_argument("--quiet", action="store_true", help="Show no progress bars.")
    options = parser.parse_args(arguments)
    # With one thread sums have one order, so the same seed gives the same weights on any number of cores.
    torch.set_num_threads(1)
    make_pair(options.out, options.seed, options.corpus_seed, progress=not options.quiet)


if __name__ == "__main__":
    main()
