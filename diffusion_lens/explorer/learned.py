"""Views of what analyses have learned about a run: circuits, graphs, experts, self-conditioning and signatures.

As on every page, a result is shown only if it is of this run: made under the network that wrote it, on its canvases.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from diffusion_lens.analysis.graphs.circuit_tracer import as_graph
from diffusion_lens.denoising.cache import TrajectoryCache
from diffusion_lens.denoising.same_network import COMPARED, canvas_provenance, without_canvas_hooks
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.model.config import DiffusionConfig, reached
from diffusion_lens.model.readout import READOUTS
from diffusion_lens.pages import views
from diffusion_lens.pages.views import View, Words
from diffusion_lens.records.results import differences, network_of

EXPERTS, WEIGHTS = "hook_experts", "hook_router_weights"
MISSING = {
    "circuit": "trajectory.explore(path, circuit=edge_attribution(model, trajectory, other, metric, steps=[0])) shows "
    "the heads and MLPs that make the difference to another run, and the edges between them.",
    "graph": "trajectory.explore(path, graph=run_graph(model, trajectory, position, prompt)) shows the parts, by step "
    "and layer, through which the difference to the run of another prompt passes.",
    "experts": "trajectory.explore(path, experts=cache) shows which experts each position chose, where trajectory, "
    'cache = model.denoise_with_cache(prompt, names_filter=["blocks.1.mlp.hook_experts", '
    '"blocks.1.mlp.hook_router_weights"]).',
    "signatures": "trajectory.explore(path, signatures=reversal_signatures(model, pairs)) shows the signatures of "
    "reversal, where the fact of the run is among the pairs.",
}


def layers_of_experts(cfg: DiffusionConfig) -> list[int]:
    """The layers in which a router chooses experts."""
    return [] if cfg.experts is None else [layer for layer, has in enumerate(cfg.experts.layers) if has]


def circuit_view(trajectory: Trajectory, scores: Any, row: int) -> View:
    """`EdgeScores` or `NodeScores` between this run and other inputs.

    Raises:
        ValueError: The scores are of another network, or neither of their inputs is a canvas of the run.
    """
    record = scores.record
    require_network("circuit", record, trajectory)
    if record["steps"] is not None:
        steps = list(record["steps"])
    else:
        steps = [record["step"]] if "step" in record else _steps_that_read(trajectory, record, row)
    sides = [
        side
        for side in ("clean", "corrupted")
        if all(
            _reads(trajectory, step, tokens, row) for step, tokens in zip(steps, record[f"{side}_tokens"], strict=True)
        )
    ]
    if not sides or not steps:
        raise ValueError(
            f"the circuit is between inputs that are no canvases of row {row} of the trajectory. Attribute the run "
            "itself, with steps=, or a fact on a canvas that the run reads"
        )
    return views.circuit_view(scores, steps, sides[0], len(record["clean_tokens"][0]))


def _steps_that_read(trajectory: Trajectory, record: dict[str, Any], row: int) -> list[int]:
    """The first step that reads one of the inputs of scores without steps."""
    steps = range(trajectory.first_step, trajectory.first_step + trajectory.n_steps)
    inputs = (record[f"{side}_tokens"][0] for side in ("clean", "corrupted"))
    found = [step for tokens in inputs for step in steps if _reads(trajectory, step, tokens, row)]
    return found[:1]


def _reads(trajectory: Trajectory, step: int, tokens: list[list[int]], row: int) -> bool:
    """Whether a step reads these canvases in all rows, or this one in its row, without the positions not reached."""
    index = step - trajectory.first_step
    if not 0 <= index < trajectory.n_steps:
        return False
    given = [[token for token in one if token >= 0] for one in tokens]
    canvases = [one[reached(one)].tolist() for one in trajectory.canvases[index].cpu()]
    return given in (canvases, [canvases[row]])


def graph_view(trajectory: Trajectory, graph: Any, row: int, words: Words) -> View:
    """A `RunGraph`, pruned or not, whose clean run is this one.

    Raises:
        ValueError: The graph is of another network or run.
    """
    require_network("graph", graph.record, trajectory)
    clean = graph.runs["clean"]
    if clean.first_step != trajectory.first_step or not torch.equal(
        clean.canvases[:, 0].cpu(), trajectory.canvases[:, row].cpu()
    ):
        raise ValueError(
            f"the graph is of the run {clean.text[0]!r}, and not of row {row} of the trajectory. Give the trajectory "
            "to run_graph as the clean run"
        )
    return View({"chunk": "graph"}, {"graph": graph_chunk(graph, words)})


def graph_chunk(graph: Any, words: Words) -> bytes:
    """The chunk of a `RunGraph`."""
    return views.graph_chunk(graph, *as_graph(graph, "graph"), graph.kinds, words)


def experts_view(trajectory: Trajectory, cache: TrajectoryCache, row: int) -> View:
    """The experts that each position chose, at the layers and steps of a cache.

    Raises:
        ValueError: The cache is of another run, or has no choice of experts.
    """
    layers, chunks, ending = list[int](), dict[str, bytes](), f".mlp.{EXPERTS}"
    for step in cached_steps("experts", cache, trajectory):
        layers = sorted(int(name.split(".")[1]) for name in cache[step].cache_dict if name.endswith(ending))
        chosen = [cache[step][f"blocks.{layer}{ending}"] for layer in layers]
        for choice in chosen:
            require_shape("experts", choice.shape[:2], trajectory)
        tables = [cache[step].cache_dict.get(f"blocks.{layer}.mlp.{WEIGHTS}") for layer in layers]
        weights = [None if table is None else table[row] for table in tables]
        if layers:
            chunks[f"experts/{step}"] = views.experts_chunk([choice[row] for choice in chosen], weights)
    if not chunks:
        raise ValueError("experts= contains no choice of experts")
    steps = [int(name.partition("/")[2]) for name in chunks]
    return View(views.experts_entry(layers, _n_experts(trajectory), steps), chunks)


def _n_experts(trajectory: Trajectory) -> int:
    experts: dict[str, Any] = trajectory.record["architecture"]["experts"]
    return int(experts["n_experts"])


def conditioning_view(trajectory: Trajectory, row: int, words: Words) -> View | None:
    """What each step read of the prediction before it; `None` if the steps of the run read canvases alone."""
    handed = trajectory.handed
    if handed is None:
        return None
    steps = range(trajectory.first_step, trajectory.first_step + trajectory.n_steps)
    likeliest = torch.full((len(steps), trajectory.tokens.shape[1]), -1)
    for i, step in enumerate(steps):
        block = trajectory.state_at(step).block
        assert block is not None
        start, stop = int(block.start[row]), int(block.stop[row])
        likeliest[i, start:stop] = handed.likeliest[i, row, : stop - start]
    # Files of earlier versions lack the texts of tokens that were handed on, and never written.
    texts = {token: trajectory.words.get(token, f"token {token}") for token in likeliest.unique().tolist()}
    streak, finished = (x[: len(steps), row] for x in (handed.streak, handed.finished))
    return views.conditioning_view(likeliest, streak, finished, list(steps), texts, words)


def signatures_view(trajectory: Trajectory, signatures: Any, row: int) -> View:
    """`ReversalSignatures` among whose facts is that of the run.

    Raises:
        ValueError: The signatures are of another network, or none of their canvases begins with the prompt of the run.
    """
    record = signatures.record
    require_network("study of signatures", record, trajectory)
    tokens, given = (x[row].cpu() for x in (trajectory.tokens, trajectory.given))
    prompt = {position: int(tokens[position]) for position in given.nonzero()[:, 0].tolist()}
    own = [
        i
        for i, fact in enumerate(signatures.ids)
        if any(_begins_with(prompt, record["facts"][fact][way], trajectory) for way in ("forward", "reverse"))
    ]
    if not own:
        raise ValueError(
            f"the signatures are of {len(signatures.ids)} facts, and the prompt of row {row} is the beginning of none "
            "of their sentences. Denoise the prompt of one of them, or compute the signatures of this fact"
        )
    return views.signatures_view(signatures, own)


def _begins_with(prompt: Mapping[int, int], canvas: Mapping[str, Any], trajectory: Trajectory) -> bool:
    """Whether a taught canvas has the tokens of a prompt, where these are not masked; the answer is known."""
    tokens, blank = torch.tensor(canvas["tokens"]), trajectory.blank
    rows = READOUTS[trajectory.record["architecture"]["readout"]].rows(torch.arange(len(tokens)))
    tokens[(rows == canvas["row"]) & (tokens == blank)] = canvas["answer_token"]
    known = {position: token for position, token in enumerate(tokens.tolist()) if token != blank}
    compared = [position for position in prompt if position in known]
    return (
        bool(compared)
        and max(prompt) < len(tokens)
        and all(prompt[position] == known[position] for position in compared)
    )


def require_network(what: str, record: dict[str, Any], trajectory: Trajectory) -> None:
    """Raise a `ValueError` unless a result was made under the network that wrote the trajectory."""
    ours = without_canvas_hooks(network_of(record))
    wrote = without_canvas_hooks(
        {name: value for name, value in canvas_provenance(trajectory.record).items() if name in ours}
    )
    compared = [name for name in COMPARED if wrote.get(name) is not None and ours.get(name) is not None]
    if different := "; ".join(differences(wrote, ours, compared)):
        raise ValueError(
            f"the {what} is of another network than the one that wrote the trajectory ({different}), and a page shows "
            "them as one"
        )


def cached_steps(argument: str, cache: TrajectoryCache, trajectory: Trajectory) -> tuple[int, ...]:
    """The steps of a cache that the trajectory has, if it is of a run with as many steps."""
    n_steps = len(trajectory.record["times"]) - 1
    if cache.n_steps != n_steps:
        raise ValueError(f"{argument}= is of a run of {cache.n_steps} steps, and the trajectory has {n_steps}")
    steps = tuple(step for step in cache.steps if step >= trajectory.first_step)
    if (written := cache.canvases) is not None and written.shape[1:] == trajectory.canvases.shape[1:]:
        for step in steps:
            if not torch.equal(written[step].cpu(), trajectory.canvases[step - trajectory.first_step].cpu()):
                raise ValueError(
                    f"{argument}= is of another run: its canvas at step {step} is another one than the trajectory's"
                )
    return steps


def require_shape(argument: str, shape: Sequence[int], trajectory: Trajectory) -> None:
    """Raise a `ValueError` unless activations [batch pos ...] have the rows and positions of the trajectory."""
    if tuple(shape) != tuple(trajectory.tokens.shape):
        raise ValueError(
            f"{argument}= has {shape[0]} rows of {shape[1]} positions, and the trajectory "
            f"{list(trajectory.tokens.shape)} [batch pos]; pos_slice must be left out"
        )
