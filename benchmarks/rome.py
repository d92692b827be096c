"""Speed of the search for v*, compared with a straightforward implementation that computes the same losses.

The straightforward implementation is ROME's: every iteration runs the whole network and computes the logits of the
full vocabulary at every position. The search is at layer 4 of 12, with d=512, vocabulary 32000, three prompts and the
essence prompt, and 20 iterations. The benchmark also compares one search for several facts with one search per fact,
in facts per minute.

    python benchmarks/rome.py [--rounds 3] [--threads 2]
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diffusion_lens import HookedDiffusionTransformer, Query
from diffusion_lens.analysis.rome import ValueResult, ValueSettings, optimize_value, optimize_values

# tests/oracles holds what tests and benchmarks share.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from oracles.plain_rome import plain_search
from oracles.traced_shapes import Shape
from table.operations import alternately

SIZES = {"n_layers": 12, "d_model": 512, "d_mlp": 2048, "n_heads": 8, "d_vocab": 32000}
LAYER, N_FACTS = 4, 4
# Token counts of prefixes, prompt and object; subject span.
PREFIXES, PROMPT, SUBJECT, OBJECT = (0, 5, 10), 10, (2, 5), 3
SETTINGS = ValueSettings(stop_below=0.0)  # Never stop early.
Fact = tuple[list[Query], Query]  # A request and its essence prompt.


def random_fact(model: HookedDiffusionTransformer, seed: int) -> Fact:
    """A request of three random prompts, and its essence prompt."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(31999, (100,), generator=generator)  # without the id of [MASK]
    prompt, answer, before = tokens[:PROMPT], tokens[PROMPT : PROMPT + OBJECT], tokens[PROMPT + OBJECT :]
    mask = model.cfg.mask_token_id
    canvas = answer[:-1] if mask is None else torch.full((OBJECT,), mask)
    queries = []
    for n in PREFIXES:
        positions = range(n + PROMPT, n + PROMPT + OBJECT)
        tokens = torch.cat([before[:n], prompt, canvas])
        queries.append(Query(tokens, (n + SUBJECT[0], n + SUBJECT[1]), tuple(positions), tuple(answer.tolist())))
    ending = [7, 8] if mask is None else [7, 8, mask]
    subject = prompt[slice(*SUBJECT)]
    return queries, Query(torch.cat([subject, torch.tensor(ending)]), (0, len(subject)), (), ())


def one_by_one(model: HookedDiffusionTransformer, facts: Sequence[Fact]) -> list[ValueResult]:
    """One search per fact."""
    return [optimize_value(model, request, LAYER, essence=essence, **asdict(SETTINGS)) for request, essence in facts]


def all_at_once(model: HookedDiffusionTransformer, facts: Sequence[Fact]) -> list[ValueResult]:
    """One search for all facts."""
    requests, essences = zip(*facts, strict=True)
    return optimize_values(model, requests, LAYER, essences=essences, settings=SETTINGS)


def compare(name: str, ours: Callable[[], Any], other: Callable[[], Any], rounds: int, n_facts: int = 1) -> float:
    """Print medians, facts per minute and the median of the paired ratios other/ours."""
    own, theirs, ratio = alternately(ours, other, rounds)
    speeds = f"{60 * n_facts / own:5.1f} and {60 * n_facts / theirs:5.1f} facts/min"
    print(f"{name:40} {own:6.2f} s {theirs:6.2f} s   {speeds}   ratio {ratio:.2f}")
    return ratio


def main(rounds: int = 3, threads: int | None = None) -> dict[str, float]:
    """Run all measurements. Returns the ratio of each line."""
    if threads:
        torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, {rounds} alternating rounds")
    print("columns: ours, the other\n")
    ratios = {}
    for kind in ("diffusion", "AR baseline"):
        with torch.no_grad():
            model = Shape("masked" if kind == "diffusion" else "causal", **SIZES).build()
        facts = [random_fact(model, seed) for seed in range(N_FACTS)]
        alone = partial(one_by_one, model, facts[:1])
        plain = partial(plain_search, model, *facts[0], LAYER, SETTINGS)
        error = (alone()[0].losses - plain()[0]).abs().max().item()
        name = f"{kind}: v* / plain search"
        ratios[name] = compare(name, alone, plain, rounds)
        print(f"{'':40} losses differ by at most {error:.1e}")
        name = f"{kind}: {N_FACTS} facts together / one by one"
        together = partial(all_at_once, model, facts)
        ratios[name] = compare(name, together, partial(one_by_one, model, facts), rounds, N_FACTS)
    return ratios


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.threads)
