"""Trains `tiny-block` and `tiny-uniform`: the tiny MDM's network and data, with other answers to what noise is and who
sees whom.

`make kinds` trains both (about half an hour on one core), one folder each. With
`tiny-mdm` they show one question under three kinds of diffusion (`examples/20_kinds_of_diffusion.py`).

`tiny-block` has the loss of block diffusion. The loss of `tiny-uniform` is the cross-entropy of the clean tokens, so
that its softmax is p(x_0 | z), over rows of which a third keep a clean beginning and a third a clean end: without a
[MASK] a network sees from the context alone which tokens are noise, and a prompt is never noise.
"""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from bundled_models import renamed_together, tiny_pair
from bundled_models.rows_and_blocks import toy_rows, toy_tokenizer
from diffusion_lens.data import toy_facts
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.model.build import random_tensors
from diffusion_lens.model.config import DiffusionConfig
from diffusion_lens.model.loss import Objective
from diffusion_lens.model.shapes import Tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.training.trainer import TrainingConfig, train
from weight_conversion import Architecture, export, sha256_of_file, write_json

Kind = Literal["block", "uniform"]

STEPS: dict[Kind, int] = {"block": 8000, "uniform": 10000}
BLOCK_SIZE = 4
SHORTEST_CLEAN = 2  # positions of a clean beginning or end


def architecture(kind: Kind, n_words: int) -> Architecture:
    """The tiny MDM's architecture, with blocks of four positions, or without [MASK]."""
    masked = replace(tiny_pair.architecture("mdm", n_words), family="diffusion_lens", name=f"tiny-{kind}")
    if kind == "block":
        return replace(masked, attention_dir="block_causal", causal_block=BLOCK_SIZE)
    return replace(masked, mask_token_id=None, d_vocab=n_words)


def denoising_loss(model: DiffusionTransformer, tokens: Tokens, generator: torch.Generator | None) -> Float[Tensor, ""]:
    """Mean cross-entropy of the clean tokens, where uniform noise may have replaced them.

    A token is replaced with the probability t of its row, t stratified over the batch. A third of the rows are clean
    before a position, and a third after it; clean parts do not count.
    """
    n_batch, n_pos = tokens.shape
    t = (torch.rand((), generator=generator) + torch.arange(n_batch) / n_batch) % 1
    cut = torch.randint(SHORTEST_CLEAN, n_pos - SHORTEST_CLEAN, (n_batch, 1), generator=generator)
    part = torch.randint(3, (n_batch, 1), generator=generator)
    pos = torch.arange(n_pos)
    counted = (part == 0) | ((part == 1) & (pos >= cut)) | ((part == 2) & (pos < cut))
    replaced = counted & (torch.rand(n_batch, n_pos, generator=generator) < t[:, None])
    others = torch.randint(model.cfg.d_vocab, (n_batch, n_pos), generator=generator)
    logits = model(torch.where(replaced, others, tokens))
    loss = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
    mean: Tensor = loss[counted].mean()
    return mean


# `None` is the model's own loss.
OBJECTIVES: dict[Kind, Objective | None] = {"block": None, "uniform": denoising_loss}


def make(
    kind: Kind,
    folder: str | Path,
    *,
    seed: int = tiny_pair.SHIPPED_SEED,
    corpus_seed: int = toy_facts.SHIPPED_SEED,
    steps: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Train one model and write it with tokenizer and `results.json`, whose content is returned.

    During the training `folder` also contains the training's own folder, from which an interrupted one continues.

    Args:
        kind: "block" or "uniform".
        folder: Folder to write to.
        seed: Seed of weights, batches and noise.
        corpus_seed: Seed of the toy facts.
        steps: Number of training steps; by default that of the recipe.
        progress: Whether a progress bar is shown.
    """
    facts, target, name = toy_facts.load(corpus_seed), Path(folder), f"tiny-{kind}"
    tokenizer = toy_tokenizer(facts)
    shape = architecture(kind, len(tokenizer))
    model = HookedDiffusionTransformer(
        DiffusionConfig.from_architecture(shape, device="cpu"),
        tokenizer,
        tensors=random_tensors(shape, seed, std=tiny_pair.WEIGHT_STD),
    )
    config = TrainingConfig(steps=steps or STEPS[kind], seed=seed)
    sentences = toy_rows(facts.sentences(), tokenizer)
    run = target / f"{name}.run"
    training = train(model, sentences, config, objective=OBJECTIVES[kind], folder=run, progress=progress)
    model = model.to(torch.bfloat16)
    with renamed_together(target) as staging:
        path = export(dict(model.state_dict()), shape, staging / f"{name}.safetensors")
        measured = {
            "recall": tiny_pair.measure(model.to(torch.float32), facts),
            "training": asdict(training.config),
            "last_loss": training.losses[-100:].mean().item(),
            "sha256": sha256_of_file(path),
            **training.record,
        }
        results = {"corpus_seed": corpus_seed, "seed": seed, "models": {name: measured}}
        tiny_pair.save_tokenizer(tokenizer, staging, shape.n_ctx)
        write_json(results, staging / "results.json")
    shutil.rmtree(run)
    return results


def make_all(folder: str | Path, steps: Mapping[Kind, int] | None = None, progress: bool = True) -> None:
    """Train both, in folders of their names."""
    for kind, n_steps in (steps or STEPS).items():
        make(kind, Path(folder) / f"tiny-{kind}", steps=n_steps, progress=progress)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bundled_models.tiny_kinds", description="Train tiny-block and tiny-uniform."
    )
    parser.add_argument("--out", default="tiny_kinds", help="Folder to write to (default: %(default)s).")
    parser.add_argument("--only", choices=list(STEPS), help="Train this one only.")
    parser.add_argument("--quiet", action="store_true", help="Show no progress bars.")
    options = parser.parse_args(arguments)
    # With one thread sums have one order, so the same seed gives the same weights on any number of cores.
    torch.set_num_threads(1)
    steps = {options.only: STEPS[options.only]} if options.only else STEPS
    make_all(options.out, steps, progress=not options.quiet)


if __name__ == "__main__":
    main()
