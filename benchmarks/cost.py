"""The predicted cost of each job, compared with the job: token-layers counted in every block, and time.

Each job runs on random models of two sizes, a masked diffusion model and its causal twin. The machine's own rates are
measured immediately before and after each job, because another process may share it; the prediction takes the mean of
the two. Times are those of the processor, on one thread. The table has the median of the rounds.

    python benchmarks/cost.py [--rounds 3] [--out cost.json]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer, Query, cost
from diffusion_lens.analysis import (
    Corruption,
    Restoration,
    Selection,
    TaughtCanvas,
    TaughtPair,
    patch_grid,
    restore_in_loop,
    reversal_signatures,
    trace_query,
    trace_steps,
)
from diffusion_lens.analysis.patching.patch_settings import PatchSettings
from diffusion_lens.analysis.patching.sites import resolve_sites
from diffusion_lens.analysis.rome import ValueSettings, compute_keys, optimize_values, second_moment
from diffusion_lens.analysis.traced_trajectory import TracedTrajectory, loop_prompt
from diffusion_lens.denoising import DenoiseSettings, denoise, lay_out
from diffusion_lens.model.block import Block
from weight_conversion import Architecture

SIZES = {"4 layers, d=128": (4, 128, 4, 512, 512), "8 layers, d=512": (8, 512, 8, 2048, 4096)}
LENGTH, SUBJECT, ANSWER = 32, (4, 7), (20, 21, 22)
NOISE = Corruption("gaussian", 0.3, samples=4)
LOOP = DenoiseSettings(steps=8)
Job = tuple[cost.Cost, Callable[[], object]]


def build(kind: str, size: tuple[int, int, int, int, int]) -> HookedDiffusionTransformer:
    """A random model of these layers, widths, heads, units and tokens."""
    n_layers, d_model, n_heads, d_mlp, d_vocab = size
    architecture = Architecture(
        family="lit_gpt",
        name=f"{kind}, d={d_model}",
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_key_value_heads=n_heads,
        d_head=d_model // n_heads,
        d_mlp=d_mlp,
        d_vocab=d_vocab,
        d_vocab_out=d_vocab,
        n_ctx=512,
        attention_dir="causal" if kind == "AR" else "bidirectional",
        readout="shifted" if kind == "AR" else "in_place",
        mask_token_id=None if kind == "AR" else d_vocab - 1,
    )
    return HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"))


def query_of(model: HookedDiffusionTransformer, length: int = LENGTH) -> Query:
    """A prompt with an answer of three tokens."""
    positions = ANSWER if length == LENGTH else tuple(range(length - 3, length))
    tokens, answer = torch.arange(3, 3 + length), tuple(range(40, 43))
    if model.cfg.grows:
        tokens = torch.cat([tokens[: positions[0]], torch.tensor(answer[:-1])])
    else:
        tokens[positions[0] :] = model.cfg.blank
    return Query(tokens, SUBJECT, positions, answer)


def jobs(model: HookedDiffusionTransformer) -> Iterator[tuple[str, Job]]:
    """Every job with its predicted cost."""
    cfg, query, restoration = model.cfg, query_of(model), Restoration()
    n_positions, depth = len(query.tokens), cfg.n_layers
    tokens = torch.randint(3, 500, (8, 52), generator=torch.Generator().manual_seed(0))
    yield "forward, 8 x 52", (cost.forward(cfg, 8, 52, 1), torch.no_grad()(lambda: model(tokens, logits_at=[-1])))
    for given in (8, 20):
        canvas = lay_out(model, tokens[:1, :given], 40)
        predicted = cost.denoising(cfg, 40, given, LOOP)
        yield f"denoise, {given} of 40 given", (predicted, lambda canvas=canvas: denoise(model, canvas, LOOP))

    traced = cost.trace(cfg, query, restoration, NOISE)
    yield "causal trace", (traced, lambda: trace_query(model, query, restoration, NOISE))

    given, length = loop_prompt(model, query)
    canvas = lay_out(model, given[None], length)
    run = TracedTrajectory.of(model, query, denoise(model, canvas, LOOP))
    steps = range(run.answered_from, run.last_step + 1)
    canvases = len({tuple(run.seen(run.canvas(step)[None])[0].tolist()) for step in steps})
    few = Selection(range(0, n_positions, 3), range(0, depth, 2))
    along = cost.trajectory_trace(cfg, query, LOOP, restoration, NOISE, few, canvases=canvases)
    yield (
        "trace along a run",
        (along, lambda: (denoise(model, canvas, LOOP), trace_steps(run, None, "forced", restoration, NOISE, few))),
    )
    one = Selection([SUBJECT[0], n_positions - 1], [0, depth // 2])
    ending = cost.temporal_effect(cfg, query, LOOP, restoration, NOISE, one, range(run.last_step + 1))
    yield (
        "temporal effect, at most",
        (ending, lambda: (denoise(model, canvas, LOOP), restore_in_loop(run, None, restoration, NOISE, one))),
    )

    clean, corrupted = tokens[0, :24], tokens[0, :24].clone()
    corrupted[SUBJECT[0]] = 7
    sweep = PatchSettings(resolve_sites("resid_post"), None, list(range(depth)), None, "exact", 0)
    grid = cost.patch_grid(cfg, clean, corrupted, sweep, [-1])
    yield (
        "patch grid",
        (
            grid,
            lambda: patch_grid(
                model, clean[None], corrupted[None], lambda logits: logits[0, -1, 3], "resid_post", logits_at=[-1]
            ),
        ),
    )

    search, layer = ValueSettings(steps=10, stop_below=0.0), depth // 2
    requests = [[query]] * 8
    essence = Query(tokens[0, :6], (0, 3), (), ())
    essences = [replace(essence, answer_positions=(5,), answer_tokens=(1,))] * 8
    sought = cost.keys_and_values(cfg, requests, [layer], search, essences)

    def vectors() -> None:
        compute_keys(model, requests, layer)
        optimize_values(model, requests, layer, essences=essences, settings=search)

    yield "k* and v*, 8 facts", (sought, vectors)

    texts = list(tokens[:, :40].repeat(4, 1))
    moment = cost.second_moment(cfg, [40] * 32, layer, batch_size=8)
    yield "second moment, 32 texts", (moment, lambda: second_moment(model, texts, layer, batch_size=8))

    def taught(i: int) -> TaughtCanvas:
        tokens_of = torch.arange(3 + i, 3 + i + n_positions)
        if not cfg.grows:
            tokens_of[-1] = cfg.blank
        return TaughtCanvas(tokens_of, n_positions - 1 - cfg.grows, 100 + i, 1)

    pairs = [TaughtPair(taught(2 * i), taught(2 * i + 1)) for i in range(6)]
    signed = cost.signatures(cfg, 6, n_positions)
    yield "signatures, 6 pairs", (signed, lambda: reversal_signatures(model, pairs))


@contextmanager
def counting() -> Iterator[list[int]]:
    """Counts rows times positions of every block that runs."""
    counted, forward = [0], Block.forward

    def count(self: Any, resid: torch.Tensor, *args: Any) -> torch.Tensor:
        counted[0] += resid.shape[0] * resid.shape[1]
        return forward(self, resid, *args)

    Block.forward = count
    try:
        yield counted
    finally:
        Block.forward = forward


def measured(job: Job, cfg: DiffusionConfig) -> tuple[float, float, float]:
    """Token-layers over those predicted; the measured and the predicted seconds."""
    predicted, work = job
    before = cost.this_machine(cfg, clock=time.process_time)
    with counting() as counted:
        started = time.process_time()
        work()
        seconds = time.process_time() - started
    after = cost.this_machine(cfg, clock=time.process_time)
    mean = (predicted.seconds(before, hashed=True) + predicted.seconds(after, hashed=True)) / 2
    return predicted.token_layers / counted[0], seconds, mean


def scaling(rounds: int) -> list[dict[str, Any]]:
    """The cost of a trace against layers, positions and samples, and the slowest of several workers on 16 facts.

    Each worker has a share of the facts. The shares are computed one after the other, so that they do not compete.
    """
    usual = {"layers": 4, "positions": 24, "samples": 5, "workers": 1}
    values = {
        "layers": (2, 4, 8, 12),
        "positions": (12, 24, 36, 48),
        "samples": (1, 5, 10, 20),
        "workers": (1, 2, 4, 8),
    }
    rows = []
    for kind in ("MDM", "AR"):
        for axis, value in ((axis, value) for axis, own in values.items() for value in own):
            setting = {**usual, axis: value}
            model = build(kind, (setting["layers"], 128, 4, 512, 512))
            query = query_of(model, setting["positions"])
            noise, n_facts = Corruption("gaussian", 0.3, samples=setting["samples"]), 16 if axis == "workers" else 1
            predicted = cost.trace(model.cfg, query, Restoration(), noise) * (
                n_facts / value if axis == "workers" else 1
            )

            def share(model: Any = model, query: Query = query, noise: Corruption = noise, n: int = n_facts) -> None:
                for _ in range(-(-n // (value if axis == "workers" else 1))):  # noqa: B023
                    trace_query(model, query, Restoration(), noise)

            share()
            _, seconds, expected = zip(*(measured((predicted, share), model.cfg) for _ in range(rounds)), strict=True)
            rows.append({"kind": kind, "axis": axis, "value": value, "seconds": statistics.median(seconds)})
            rows[-1]["predicted"] = statistics.median(expected)
            print(
                f"{kind} {axis} {value}: {rows[-1]['seconds']:.3f} s, predicted {rows[-1]['predicted']:.3f} s",
                flush=True,
            )
    return rows


def main(rounds: int = 3, out: Path | None = None) -> dict[str, Any]:
    """Run every job. Returns the rows of the table."""
    torch.set_num_threads(1)  # so that the time of the processor is that of the job, whatever else the machine does
    print(f"torch {torch.__version__}, one thread, float32, median of {rounds} rounds")
    print(f"{'':24} {'job':26} {'token-layers':>13} {'measured':>10} {'predicted':>10} {'pred/meas':>9}")
    rows = []
    for size in SIZES:
        for kind in ("MDM", "AR"):
            model = build(kind, SIZES[size])
            for name, job in jobs(model):
                job[1]()
                shares, seconds, predicted = zip(*(measured(job, model.cfg) for _ in range(rounds)), strict=True)
                ratio = statistics.median(p / s for p, s in zip(predicted, seconds, strict=True))
                row = {"model": f"{kind}, {size}", "job": name, "token_layers": shares[0], "ratio": ratio}
                row |= {"seconds": statistics.median(seconds), "predicted": statistics.median(predicted)}
                rows.append(row)
                print(
                    f"{row['model']:24} {name:26} {shares[0]:13.3f} {1e3 * row['seconds']:8.1f}ms "
                    f"{1e3 * row['predicted']:8.1f}ms {ratio:9.2f}",
                    flush=True,
                )
    table = {"torch": torch.__version__, "rounds": rounds, "rows": rows, "scaling": scaling(rounds)}
    if out is not None:
        out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.out)
