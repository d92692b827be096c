"""Steering vectors as differences of means, one for each denoising step.

The vector of a hook point is the mean activation over positive inputs minus the mean over negative ones (contrastive
activation addition, Rimsky et al. 2024, arXiv 2312.06681; difference in means, Marks and Tegmark 2023, arXiv
2310.06824):

    v = 1/|P| Σ_P h - 1/|N| Σ_N h

P and N are the selected positions of all rows of a group, and every position counts the same. Over trajectories, there
is a vector v_t for each step t, from the states at that step. The difference of one group's means at two steps,
`positive[name][s] - positive[name][t]`, steers from step t towards step s (Rulli et al. 2026, arXiv 2607.01774).

Only sums are kept, not activations.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from diffusion_lens.analysis.by_step.positions import Positions, check_positions, nothing_selected, select
from diffusion_lens.analysis.by_step.vectors_result import SteeringVectors
from diffusion_lens.analysis.inputs import Inputs, Readable, passes_of, readable_points
from diffusion_lens.hook_names import Hook, NamesFilter
from diffusion_lens.identity import begins_run
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records import provenance
from diffusion_lens.settings import Whole, at_least
from diffusion_lens.shapes import PosMask


@begins_run
@torch.no_grad()
def difference_of_means(
    model: DiffusionTransformer,
    positive: Readable,
    negative: Readable,
    names_filter: NamesFilter,
    *,
    positions: Positions = "all",
    steps: Whole | Iterable[Whole] | None = None,
    batch_size: Whole = 16,
    attention_mask: tuple[Tensor | None, Tensor | None] = (None, None),
    progress: bool = False,
) -> SteeringVectors:
    """The mean activation of positive inputs minus that of negative inputs, at each hook point and step.

    The caller's hooks inside the network act while the states are read. Without hooks, steps with the same canvas share
    a forward pass; a causal model takes a single one. Under guidance the states are those of the conditional branch.

    Args:
        model: Model of either variant.
        positive, negative: The two groups: a list of trajectories, or a trajectory of several rows, for vectors by
            step; texts, queries, facts or Int[batch pos] tokens for one vector. The numbers of rows may differ.
        names_filter: Hook points [batch pos ...]: a name, names or a predicate.
        positions: Positions that are averaged, as in `analysis.by_step.positions`.
        steps: Steps of the trajectories, negative ones from the end; by default all.
        batch_size: Number of texts or queries in a pass.
        attention_mask: Of positive and of negative tokens, [batch pos], 1 at real tokens, 0 at padding.
        progress: Whether to show a progress bar.

    Raises:
        KeyError: There is no such hook point.
        ValueError: A hook point without positions, inputs of two kinds or of different steps, or a group in which no
            position is selected.
    """
    chosen, size = check_positions(positions), at_least(1, "batch_size", batch_size)
    names = readable_points(model, names_filter)
    if isinstance(attention_mask, Tensor):
        raise TypeError("attention_mask= is one mask; give a pair, of the positive and of the negative tokens")
    given = zip(("positive", "negative"), (positive, negative), attention_mask, strict=True)
    groups = {name: Inputs.of(model, each, attention_mask=mask, batch_size=size) for name, each, mask in given}
    n_steps = {name: group.n_steps for name, group in groups.items()}
    if len(set(n_steps.values())) > 1:
        raise ValueError(f"both groups need the same kind of input and number of steps; the steps are {n_steps}")
    picked = groups["positive"].pick_steps(steps)
    groups["negative"].pick_steps(picked)
    indices = None if picked is None else sorted(picked)

    n_means = 1 if indices is None else len(indices)
    sums = {name: Sums(names, n_means) for name in groups}
    for name, group in groups.items():
        passes = passes_of(group, indices)
        for one in tqdm(passes, desc=f"means of the {name} inputs", unit="pass", disable=not progress):
            selected = {index: one.on_read(select(canvas, chosen)) for index, canvas in one.served.items()}
            one.read.run(sums[name].hooks(selected))

    counts = {name: torch.tensor(each.counts) for name, each in sums.items()}
    for name, count in counts.items():
        if not bool(count.any()):
            raise nothing_selected(model, positions, f"{name} inputs")
    record = {
        "names": names,
        "positions": chosen,
        "steps": indices,
        "n_steps": n_steps["positive"],
        "readout": model.cfg.readout,
        "inputs": {name: group.describe() for name, group in groups.items()},
        **provenance(model, model.cfg),
    }
    by_step = indices is not None
    means = {name: each.means(by_step) for name, each in sums.items()}
    return SteeringVectors(
        positive=means["positive"],
        negative=means["negative"],
        n_positive=counts["positive"] if by_step else counts["positive"][0],
        n_negative=counts["negative"] if by_step else counts["negative"][0],
        record=record,
    )


class Sums:
    """Sums of activations over selected positions, by hook point and step; `n` is the number of steps."""

    def __init__(self, names: Sequence[str], n: int) -> None:
        self.names = names
        self.counts = [0] * n
        self._sums: list[dict[str, Tensor]] = [{} for _ in range(n)]

    def hooks(self, selected: Mapping[int, PosMask]) -> list[tuple[str, Hook]]:
        """Hooks of a pass that add the positions that are selected at each of its steps."""
        for index, of_step in selected.items():
            self.counts[index] += int(of_step.sum())

        def add(activation: Tensor, hook: Any) -> None:
            wide = torch.promote_types(activation.dtype, torch.float32)
            for index, of_step in selected.items():
                sums = self._sums[index]
                total = activation[of_step.to(activation.device)].to(wide).sum(dim=0).double().cpu()
                sums[hook.name] = sums[hook.name] + total if hook.name in sums else total

        return [(name, add) for name in self.names]

    def means(self, by_step: bool) -> dict[str, Tensor]:
        """The mean at each hook point, with an axis of steps if there are any; NaN where nothing was selected."""
        means = {}
        for name in self.names:
            each = [sums[name] / count for sums, count in zip(self._sums, self.counts, strict=True)]
            means[name] = torch.stack(each).float() if by_step else each[0].float()
        return means
