"""Comparison of the vectors that represent facts in forward and in reverse queries.

`compare` measures how similar two sets of vectors are, for example the keys k* of many facts queried in each direction,
with one row per fact:

    forward = torch.stack([key.vector for key in forward_keys])
    reverse = torch.stack([key.vector for key in reverse_keys])
    compare(forward, reverse, ids=ids).table()

`similarity` defines the statistics, which are 1 if the sets agree. Each has

- a distribution by chance: facts of one set are paired with facts of the other at random. p is the share of pairings,
  the true one included, that are at least as similar (Phipson & Smyth 2010).
- an interval over facts. A bootstrap would sample some facts twice, and such a fact is its own nearest neighbour. So
  the statistic is computed on random subsets of two thirds of the facts, and its deviations are scaled to all facts.

Two models have no common axes, even if the widths agree (`shared_axes=False`). For them only "procrustes" and "cka" are
meaningful.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.representations.comparison import Comparison, Comparisons
from diffusion_lens.analysis.representations.similarity import (
    Statistic,
    centred,
    deviations,
    principal_angles,
    statistics,
)
from diffusion_lens.records import installed_version
from diffusion_lens.settings import naming_the_nearest

ROUND_OFF = torch.finfo(torch.float32).eps


@naming_the_nearest
def compare(
    forward: Tensor,
    reverse: Tensor,
    *,
    ids: Sequence[str] | None = None,
    names: tuple[str, str] = ("forward", "reverse"),
    groups: Sequence[str] | None = None,
    shared_axes: bool = True,
    only: Sequence[str] | None = None,
    rank: int = 5,
    resamples: int = 1000,
    seed: int = 0,
    source: Mapping[str, Any] | None = None,
) -> Comparison:
    """Compare two sets of vectors of the same facts.

    Args:
        forward: Float[fact d], one set of vectors.
        reverse: Float[fact d], the other set: the same facts in the same order.
        ids: Names of the facts, by default their row numbers.
        names: Names of the two sets, for errors and figures.
        groups: Group of each fact, if groups differ as a whole, such as facts trained in different directions. The mean
            of each group is moved to the mean of its set, and random pairings stay within a group. Otherwise the sets
            would be similar because they have the same groups.
        shared_axes: Whether axis i means the same in both sets; it does not for two models, or for keys and values.
            Without shared axes, or if the widths differ, only "procrustes" and "cka" are computed.
        only: Statistics to compute, such as ["cka"]; by default all, of which "procrustes" takes most of the time.
        rank: Number of principal components that "subspace" and "procrustes" use, at least 2.
        resamples: Number of random pairings, and of random subsets of the facts.
        seed: Seed of `numpy.random.default_rng`; one seed gives the same pairings at every layer.
        source: Origin of the vectors, e.g. {"model": ..., "layer": 3, "site": ...}. It is part of the record, and
            titles show model, layer and step.

    Raises:
        ValueError: The sets have different facts, `rank` needs more facts, a vector is zero or not finite, or the
            vectors of different facts are almost equal.
    """
    # 1. Check the sets, and express them in few axes.
    ids = [str(row) for row in range(len(forward))] if ids is None else list(ids)
    if len(set(ids)) != len(ids):
        raise ValueError(f"two facts have the same id: {next(name for name in ids if ids.count(name) > 1)!r}")
    if resamples < 1:
        raise ValueError(f"resamples={resamples}; it must be at least 1; 1000 gives p-values down to 0.001")
    sets = [_as_matrix(vectors, name, ids) for vectors, name in zip((forward, reverse), names, strict=True)]
    widths = [vectors.shape[1] for vectors in sets]
    members = _members(groups, len(ids))
    sets = [_without_groups(vectors, members) for vectors in sets]
    one_space = shared_axes and widths[0] == widths[1]
    x, y = _in_few_axes(torch.cat(sets)).chunk(2) if one_space else map(_in_few_axes, sets)
    _check_rank(rank, (x, y), names)

    # 2. Sample pairings within the groups, and subsets of the facts.
    n_facts, rng = len(ids), np.random.default_rng(seed)
    paired = torch.arange(n_facts)[None]
    orders = paired.repeat(resamples, 1)
    for group in members:
        orders[:, group] = torch.from_numpy(rng.permuted(group.expand(resamples, -1).numpy(), axis=1))
    subsets = torch.from_numpy(rng.permuted(paired.expand(resamples, -1).numpy(), axis=1))[:, : n_facts - n_facts // 3]

    # 3. Compute every statistic of the true pairing, of the sampled ones and of the subsets.
    selected = _selected(statistics(rank, one_space), only)
    coordinates, explained = _shared_components(x, y) if one_space else (None, None)
    return Comparison(
        values=torch.cat([statistic(x, y, paired) for statistic in selected.values()]),
        null=torch.stack([statistic(x, y, orders) for statistic in selected.values()], dim=1),
        deviations=torch.stack([deviations(statistic, x, y, subsets) for statistic in selected.values()], dim=1),
        singular_values=torch.stack([_singular_values(vectors, n_facts - len(members)) for vectors in (x, y)]),
        coordinates=coordinates,
        explained=explained,
        angles=principal_angles(x, y, rank) if one_space else None,
        statistics=list(selected),
        ids=ids,
        names=names,
        record={
            "rank": rank,
            "resamples": resamples,
            "seed": seed,
            "groups": None if groups is None else list(groups),
            "widths": widths,
            "source": dict(source or {}),
            "versions": {name: installed_version(name) for name in ("diffusion-lens", "torch", "numpy", "scipy")},
        },
    )


def compare_along(
    axis: str,
    sets: Mapping[int, tuple[Tensor, Tensor]],
    *,
    source: Mapping[str, Any] | None = None,
    progress: bool = False,
    **settings: Any,
) -> Comparisons:
    """`compare` at each of several layers or denoising steps.

    Args:
        axis: "layer" or "step".
        sets: The two sets by layer or step, all of the same facts.
        source, settings: The same as in `compare`.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: `compare` refuses the sets of a layer or step, which the message names.
    """
    if axis not in ("layer", "step"):
        raise ValueError(f"axis={axis!r}; it must be 'layer' or 'step'")
    if not sets:
        raise ValueError(f"there is nothing to compare; give two sets of vectors by {axis}")
    comparisons = {}
    for index in tqdm(sorted(sets), desc="compare", unit=axis, disable=not progress):
        try:
            comparisons[index] = compare(*sets[index], source={**(source or {}), axis: index}, **settings)
        except ValueError as error:
            raise ValueError(f"at {axis} {index}: {error}") from error
    return Comparisons(axis, comparisons)


def _as_matrix(vectors: Tensor, name: str, ids: Sequence[str]) -> Float[Tensor, "fact d"]:
    if vectors.dim() != 2:
        raise ValueError(f"the {name} vectors must be a matrix with a row per fact; got {list(vectors.shape)}")
    if len(vectors) != len(ids):
        raise ValueError(f"{len(vectors)} {name} vectors for {len(ids)} facts; both sets need one row per fact")
    vectors = vectors.detach().double().cpu()
    for problem, rows in (
        ("has NaN or infinite entries", ~vectors.isfinite().all(dim=1)),
        ("is zero", (vectors == 0).all(dim=1)),
    ):
        if rows.any():
            raise ValueError(
                f"the {name} vector of {ids[int(rows.nonzero()[0])]!r} {problem}; leave the fact out of both sets"
            )
    return vectors


def fewest_facts(rank: int = 5) -> int:
    """Smallest number of facts that a comparison needs, because "subspace" uses half of two thirds of them."""
    return 3 * (rank + 2)


def _selected(known: Mapping[str, Statistic], only: Sequence[str] | None) -> dict[str, Statistic]:
    """The selected statistics, in their usual order."""
    if only is not None and (not only or any(name not in known for name in only)):
        raise ValueError(f"only={list(only)}; the statistics of these two sets are {', '.join(known)}")
    return {name: statistic for name, statistic in known.items() if only is None or name in only}


def _members(groups: Sequence[str] | None, n_facts: int) -> list[Int[Tensor, "member"]]:
    """The rows of each group, in order."""
    if groups is None:
        return [torch.arange(n_facts)]
    if len(groups) != n_facts:
        raise ValueError(f"{len(groups)} groups for {n_facts} facts; give each fact its group")
    return [torch.tensor([i for i, group in enumerate(groups) if group == name]) for name in dict.fromkeys(groups)]


def _without_groups(vectors: Float[Tensor, "fact d"], members: Sequence[Tensor]) -> Float[Tensor, "fact d"]:
    """The vectors with the mean of each group moved to the mean of the set."""
    if len(members) == 1:
        return vectors
    moved, mean = vectors.clone(), vectors.mean(dim=0)
    for group in members:
        moved[group] += mean - vectors[group].mean(dim=0)
    return moved


def _check_rank(rank: int, sets: Sequence[Float[Tensor, "fact _"]], names: Sequence[str]) -> None:
    n_facts, fewest = len(sets[0]), fewest_facts(rank)
    if rank < 2:
        raise ValueError(f"rank={rank}; it must be at least 2")
    if n_facts < fewest:
        smaller = f", or use rank={n_facts // 3 - 2}" if n_facts >= 12 else ""
        raise ValueError(f"{n_facts} facts are too few for rank={rank}: give at least {fewest}{smaller}")
    for vectors, name in zip(sets, names, strict=True):
        n_directions = int((torch.linalg.svdvals(centred(vectors)) > ROUND_OFF * vectors.norm()).sum())
        if n_directions < rank:
            raise ValueError(
                f"the {name} vectors of different facts vary in {n_directions} directions, fewer than rank={rank}"
            )


def _in_few_axes(vectors: Float[Tensor, "entry d"]) -> Float[Tensor, "entry component"]:
    """The vectors in an orthonormal basis of their span, which is cheaper for large d; angles and lengths stay."""
    coordinates: Tensor = torch.linalg.qr(vectors.T, mode="r").R
    return coordinates.T


def _shared_components(
    x: Float[Tensor, "fact d"], y: Float[Tensor, "fact d"]
) -> tuple[Float[Tensor, "2 fact 2"], Float[Tensor, "2"]]:
    """Coordinates of both sets in the first two principal components of all vectors, and the shares of the variance."""
    u, s, _ = torch.linalg.svd(torch.cat([centred(x), centred(y)]), full_matrices=False)
    coordinates = (u * s)[:, :2]
    largest = coordinates.gather(0, coordinates.abs().argmax(dim=0, keepdim=True))
    return (coordinates * largest.sign()).unflatten(0, (2, len(x))), (s.square() / s.square().sum())[:2]


def _singular_values(x: Float[Tensor, "fact d"], count: int) -> Float[Tensor, "component"]:
    """The `count` largest singular values of the centred vectors, padded with 0 if the vectors are narrower."""
    values = torch.linalg.svdvals(centred(x))[:count]
    return torch.nn.functional.pad(values, (0, count - len(values)))
