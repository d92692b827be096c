"""The passes over inputs: texts, tokens, queries or facts once, or the canvases of trajectories step by step."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from jaxtyping import Int
from torch import Tensor

from diffusion_lens.analysis.canvas_layout import as_query
from diffusion_lens.analysis.inputs.clean_texts import CleanTexts, Texts
from diffusion_lens.analysis.inputs.forward_pass import ForwardPass
from diffusion_lens.analysis.inputs.padding import padded, read_tokens, require_no_mask, sha256_of
from diffusion_lens.denoising.same_network import canvas_provenance, require_same_tokens, warn_of_another_network
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Fact, Query
from diffusion_lens.hook_names import FwdHooks, hook_pairs, loop_hook, select_names
from diffusion_lens.identity import run_of
from diffusion_lens.model.hook_points import is_hooked
from diffusion_lens.model.inputs import check_tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.settings import Whole, pick_indices, whole_numbers

Item = str | Query | Fact | Trajectory
Readable = Item | Tensor | Sequence[Item]
TextsOrRuns = Texts | Trajectory | Sequence[Trajectory]


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of an analysis: either trajectories, or rows of tokens without a step.

    Attributes:
        model: Model that reads them.
        trajectories: Denoising runs; empty for other inputs.
        rows: Passes without a step.
    """

    model: DiffusionTransformer
    trajectories: tuple[Trajectory, ...]
    rows: tuple[ForwardPass, ...]

    @classmethod
    def of(
        cls,
        model: DiffusionTransformer,
        given: Readable,
        *,
        attention_mask: Tensor | None = None,
        batch_size: int | None = None,
        fwd_hooks: FwdHooks = (),
    ) -> "Inputs":
        """The passes over inputs.

        Args:
            attention_mask: [batch pos], 0 at the padding of tokens.
            batch_size: Number of texts, queries or facts of one length that share a pass. By default all share one,
                with padding.
            fwd_hooks: The caller's hooks of this call, if any, by which the states are read.

        Raises:
            ValueError: No input, trajectories with other inputs, trajectories of another architecture or tokenizer, a
                hook that rewrites their canvases, or rows of tokens whose padding cannot be told from text.
            TypeError: An input of another kind.

        Warns:
            UserWarning: A trajectory that another network wrote.
        """
        if isinstance(given, Tensor):
            return cls(model, (), (ForwardPass(model, *read_tokens(model, given, attention_mask)),))
        require_no_mask(attention_mask)
        items = [given] if isinstance(given, str | Query | Fact | Trajectory) else list(given)
        runs = [item for item in items if isinstance(item, Trajectory)]
        if not items:
            raise ValueError("there is no input; give texts, queries, facts or trajectories")
        if not runs:
            return cls(model, (), tuple(_passes(model, list(_rows(model, items)), batch_size)))
        if len(runs) < len(items):
            raise ValueError("trajectories cannot be mixed with other inputs, which have no steps; give one kind")
        _check_canvases(model, runs, fwd_hooks)
        return cls(model, tuple(runs), ())

    @property
    def trajectory(self) -> Trajectory | None:
        """The only trajectory; `None` for other inputs. Several are a `ValueError`."""
        if len(self.trajectories) > 1:
            raise ValueError(f"{len(self.trajectories)} trajectories are given; give one, which may have several rows")
        return self.trajectories[0] if self.trajectories else None

    @property
    def n_steps(self) -> int | None:
        """Number of steps of a run from its beginning; `None` without trajectories.

        Raises:
            ValueError: The trajectories have different steps.
        """
        steps = {(run.first_step, len(run.record["times"]) - 1) for run in self.trajectories}
        if len(steps) > 1:
            described = ", ".join(f"{first} to {n_steps - 1}" for first, n_steps in sorted(steps))
            raise ValueError(f"the trajectories have different steps ({described}); denoise with one number of steps")
        return steps.pop()[1] if steps else None

    def pick_steps(self, steps: Whole | Iterable[Whole] | None) -> list[int] | None:
        """The steps to read, by default all; `None` without trajectories.

        Raises:
            ValueError: Steps without trajectories, or a step that they do not have.
        """
        if self.n_steps is None:
            if steps is not None:
                raise ValueError("steps= requires a trajectory of model.denoise(...): other inputs have no steps")
            return None
        first = self.trajectories[0].first_step
        if steps is None:
            return list(range(first, self.n_steps))
        picked = pick_indices("steps", whole_numbers("steps", steps), self.n_steps)
        if min(picked) < first:
            raise ValueError(f"step {min(picked)} is not part of a trajectory that begins at step {first}")
        return picked

    def at(self, step: int | None, branch: str = "conditional") -> Iterator[ForwardPass]:
        """The passes of one step in a branch of guidance, or without trajectories, all passes.

        Raises:
            ValueError: There is no such branch.
        """
        if branch not in ("conditional", "unconditional"):
            raise ValueError(f"branch={branch!r}; it must be 'conditional' or 'unconditional'")
        is_guided = bool(self.trajectories) and all(run.record["cfg_scale"] for run in self.trajectories)
        if branch == "unconditional" and not is_guided:
            raise ValueError("branch='unconditional' needs guidance: give a trajectory denoised with cfg_scale")
        if step is None:
            yield from self.rows
            return
        for run in self.trajectories:
            state = run.state_at(step, self.model.cfg.device)
            tokens = state.tokens
            if branch == "unconditional":
                state, tokens = replace(state, branch="unconditional"), tokens.masked_fill(state.given, run.blank)
            yield ForwardPass(self.model, tokens, run.real.to(tokens.device), state)

    def describe(self) -> dict[str, Any]:
        """The inputs, for a record: number of rows, a digest of the tokens, and the networks that wrote the runs."""
        canvases = [run.canvases for run in self.trajectories] or [row.tokens for row in self.rows]
        return {
            "kind": "trajectories" if self.trajectories else "tokens",
            "rows": sum(tokens.shape[-2] for tokens in canvases),
            "tokens_sha256": sha256_of(canvases),
            "trajectory": [canvas_provenance(run.record) for run in self.trajectories] or None,
        }


