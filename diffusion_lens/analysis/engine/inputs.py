"""The forward passes of an analysis, whose states it reads: over texts, tokens, queries or facts once (`Inputs.rows`),
over the canvases of trajectories step by step, or over clean texts, to which the analysis adds noise (`CleanTexts`).

A canvas of a run is read as the network reads it at that step, with `hook.step` set, so that hooks of the caller act as
they do in the loop. Positions that a growing text has not reached, and padding, are never read.

Where nothing is hooked, equal canvases at consecutive steps share a pass, unless the network is given the time of each.
So do the canvases of a text that grows, which continue one another, because no position sees a later one. A hook may
act by step, and sees the whole canvas as in the loop, so that every canvas has its own pass.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffusion_lens.analysis.engine.layout import UsableFacts, as_query
from diffusion_lens.analysis.over_facts.folder import name_facts
from diffusion_lens.denoising.same_network import (
    canvas_provenance,
    require_same_tokens,
    warn_of_another_network,
    without_canvas_hooks,
)
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts.fact import Fact, Query
from diffusion_lens.hooks.names import FwdHooks, Hook, NamesFilter, hook_pairs, select_names
from diffusion_lens.hooks.step import StepState
from diffusion_lens.model.config import UNREACHED
from diffusion_lens.model.hook_points import position_axis
from diffusion_lens.model.hooking import check_hookable, why_silent
from diffusion_lens.model.inputs import check_length, check_tokens
from diffusion_lens.model.shapes import PosMask, Tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import run_of
from diffusion_lens.settings import Whole, one_of, pick_indices, whole_numbers


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One forward pass.

    Attributes:
        tokens: Int[batch pos], the canvas; on a growing text -1 where it has not been reached.
        real: Bool[batch pos], false at padding.
        step: The denoising step that hooks read; `None` outside the loop.
        queries: The query of each row, where the inputs are queries or facts.
        clean: Int[batch pos], the clean text that a model which attends by blocks reads beside a text under noise.
        sigma: Noise of each row, of which a time-conditioned network reads; by default that of the step, then that
            of `model.at_time(t)`.
    """

    model: DiffusionTransformer
    tokens: Tokens
    real: PosMask
    step: StepState | None = None
    queries: tuple[Query, ...] | None = None
    clean: Tokens | None = None
    sigma: Float[Tensor, "batch"] | None = None

    @classmethod
    def under_noise(
        cls, model: DiffusionTransformer, text: Tokens, noisy: Tokens, real: PosMask, p: Float[Tensor, "batch"]
    ) -> "ForwardPass":
        """The pass on texts under noise of probability `p`, as in training: each row gets its own, and a model that
        attends by blocks reads each block after the clean ones."""
        clean = None if model.cfg.causal_block is None else text
        return cls(model, noisy, real, clean=clean, sigma=model.time.sigma_of_noise(p))

    @property
    def present(self) -> PosMask:
        """Bool[batch pos], positions that contain a token or [MASK]."""
        inside: PosMask = (self.tokens != UNREACHED) & self.real
        return inside

    @property
    def masked(self) -> PosMask:
        """Bool[batch pos], positions with [MASK]; under uniform noise those that the step may write, or all."""
        if self.model.cfg.uniform_noise:
            return self.present if self.step is None else self.step.masked & self.present
        if not self.model.cfg.has_mask:
            return torch.zeros_like(self.tokens, dtype=torch.bool)
        return (self.tokens == self.model.cfg.blank) & self.present

    @property
    def predicting(self) -> PosMask:
        """Bool[batch pos], the rows whose logits predict a [MASK], or where the text grows, the next token."""
        present = self.present
        if not self.model.cfg.is_autoregressive:
            block, located = None if self.step is None else self.step.block, torch.zeros_like(present)
            located[self.model.readout.locate(self.masked, self.real, block)] = True
            return located & present
        last = present & (present.flip(1).cumsum(dim=1).flip(1) == 1)
        if self.step is None:
            return last
        return last & self.step.masked.any(dim=1, keepdim=True)

    @property
    def answer_rows(self) -> PosMask:
        """Bool[batch pos], the rows whose logits predict the answers of queries or facts."""
        if self.queries is None:
            raise ValueError(
                "positions='answer' needs queries or facts, whose answers have positions; for other inputs give "
                "'predicting', 'masked', 'unmasked', 'all' or indices"
            )
        chosen = torch.zeros_like(self.present)
        for row, query in enumerate(self.queries):
            positions = torch.tensor(query.answer_positions, dtype=torch.long, device=chosen.device)
            rows, n_pos = self.model.readout.rows(positions), len(query.tokens)
            if len(rows) and int(rows.max()) >= n_pos:
                raise ValueError(
                    f"the answer positions {positions.tolist()} are beyond the {n_pos} tokens of the query"
                )
            chosen[row, rows] = True
        return chosen

    def run(self, readers: Sequence[tuple[str, Hook]], fwd_hooks: FwdHooks = ()) -> None:
        """Compute the pass as far as to the last hook point that is read, with the caller's hooks of this call.

        The `readers` act after them; beside a clean text they read the states of the other one.
        """
        n_pos = self.tokens.shape[1]

        def of_noisy(read: Hook) -> Hook:
            return lambda activation, hook: read(activation[:, :n_pos], hook)

        attached = readers if self.clean is None else [(name, of_noisy(read)) for name, read in readers]
        for name, _ in hook_pairs(fwd_hooks):
            check_hookable(self.model, name, in_loop=False)
        with self.model.clock.at(self.step), self.model.hooks(fwd_hooks=[*fwd_hooks, *attached]):
            self.model.forward(
                self.model.cfg.readable(self.tokens),
                return_type=None,
                # Always a mask: a token that only pads is text where the caller's mask or a run's canvas says so.
                attention_mask=self.real,
                clean=self.clean,
                sigma=self.sigma,
                stop_at_layer=_last_layer(dict(readers)),
            )

    def states(
        self, names: Iterable[str], entries: tuple[Tensor, Tensor] | None = None, fwd_hooks: FwdHooks = ()
    ) -> dict[str, Tensor]:
        """The states that the caller's hooks return at some hook points: at the entries with these indices in the batch
        and in the row, or all."""
        stored: dict[str, Tensor] = {}

        def store(activation: Tensor, hook: Any) -> None:
            kept = activation if entries is None else activation[tuple(each.to(activation.device) for each in entries)]
            stored[hook.name] = kept.to(self.model.cfg.main_device)

        self.run(list(dict.fromkeys(names, store).items()), fwd_hooks)
        return stored


