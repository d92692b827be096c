"""The denoising loop against the plain one, side by side in one run, at equal trajectories.

The plain loop is what papers hand-roll: at every step a full forward pass of both branches of guidance and logits of
the full vocabulary at every place; for the causal twin, the whole prefix for every token. Then the cost of hooks: one
that looks at every `hook_resid_post` at every step, against the same loop without.

    python benchmarks/denoise.py [--rounds 5] [--threads 2]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from diffusion_lens.denoising.samplers import smdm
from weight_conversion import Architecture

LENGTH, STEPS, GUIDANCE = 52, 32, 0.8


def build(masked: bool) -> HookedDiffusionTransformer:
    """8 layers, d=512, vocabulary 32000, random weights."""
    architecture = Architecture(
        family="lit_gpt",
        name="benchmark",
        n_layers=8,
        d_model=512,
        n_heads=8,
        n_key_value_heads=8,
        d_head=64,
        d_mlp=2048,
        d_vocab=32000 + masked,
        d_vocab_out=32000,
        n_ctx=2048,
        attention_dir="bidirectional" if masked else "causal",
        readout="in_place" if masked else "shifted",
        mask_token_id=32000 if masked else None,
    )
    return HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"))


@torch.no_grad()
def plain_diffusion(model: HookedDiffusionTransformer, prompt: Tensor) -> Tensor:
    """SMDM's greedy sampler as its authors write it, a canvas a step."""
    n_given = prompt.shape[1]
    canvas = torch.full((1, LENGTH), 32000)
    canvas[:, :n_given] = prompt
    canvases, times = [canvas], torch.linspace(1, 1e-5, STEPS + 1)
    for step in range(STEPS):
        unprompted = canvas.clone()
        unprompted[:, :n_given] = 32000
        conditional, unconditional = model(torch.cat([canvas, unprompted])).chunk(2)
        logits = unconditional + (GUIDANCE + 1) * (conditional - unconditional)
        masked = canvas == 32000
        tokens = logits.argmax(-1)
        sure = torch.softmax(logits.double(), -1).gather(-1, tokens[..., None])[..., 0].masked_fill(~masked, -1)
        left = int(masked.sum())
        n = left if step == STEPS - 1 else int(left * (1 - times[step + 1] / times[step]))
        revealed = sure[0].topk(n).indices
        canvas = canvas.clone()
        canvas[0, revealed] = tokens[0, revealed]
        canvases.append(canvas)
    return torch.stack(canvases)


@torch.no_grad()
def plain_autoregression(model: HookedDiffusionTransformer, prompt: Tensor) -> Tensor:
    """The whole prefix for every token."""
    tokens = prompt
    while tokens.shape[1] < LENGTH:
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens


def compare(name: str, ours: Callable[[], Tensor], theirs: Callable[[], Tensor], rounds: int) -> float:
    """Print medians and the median of the paired ratios theirs/ours."""
    equal = torch.equal(ours(), theirs())
    pairs = []
    for _ in range(rounds):
        seconds = []
        for run in (ours, theirs):
            begun = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begun)
        pairs.append(seconds)
    a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(other / own for own, other in pairs)
    print(f"{name:44} {1e3 * a:8.0f} ms {1e3 * b:8.0f} ms   ratio {ratio:5.2f}   equal: {equal}")
    return ratio


def main(rounds: int = 5, threads: int | None = None) -> dict[str, float]:
    """Measure; returns the ratio of each line."""
    if threads:
        torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, {rounds} rounds in turn")
    print(f"length {LENGTH}, {STEPS} steps, guidance {GUIDANCE}; columns: ours, the other\n")
    mdm, twin = build(masked=True), build(masked=False)
    guided = {"length": LENGTH, "steps": STEPS, "cfg_scale": GUIDANCE, "sampler": smdm()}
    looking = {"fwd_hooks": [(lambda name: name.endswith("hook_resid_post"), lambda activation, hook: None)]}
    long, short = (torch.randint(32000, (1, n), generator=torch.Generator().manual_seed(n)) for n in (34, 20))

    def loop(prompt: Tensor, **options: Any) -> Tensor:
        return mdm.denoise(prompt, **guided, **options).canvases

    ratios = {
        name: compare(name, ours, theirs, rounds)
        for name, ours, theirs in (
            ("diffusion, prompt 34: loop / plain loop", lambda: loop(long), lambda: plain_diffusion(mdm, long)),
            ("diffusion, prompt 20: loop / plain loop", lambda: loop(short), lambda: plain_diffusion(mdm, short)),
            ("diffusion, prompt 20: unhooked / hooked", lambda: loop(short), lambda: loop(short, **looking)),
            (
                "twin, prompt 20: loop / no-cache loop",
                lambda: twin.denoise(short, length=LENGTH).tokens,
                lambda: plain_autoregression(twin, short),
            ),
        )
    }
    prompt = short
    run = mdm.denoise(prompt, length=LENGTH, steps=STEPS, cfg_scale=GUIDANCE)
    print(f"\n{run.forward_passes} forward passes for {run.n_steps} steps, {run.tokens_per_second:.1f} tokens/s")
    return ratios


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.threads)
