"""Speed of the gradients of taught pairs, compared with a loop over facts to the same cosines.

`gradient_alignment` takes one backward pass for all facts, multiplies gradients as sums of outer products, and also
takes the small step. The loop holds the gradient of every fact in every matrix, from `torch.autograd.grad`, and takes
no step. Both compute the cosines of own and of shuffled pairs in all weight matrices, which the benchmark compares. The
floor is the time of two forward and two backward passes of the same canvases in one batch, without gradients of
weights.

    python benchmarks/signatures.py [--facts 8] [--rounds 3] [--threads 2]
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import TaughtCanvas, TaughtPair, gradient_alignment

# tests/oracles holds what tests and benchmarks share.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
from oracles.traced_shapes import Shape
from table.operations import timed

N_POS, MASK, WAYS = 16, 4000, ("forward", "reverse")


def random_pairs(n: int) -> list[TaughtPair]:
    """Pairs of random tokens with one masked position each."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(n):
        canvases = []
        for reader, source in ((1, 9), (9, 1)):
            tokens = torch.randint(MASK, (N_POS,), generator=generator)
            answer = int(tokens[reader])
            tokens[reader] = MASK
            canvases.append(TaughtCanvas(tokens, reader, answer, source))
        pairs.append(TaughtPair(*canvases))
    return pairs


def ours(model: HookedDiffusionTransformer, pairs: Sequence[TaughtPair], names: Sequence[str]) -> Tensor:
    """The cosines, and the small step, which the other two ways do not take."""
    return gradient_alignment(model, pairs, names, batch_size=len(pairs), max_bytes=2**40).cosines


def by_loop(model: HookedDiffusionTransformer, pairs: Sequence[TaughtPair], names: Sequence[str]) -> Tensor:
    """The cosines, from the gradients of one fact at a time."""
    weights = [model.get_parameter(name) for name in names]

    def gradients(canvas: TaughtCanvas) -> tuple[Tensor, ...]:
        logits = model(canvas.tokens[None], logits_at=[canvas.row])[0, 0]
        return torch.autograd.grad(-logits.log_softmax(-1)[canvas.answer_token], weights)

    by_way = [[gradients(getattr(pair, way)) for pair in pairs] for way in WAYS]
    return cosines([[torch.stack([fact[i] for fact in facts]) for i in range(len(names))] for facts in by_way])


def cosines(by_way: Sequence[Sequence[Tensor]]) -> Tensor:
    """Float[fact parameter estimate], from the gradients of each way and parameter, Float[fact ...]."""
    columns = []
    for forward, reverse in zip(*by_way, strict=True):
        matrix = normalize(forward.flatten(1), dim=1) @ normalize(reverse.flatten(1), dim=1).T
        own = matrix.diagonal()
        columns.append(torch.stack([own, (matrix.sum(dim=1) - own) / (len(matrix) - 1)], dim=1))
    return torch.stack(columns, dim=1)


def floor(model: HookedDiffusionTransformer, pairs: Sequence[TaughtPair]) -> None:
    """Two forward and two backward passes, without gradients of weights."""
    for way in WAYS:
        tokens = torch.stack([getattr(pair, way).tokens for pair in pairs])
        embedded = model.embed(tokens).detach().requires_grad_()
        model(embedded, start_at_layer=0, logits_at=[1]).logsumexp(dim=-1).sum().backward()


def seconds(run: Callable[[], object], rounds: int) -> float:
    """Median time of a call, after one that is not counted."""
    run()
    return statistics.median(timed(run) for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--facts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.no_grad():
        model = Shape("masked", d_model=512, d_mlp=1376, n_heads=8, d_vocab=MASK + 1).build()
    pairs = random_pairs(args.facts)
    names = gradient_alignment(model, pairs[:2]).parameters
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    least = seconds(partial(floor, model, pairs), args.rounds)
    print(f"{args.facts} facts of {N_POS} positions, 8 layers, d=512, {len(names)} matrices; floor {least:.2f} s")
    expected = ours(model, pairs, names)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    for name, way in (("gradient_alignment", ours), ("loop over facts", by_loop)):
        found = way(model, pairs, names)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        taken = seconds(partial(way, model, pairs, names), args.rounds)
        print(f"{name:20} {taken:6.2f} s, {taken / least:5.1f} times the floor")


if __name__ == "__main__":
    main()