def readable_points(model: DiffusionTransformer, names_filter: NamesFilter) -> list[str]:
    """The hook points of a filter that one forward pass reaches, each with a vector for each position."""
    if names_filter is None:
        raise ValueError("names_filter is required: name the hook points to read, such as 'blocks.1.hook_resid_post'")
    names = select_names(names_filter, model.hook_dict)
    silent = {name: reason for name in names if (reason := why_silent(model, name))}
    if silent and (not callable(names_filter) or len(silent) == len(names)):
        raise ValueError("; ".join(f"{name!r} {reason}" for name, reason in silent.items()))
    names = [name for name in names if name not in silent]
    for name in names:
        check_vectors(model.hook_dict[name])
    return names


def check_vectors(point: Any) -> None:
    """Raise a `ValueError` unless the activation at a hook point has a vector for each position."""
    if (axis := position_axis(point)) != 1:
        shape = "without positions" if axis is None else "[batch head query key]"
        raise ValueError(
            f"{point.name!r} is {shape}, and a vector for each position is needed: use a hook point "
            "such as hook_resid_post, hook_mlp_out or attn.hook_z"
        )


def _last_layer(names: Iterable[str]) -> int | None:
    """The layer before which a pass may stop, `None` if it has to reach the final norm."""
    last = 0
    for name in names:
        if not name.startswith("blocks.") and name != "hook_embed":
            return None
        last = max(last, int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0)
    return last


def padded(model: DiffusionTransformer, rows: Sequence[Tensor]) -> tuple[Tokens, PosMask]:
    """Rows of tokens, Int[pos] each, padded on the right, and Bool[batch pos], false at padding."""
    lengths = list(map(len, rows))
    if len(set(lengths)) == 1:
        tokens = torch.stack(list(rows))
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    tokens = pad_sequence(list(rows), batch_first=True, padding_value=model.padding.id)
    ends = torch.tensor(lengths, device=tokens.device)[:, None]
    return tokens, torch.arange(tokens.shape[1], device=tokens.device) < ends


