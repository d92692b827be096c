"""Is a fact encoded alike in forward and in reverse queries, in which sense, and at which layer?

Two sets of vectors are compared, such as the keys k* of many facts queried in either direction, one row per fact:

    forward = torch.stack([key.vector for key in forward_keys])
    reverse = torch.stack([key.vector for key in reverse_keys])
    compare(forward, reverse, ids=ids).table()

`similarity` defines the statistics; all of them are 1 where the sets agree. Each comes with

- its distribution by chance: facts of one set are paired with facts of the other at random, and p is the share of such
  pairings that are at least as similar, the true one included (Phipson & Smyth 2010).
- an interval over facts. A bootstrap samples facts twice, and a fact sampled twice is its own nearest neighbour. So the
  statistic is computed on random subsets of two thirds of the facts, and its deviations are scaled to all facts.

Two models share no axes, even where the widths agree (`shared_axes=False`): there only "procrustes" and "cka" have a
meaning.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
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

ROUND_OFF = torch.finfo(torch.float32).eps


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
    draws: int = 1000,
    seed: int = 0,
    source: Mapping[str, Any] | None = None,
) -> Comparison:
    """Compare two sets of vectors of the same facts.

    Args:
        forward: Float[fact d], one set of vectors.
        reverse: Float[fact d], the other set: the same facts in the same order.
        ids: Names of the facts, by default their row numbers.
        names: Names of the two sets, for errors and pictures.
        groups: Group of each fact, where groups differ as a whole, such as facts trained in different directions. The
            mean of each group is moved to the mean of its set, and random pairings stay within a group: otherwise the
            sets would be similar because they have the same groups.
        shared_axes: Whether axis i means the same in both sets; it does not between two models, or keys and values.
            Without shared axes, and where the widths differ, only "procrustes" and "cka" are computed.
        only: Statistics to compute, such as ["cka"]; by default all, of which "procrustes" takes most of the time.
        rank: Number of principal components that "subspace" and "procrustes" use, at least 2.
        draws: Number of random pairings, and of random subsets of the facts.
        seed: Seed of `numpy.random.default_rng`; one seed gives the same pairings at every layer.
        source: Origin of the vectors, e.g. {"model": ..., "layer": 3, "site": ...}; the record keeps it, and titles
            show model, layer and step.

    Raises:
        ValueError: The sets have different facts, `rank` needs more facts, a vector is zero or not finite, or the
            vectors hardly differ from fact to fact.
    """
    ids = [str(row) for row in range(len(forward))] if ids is None else list(ids)
    if len(set(ids)) != len(ids):
        raise ValueError(f"two facts have one id: {next(each for each in ids if ids.count(each) > 1)!r}")
    if draws < 1:
        raise ValueError(f"draws={draws}; at least 1, and 1000 for p-values down to 0.001")
    sets = [_as_matrix(vectors, name, ids) for vectors, name in zip((forward, reverse), names, strict=True)]
    widths = [vectors.shape[1] for vectors in sets]
    members = _members(groups, len(ids))
    sets = [_without_groups(vectors, members) for vectors in sets]
    one_space = shared_axes and widths[0] == widths[1]
    x, y = _in_few_axes(torch.cat(sets)).chunk(2) if one_space else map(_in_few_axes, sets)
    _check_rank(rank, (x, y), names)

    n_facts, rng = len(ids), np.random.default_rng(seed)
    paired = torch.arange(n_facts)[None]
    orders = paired.repeat(draws, 1)
    for own in members:
        orders[:, own] = torch.from_numpy(rng.permuted(own.expand(draws, -1).numpy(), axis=1))
    subsets = torch.from_numpy(rng.permuted(paired.expand(draws, -1).numpy(), axis=1))[:, : n_facts - n_facts // 3]
    selected = _selected(statistics(rank, one_space), only)
    coordinates, explained = _shared_components(x, y) if one_space else (None, None)
    return Comparison(
        values=torch.cat([statistic(x, y, paired) for statistic in selected.values()]),
        null=torch.stack([statistic(x, y, orders) for statistic in selected.values()], dim=1),
        deviations=torch.stack([deviations(statistic, x, y, subsets) for statistic in selected.values()], dim=1),
        singular_values=torch.stack([_singular_values(each, n_facts - len(members)) for each in (x, y)]),
        coordinates=coordinates,
        explained=explained,
        angles=principal_angles(x, y, rank) if one_space else None,
        statistics=list(selected),
        ids=ids,
        names=names,
        record={
            "rank": rank,
            "draws": draws,
            "seed": seed,
            "groups": None if groups is None else list(groups),
            "widths": widths,
            "source": dict(source or {}),
            "versions": {name: version(name) for name in ("diffusion-lens", "torch", "numpy", "scipy")},
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
    """`compare` at each of several layers, or denoising steps.

    Args:
        axis: "layer" or "step".
        sets: the two sets by layer or step, all of the same facts.
        source, settings: as in `compare`.
        progress: show a bar.

    Raises:
        ValueError: as `compare` does, and says where.
    """
    if axis not in ("layer", "step"):
        raise ValueError(f"axis={axis!r}; vectors are compared along 'layer' or 'step'")
    if not sets:
        raise ValueError(f"there is nothing to compare; give two sets of vectors by {axis}")
    found = {}
    for place in tqdm(sorted(sets), desc="compare", unit=axis, disable=not progress):
        try:
            found[place] = compare(*sets[place], source={**(source or {}), axis: place}, **settings)
        except ValueError as error:
            raise ValueError(f"at {axis} {place}: {error}") from error
    return Comparisons(axis, found)


def _as_matrix(vectors: Tensor, name: str, ids: Sequence[str]) -> Float[Tensor, "fact d"]:
    if vectors.dim() != 2:
        raise ValueError(f"the {name} vectors are a matrix, a row a fact; got {list(vectors.shape)}")
    if len(vectors) != len(ids):
        raise ValueError(
            f"{len(vectors)} {name} vectors for {len(ids)} facts; rows are paired, one a fact in both sets"
        )
    vectors = vectors.detach().double().cpu()
    for wrong, rows in (
        ("holds NaN or infinity", ~vectors.isfinite().all(dim=1)),
        ("is zero", (vectors == 0).all(dim=1)),
    ):
        if rows.any():
            raise ValueError(
                f"the {name} vector of {ids[int(rows.nonzero()[0])]!r} {wrong}; leave the fact out of both"
            )
    return vectors


def fewest_facts(rank: int = 5) -> int:
    """Number of facts that a comparison needs: "subspace" uses half of two thirds of them."""
    return 3 * (rank + 2)


def _selected(known: Mapping[str, Statistic], only: Sequence[str] | None) -> dict[str, Statistic]:
    """The selected statistics, in their usual order."""
    if only is not None and (not only or any(name not in known for name in only)):
        raise ValueError(f"only={list(only)}; of these two sets there are {', '.join(known)}")
    return {name: statistic for name, statistic in known.items() if only is None or name in only}


def _members(groups: Sequence[str] | None, n_facts: int) -> list[Int[Tensor, "member"]]:
    """The rows of each group, in order."""
    if groups is None:
        return [torch.arange(n_facts)]
    if len(groups) != n_facts:
        raise ValueError(f"{len(groups)} groups for {n_facts} facts; give each fact its group")
    return [torch.tensor([i for i, each in enumerate(groups) if each == name]) for name in dict.fromkeys(groups)]


def _without_groups(vectors: Float[Tensor, "fact d"], members: Sequence[Tensor]) -> Float[Tensor, "fact d"]:
    """The vectors with the mean of every group moved to the mean of all."""
    if len(members) == 1:
        return vectors
    moved, mean = vectors.clone(), vectors.mean(dim=0)
    for own in members:
        moved[own] += mean - vectors[own].mean(dim=0)
    return moved


def _check_rank(rank: int, sets: Sequence[Float[Tensor, "fact _"]], names: Sequence[str]) -> None:
    n_facts, fewest = len(sets[0]), fewest_facts(rank)
    if rank < 2:
        raise ValueError(f"rank={rank}; at least 2 principal components are compared")
    if n_facts < fewest:
        smaller = f", or ask for rank={n_facts // 3 - 2}" if n_facts >= 12 else ""
        raise ValueError(f"{n_facts} facts are too few for rank={rank}: give at least {fewest}{smaller}")
    for vectors, name in zip(sets, names, strict=True):
        varied = int((torch.linalg.svdvals(centred(vectors)) > ROUND_OFF * vectors.norm()).sum())
        if varied < rank:
            raise ValueError(
                f"the {name} vectors differ from fact to fact in {varied} directions, fewer than rank={rank} asks for"
            )


def _in_few_axes(vectors: Float[Tensor, "entry d"]) -> Float[Tensor, "entry component"]:
    """The vectors in an orthonormal basis of what they span: no angle or length changes, and d may be thousands."""
    coordinates: Tensor = torch.linalg.qr(vectors.T, mode="r").R
    return coordinates.T


def _shared_components(
    x: Float[Tensor, "fact d"], y: Float[Tensor, "fact d"]
) -> tuple[Float[Tensor, "2 fact 2"], Float[Tensor, "2"]]:
    """Both sets in the first two principal components of all vectors together, and their shares of the variance."""
    u, s, _ = torch.linalg.svd(torch.cat([centred(x), centred(y)]), full_matrices=False)
    coordinates = (u * s)[:, :2]
    largest = coordinates.gather(0, coordinates.abs().argmax(dim=0, keepdim=True))
    return (coordinates * largest.sign()).unflatten(0, (2, len(x))), (s.square() / s.square().sum())[:2]


def _singular_values(x: Float[Tensor, "fact d"], count: int) -> Float[Tensor, "component"]:
    """As many as there are facts less the means taken out, the last ones 0 where the vectors are narrower."""
    found = torch.linalg.svdvals(centred(x))[:count]
    return torch.nn.functional.pad(found, (0, count - len(found)))