def texts_or_runs(
    model: DiffusionTransformer, given: TextsOrRuns, attention_mask: Tensor | None = None
) -> CleanTexts | Inputs:
    """Clean texts, to which the caller adds noise, or trajectories, whose canvases are read as they are."""
    several: Any = given if isinstance(given, list | tuple) else [given]
    if any(isinstance(item, Trajectory) for item in several):
        return Inputs.of(model, several, attention_mask=attention_mask)
    texts: Any = given
    return CleanTexts.of(model, texts, attention_mask)


def _check_canvases(model: DiffusionTransformer, runs: Sequence[Trajectory], fwd_hooks: FwdHooks) -> None:
    """Refuse trajectories that the model cannot read, and warn if another network wrote one.

    Hooks that are given to this call are an intervention on the recorded canvases, as in a replay. They are compared
    only if a trajectory was written under hooks too.
    """
    for run in runs:
        require_same_tokens(run.record, model)
    points = {name for pattern, _ in hook_pairs(fwd_hooks) for name in select_names(pattern, model.hook_dict)}
    if is_hooked(model.loop_hooks.hook_tokens) or loop_hook("hook_tokens") in points:
        raise ValueError(
            "a hook at 'denoise.hook_tokens' rewrites the canvas of a step, and recorded ones are read as they are: "
            "remove it"
        )
    with run_of(model, fwd_hooks if any(run.record.get("hooks") for run in runs) else ()):
        names = ["trajectory"] if len(runs) == 1 else [f"trajectory {i}" for i in range(len(runs))]
        warn_of_another_network({name: (run.record, model) for name, run in zip(names, runs, strict=True)})


def _rows(model: DiffusionTransformer, items: Sequence[object]) -> Iterator[tuple[Int[Tensor, "_"], Query | None]]:
    """Tokens of each text, query or fact, and the query."""
    for item in items:
        if not isinstance(item, str | Query | Fact):
            raise TypeError(
                f"an input is a {type(item).__name__}; give a text, a Query, a Fact, a Trajectory or a list of one "
                "kind, or one tensor of tokens"
            )
    texts = [item for item in items if isinstance(item, str)]
    encoded = zip(*model.tokenize(texts), strict=True) if texts else iter(())
    for item in items:
        if isinstance(item, Query | Fact):
            query = as_query(model, item)
            yield query.tokens.to(model.cfg.device), query
        else:
            tokens, real = next(encoded)
            yield tokens[real], None


def _passes(
    model: DiffusionTransformer, rows: Sequence[tuple[Int[Tensor, "_"], Query | None]], size: int | None
) -> Iterator[ForwardPass]:
    """The passes over rows: some of one length together, or without a size, all of them."""
    batches = [rows]
    if size is not None:
        ordered = sorted(rows, key=lambda row: len(row[0]))
        groups = [list(group) for _, group in groupby(ordered, key=lambda row: len(row[0]))]
        batches = [group[i : i + size] for group in groups for i in range(0, len(group), size)]
    for batch in batches:
        tokens, real = padded(model, [ids for ids, _ in batch])
        queries = tuple(query for _, query in batch if query is not None)
        yield ForwardPass(
            model, check_tokens(tokens, model.cfg), real, queries=queries if len(queries) == len(batch) else None
        )