def as_batch(model: DiffusionTransformer, queries: Sequence[Query]) -> tuple[Tokens, PosMask | None]:
    """The canvases as rows, padded on the right so that every position keeps its number, and their attention mask.

    Padding inside a canvas is padding here too. The mask is `None` where there is no padding.
    """
    tokens, real = padded(model, [query.tokens.to(model.cfg.device, torch.long) for query in queries])
    if (own := model.padding.real(tokens)) is not None:
        real &= own
    return tokens, None if bool(real.all()) else real


def sha256_of(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the shapes and values of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()


_check_branch = one_of("conditional", "unconditional")
_KNOWN_PADDING = "attention_mask= belongs to tokens: texts, facts, queries and trajectories know their padding"
Texts = str | Sequence[str] | Sequence[Fact] | Tensor


@dataclass(frozen=True, eq=False)
class CleanTexts:
    """Texts as tokens, without padding, on the CPU.

    Attributes:
        tokens: Int[pos] of each text.
        editable: Bool[pos] of each text, false at a prepended BOS and at the prompt of a fact.
        indices: Index of each text in the list that was given.
        set_aside: Facts that the model cannot be queried for, with the reasons.
    """

    tokens: list[Int[Tensor, "_"]]
    editable: list[Bool[Tensor, "_"]]
    indices: list[int]
    set_aside: dict[str, str]

    @classmethod
    def of(
        cls,
        model: DiffusionTransformer,
        texts: Texts,
        attention_mask: Tensor | None = None,
        prepend_bos: bool | None = None,
    ) -> "CleanTexts":
        """Texts, facts or rows of tokens, as tokens; those that are empty, too long or contain [MASK] are refused."""
        if isinstance(texts, Tensor):
            tokens, real = _read_tokens(model, texts, attention_mask)
            rows = [row[is_real] for row, is_real in zip(tokens.cpu(), real.cpu(), strict=True)]
            found = cls(rows, [torch.ones_like(row, dtype=torch.bool) for row in rows], list(range(len(rows))), {})
        else:
            if attention_mask is not None:
                raise ValueError(_KNOWN_PADDING)
            given: list[Any] = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else [texts]
            if not given:
                raise ValueError("there is no text: the list is empty")
            if all(isinstance(text, Fact) for text in given):
                found = _of_facts(model, given, prepend_bos)
            else:
                found = _of_strings(model, given, prepend_bos)
        for index, row in zip(found.indices, found.tokens, strict=True):
            if not bool(model.cfg.writable(row).all()):
                raise ValueError(f"text {index} contains [MASK] or an id that is no token; give clean texts")
        return found

    def between(self, start: int, stop: int) -> "CleanTexts":
        """The usable texts from `start` to `stop`."""
        return CleanTexts(self.tokens[start:stop], self.editable[start:stop], self.indices[start:stop], {})

    def describe(self) -> dict[str, Any]:
        """The texts, for a record: their number, a digest of what is read, and the facts that are left out."""
        return {
            "kind": "texts",
            "rows": len(self.tokens),
            "tokens_sha256": sha256_of([torch.tensor(self.indices), *self.tokens, *self.editable]),
            "set_aside": self.set_aside,
        }


def _of_strings(model: DiffusionTransformer, texts: Sequence[str], prepend_bos: bool | None) -> CleanTexts:
    n_bos = len(model.encode("", prepend_bos))
    tokens, editable = [], []
    for index, text in enumerate(texts):
        try:
            row = model.tokenize(text, prepend_bos)[0][0].cpu()
            check_length(len(row), model.cfg)
        except ValueError as error:
            raise ValueError(f"text {index}: {error}") from error
        tokens.append(row)
        editable.append(torch.arange(len(row)) >= n_bos)
    return CleanTexts(tokens, editable, list(range(len(texts))), {})


def _of_facts(model: DiffusionTransformer, facts: Sequence[Fact], prepend_bos: bool | None) -> CleanTexts:
    def prepare(fact: Fact) -> tuple[list[int], list[int]]:
        prompt, answer = fact.tokenize(model, prepend_bos)
        check_length(len(prompt) + len(answer), model.cfg)
        return prompt, answer

    usable = UsableFacts.of(facts, prepare)
    place = {fact_id: index for index, fact_id in enumerate(name_facts(facts))}
    tokens = [torch.tensor(prompt + answer) for prompt, answer in usable.prepared.values()]
    editable = [torch.arange(len(prompt + answer)) >= len(prompt) for prompt, answer in usable.prepared.values()]
    return CleanTexts(tokens, editable, [place[fact_id] for fact_id in usable.facts], usable.set_aside)


def _read_tokens(model: DiffusionTransformer, tokens: Tensor, attention_mask: Tensor | None) -> tuple[Tokens, PosMask]:
    """`model.padding.checked` with a mask also where there is no padding."""
    tokens, real = model.padding.checked(tokens, attention_mask)
    return tokens, torch.ones_like(tokens, dtype=torch.bool) if real is None else real


Item = str | Query | Fact | Trajectory
Readable = Item | Tensor | Sequence[Item]
TextsOrRuns = Texts | Trajectory | Sequence[Trajectory]


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of an analysis: either denoising runs, or passes without a step."""

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
        """The passes over inputs. A trajectory that another network wrote is warned of.

        Args:
            batch_size: Number of texts, queries or facts of one length that share a pass. By default all share one,
                with padding.
            fwd_hooks: The caller's hooks of this call, under which the states are read.
        """
        if isinstance(given, Tensor):
            return cls(model, (), (ForwardPass(model, *_read_tokens(model, given, attention_mask)),))
        if attention_mask is not None:
            raise ValueError(_KNOWN_PADDING)
        items: list[Any] = [given] if isinstance(given, str | Query | Fact | Trajectory) else list(given)
        kinds = {*map(type, items)}
        if not items:
            raise ValueError("there is no input; give texts, queries, facts or trajectories")
        if Trajectory not in kinds:
            return cls(model, (), tuple(_passes(model, items, batch_size)))
        if len(kinds) > 1:
            raise ValueError("trajectories cannot be mixed with other inputs, which have no steps; give one kind")
        _check_canvases(model, items, fwd_hooks)
        return cls(model, tuple(items), ())

    @property
    def trajectory(self) -> Trajectory | None:
        """The only trajectory; `None` for other inputs. Several are a `ValueError`."""
        if len(self.trajectories) > 1:
            raise ValueError(f"{len(self.trajectories)} trajectories are given; give one, which may have several rows")
        return self.trajectories[0] if self.trajectories else None

    @property
    def n_steps(self) -> int | None:
        """Number of steps of the runs from their beginning, which must agree; `None` without trajectories."""
        steps = {(run.first_step, len(run.record["times"]) - 1) for run in self.trajectories}
        if len(steps) > 1:
            described = ", ".join(f"{first} to {n_steps - 1}" for first, n_steps in sorted(steps))
            raise ValueError(f"the trajectories have different steps ({described}); denoise with one number of steps")
        return steps.pop()[1] if steps else None

    def pick_steps(self, steps: Whole | Iterable[Whole] | None) -> list[int] | None:
        """The steps to read, by default all; `None` without trajectories."""
        if not self.trajectories:
            if steps is not None:
                raise ValueError("steps= requires a trajectory of model.denoise(...): other inputs have no steps")
            return None
        first, n_steps = self.trajectories[0].first_step, self.n_steps
        assert n_steps is not None
        if steps is None:
            return list(range(first, n_steps))
        picked = pick_indices("steps", whole_numbers("steps", steps), n_steps)
        if min(picked) < first:
            raise ValueError(f"step {min(picked)} is not part of a trajectory that begins at step {first}")
        return picked

    def at(self, step: int | None, branch: str = "conditional") -> Iterator[ForwardPass]:
        """The passes of one step in a branch of guidance, or without trajectories, all passes."""
        _check_branch("branch", branch)
        if branch == "unconditional" and not (
            self.trajectories and all(run.record["cfg_scale"] for run in self.trajectories)
        ):
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
    return CleanTexts.of(model, cast(Texts, given), attention_mask)


def _check_canvases(model: DiffusionTransformer, runs: Sequence[Trajectory], fwd_hooks: FwdHooks) -> None:
    """Refuse trajectories that the model cannot read, and warn if another network wrote one. Hooks of this call are
    compared only if a trajectory was written under hooks too: they intervene on the recorded canvases, as in a replay.
    """
    for run in runs:
        require_same_tokens(run.record, model)
    are_hooked = any(without_canvas_hooks(run.record)["hooks"] for run in runs)
    with run_of(model, fwd_hooks if are_hooked else ()):
        names = ["trajectory"] if len(runs) == 1 else [f"trajectory {i}" for i in range(len(runs))]
        warn_of_another_network({name: (run.record, model) for name, run in zip(names, runs, strict=True)})


def _passes(model: DiffusionTransformer, items: Sequence[Any], size: int | None) -> Iterator[ForwardPass]:
    """The passes over texts, queries and facts: some of one length together, or without a size, all of them."""
    rows: list[tuple[Int[Tensor, "_"], Query | None]] = []
    encoded = None  # the texts, all at once
    for item in items:
        if isinstance(item, str):
            if encoded is None:
                encoded = zip(*model.tokenize([text for text in items if isinstance(text, str)]), strict=True)
            tokens, real = next(encoded)
            rows.append((tokens[real], None))
        else:
            query = item if isinstance(item, Query) else as_query(model, item)
            rows.append((query.tokens.to(model.cfg.device), query))
    batches = [rows]
    if size is not None:
        ordered = sorted(rows, key=lambda row: len(row[0]))
        groups = [list(group) for _, group in groupby(ordered, key=lambda row: len(row[0]))]
        batches = [group[i : i + size] for group in groups for i in range(0, len(group), size)]
    for batch in batches:
        ids, queries = zip(*batch, strict=True)
        tokens, real = padded(model, ids)
        read = check_tokens(tokens, model.cfg)
        yield ForwardPass(model, read, real, queries=None if None in queries else queries)


@dataclass(frozen=True, eq=False)
class SharedPass:
    """One forward pass, up to the last position that is reached if nothing is hooked, and the canvases that it stands
    for, by their index."""

    read: ForwardPass
    served: dict[int, ForwardPass]
    run: int = 0  # index of the trajectory

    def on_read(self, selected: PosMask) -> Tensor:
        """Selected positions of a served canvas as positions of the pass, which ends after the last one reached."""
        return selected[:, : self.read.tokens.shape[1]]

    def by_reach(self) -> list[tuple[list[int], PosMask]]:
        """The served canvases in groups with a token or [MASK] at the same positions, and these on the pass."""
        groups: dict[bytes, tuple[list[int], PosMask]] = {}
        for index, canvas in self.served.items():
            present = self.on_read(canvas.present)
            groups.setdefault(present.cpu().numpy().tobytes(), ([], present))[0].append(index)
        return list(groups.values())


def shared_passes(canvases: Sequence[ForwardPass], is_hooked: bool) -> list[SharedPass]:
    """The forward passes that the canvases of one input need, in the order of the canvases."""
    passes: list[SharedPass] = []
    for index in reversed(range(len(canvases))):
        canvas = read = canvases[index]
        if passes and not is_hooked and _covers(next(iter(passes[-1].served.values())), canvas):
            passes[-1].served[index] = canvas
        else:
            if not is_hooked:  # up to the last position that is reached, with all of its block
                # Wherever blocks begin, that of a position ends before this, and what is behind it is not seen.
                n_shown = int(canvas.present.any(dim=0).nonzero().max()) + (canvas.model.cfg.block_size or 1)
                read = replace(canvas, tokens=canvas.tokens[:, :n_shown], real=canvas.real[:, :n_shown])
            passes.append(SharedPass(read, {index: canvas}))
    return passes[::-1]


def passes_of(inputs: Inputs, steps: Sequence[int] | None) -> Iterator[SharedPass]:
    """The passes over all inputs, which serve steps by their place in `steps` (without steps, index 0), and in their
    order if the caller has hooks."""
    if steps is None:
        yield from (SharedPass(read, {0: read}) for read in inputs.at(None))
    elif inputs.model.is_hooked:
        for index, step in enumerate(steps):
            yield from (SharedPass(read, {index: read}, run) for run, read in enumerate(inputs.at(step)))
    else:
        for run, canvases in enumerate(zip(*(inputs.at(step) for step in steps), strict=True)):
            yield from (replace(one, run=run) for one in shared_passes(canvases, is_hooked=False))


def _covers(wide: ForwardPass, narrow: ForwardPass) -> bool:
    """Whether a pass on one canvas computes all that is read on another."""
    steps = wide.step, narrow.step
    if wide.model.cfg.time_conditioning and len({step.sigma for step in steps if step is not None}) > 1:
        return False
    if wide.model.cfg.self_conditioning and wide.step is not narrow.step:  # each reads what its step was handed
        return False
    if wide.model.cfg.is_autoregressive:
        return bool((wide.tokens == narrow.tokens).where(narrow.present, True).all())
    return torch.equal(wide.tokens, narrow.tokens)
