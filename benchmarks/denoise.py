"""Speed of the denoising loop, compared with a straightforward loop that computes the same trajectory.

At every step, the straightforward loop runs a full forward pass of both branches of guidance and computes the logits
of the full vocabulary at every position. For the autoregressive (AR) baseline it runs the whole prefix for every
token. The benchmark also measures the cost of hooks: the loop with a read-only hook at every `hook_resid_post`, and
without hooks.

    python benchmarks/denoise.py [--rounds 5] [--threads 2]
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from table.operations import alternately
from torch import Tensor

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from diffusion_lens.denoising.samplers import smdm
from weight_conversion import Architecture

LENGTH, STEPS, GUIDANCE = 52, 32, 0.8


def build(masked: bool) -> HookedDiffusionTransformer:
    """A model with 8 layers, d=512, vocabulary 32000 and random weights."""
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
    """SMDM's greedy sampler as in the authors' code. Returns the canvas of each step."""
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
        confidence = torch.softmax(logits.double(), -1).gather(-1, tokens[..., None])[..., 0].masked_fill(~masked, -1)
        left = int(masked.sum())
        n = left if step == STEPS - 1 else int(left * (1 - times[step + 1] / times[step]))
        revealed = confidence[0].topk(n).indices
        canvas = canvas.clone()
        canvas[0, revealed] = tokens[0, revealed]
        canvases.append(canvas)
    return torch.stack(canvases)


@torch.no_grad()
def plain_autoregression(model: HookedDiffusionTransformer, prompt: Tensor) -> Tensor:
    """Greedy generation that runs the whole prefix for every token."""
    tokens = prompt
    while tokens.shape[1] < LENGTH:
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens


def compare(name: str, ours: Callable[[], Tensor], theirs: Callable[[], Tensor], rounds: int) -> float:
    """Print medians and the median of the paired ratios theirs/ours."""
    equal = torch.equal(ours(), theirs())
    a, b, ratio = alternately(ours, theirs, rounds)
    print(f"{name:44} {1e3 * a:8.0f} ms {1e3 * b:8.0f} ms   ratio {ratio:5.2f}   equal: {equal}")
    return ratio


def main(rounds: int = 5, threads: int | None = None) -> dict[str, float]:
    """Run all measurements. Returns the ratio of each line."""
    if threads:
        torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, {rounds} alternating rounds")
    print(f"length {LENGTH}, {STEPS} steps, guidance {GUIDANCE}; columns: ours, the other\n")
    mdm, baseline = build(masked=True), build(masked=False)
    guided = {"length": LENGTH, "steps": STEPS, "cfg_scale": GUIDANCE, "sampler": smdm()}
    read_only = {"fwd_hooks": [(lambda name: name.endswith("hook_resid_post"), lambda activation, hook: None)]}
    long, short = (torch.randint(32000, (1, n), generator=torch.Generator().manual_seed(n)) for n in (34, 20))

    def loop(prompt: Tensor, **options: Any) -> Tensor:
        return mdm.denoise(prompt, **guided, **options).canvases

    ratios = {
        name: compare(name, ours, theirs, rounds)
        for name, ours, theirs in (
            ("diffusion, prompt 34: loop / plain loop", lambda: loop(long), lambda: plain_diffusion(mdm, long)),
            ("diffusion, prompt 20: loop / plain loop", lambda: loop(short), lambda: plain_diffusion(mdm, short)),
            ("diffusion, prompt 20: unhooked / hooked", lambda: loop(short), lambda: loop(short, **read_only)),
            (
                "AR baseline, prompt 20: loop / no-cache loop",
                lambda: baseline.denoise(short, length=LENGTH).tokens,
                lambda: plain_autoregression(baseline, short),
            ),
        )
    }
    run = mdm.denoise(short, length=LENGTH, steps=STEPS, cfg_scale=GUIDANCE)
    print(f"\n{run.forward_passes} forward passes for {run.n_steps} steps, {run.tokens_per_second:.1f} tokens/s")
    return ratios


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.threads)
