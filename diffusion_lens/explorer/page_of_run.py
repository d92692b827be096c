"""A trajectory as an explorer page: its canvases, the results on it that the caller gives, and a verdict on its answer.

Each result is shown only if it is of this run, under the network that wrote it; another one is refused.

An answer counts as right where the text after the prompt has it as whole words, ignoring case and outer spaces: " Ann"
is not right in "Annabel Lee". The score "contained" of `evaluation.recall_by_steps`, SMDM's accuracy, takes any part of
the text, so that it counts "Annabel" too. The text is read up to its first end token, which is what a page shows;
`recall_by_steps` also reads what a diffusion model writes behind it.
"""

import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diffusion_lens.analysis import commitment
from diffusion_lens.denoising.cache import TrajectoryCache
from diffusion_lens.denoising.denoise import end_tokens
from diffusion_lens.denoising.predictions import Predictions
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.explorer.as_python import TOP_K, RunCode, lens_statements, saved_code, trace_statements, views_code
from diffusion_lens.explorer.learned import (
    MISSING,
    cached_steps,
    circuit_view,
    conditioning_view,
    experts_view,
    graph_view,
    require_network,
    require_shape,
    signatures_view,
)
from diffusion_lens.model.config import reached
from diffusion_lens.model.text import END_TEXTS, to_completion
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.pages import views
from diffusion_lens.pages.page import SHOWN_OF_HASH, CustomView, Page, PageRun, view_names
from diffusion_lens.pages.views import View, Words
from diffusion_lens.records.results import shown_model

_MISSING = {
    "predictions": "Record them with the run, denoise(..., predictions=5), or pass "
    "predictions=trajectory.predictions(model, top_k=5), to see what each step predicted at every masked position.",
    "lens": "Pass lens=logit_lens(model, trajectory) to see what each layer predicts.",
    "attention": "Pass attention=cache, where trajectory, cache = model.denoise_with_cache(prompt, "
    'names_filter="blocks.0.attn.hook_pattern"), to see attention patterns.',
    "trace": "Pass trace=trace_trajectory(model, fact, trajectory=trajectory, noise=0.5) to see which states carry the "
    "answer.",
}


def page_of(
    trajectory: Trajectory,
    lens: Any = None,
    traces: Sequence[Any] = (),
    attention: TrajectoryCache | None = None,
    predictions: Any = None,
    row: int = 0,
    answer: str | None = None,
    *,
    circuit: Any = None,
    graph: Any = None,
    experts: TrajectoryCache | None = None,
    signatures: Any = None,
    custom: Sequence[CustomView] = (),
) -> Page:
    """The page of one row of a trajectory, with results on it and an answer as in `Trajectory.explore`.

    Raises:
        ValueError: A result of another run or network, or without what its view shows, or two views of one name.
    """
    if not -len(trajectory) <= row < len(trajectory):
        raise ValueError(f"row={row}, but the trajectory has {len(trajectory)} rows")
    row %= len(trajectory)
    words, code, record = Words(), RunCode(trajectory, row), trajectory.record
    entry = canvas_entry(trajectory, row, words)
    entry["end"], wrote = recorded_by(trajectory, row)
    entry["verdict"] = verdict_of(answer, wrote)
    if lens is not None:
        _accepted("lens", check_lens, trajectory, lens, row)
    predicted, is_whole = _predicted(trajectory, lens, predictions, row)
    codes = views_code(code.run, code.cached, code.predictions(predicted.top_k if predicted else TOP_K))
    shown: dict[str, View] = {}
    python = {"run": codes["run"], "canvas": codes["canvas"]}

    if lens is not None:
        shown["lens"] = views.lens_view(lens, row, words)
        python["lens"] = f"{code.run}\n\n{lens_statements(code.trajectory, lens, row)}"
    if predicted is not None:
        committed = commitment(predicted).committed_at[0].tolist() if is_whole else None
        shown["predictions"] = views.predictions_view(predicted, committed, words)
        python["predictions"] = codes["predictions"]
    if attention is not None:
        shown["attention"] = _accepted("attention", attention_view, trajectory, attention, row)
        python["attention"] = codes["attention"]
    named = _accepted("trace", _named, traces)
    traced = [_accepted("trace", trace_view, trajectory, trace, name, row) for name, trace in named.items()]
    if traced:
        python["trace"] = f"{code.run}\n\n{trace_statements(named)}"
        entry["answer"] = answer_of(traces[0].record, words)
        if answer is None:
            entry["verdict"] = verdict_of_trace(trajectory, row, traces[0].record, wrote)
    made = {"circuit": (circuit_view, circuit), "experts": (experts_view, experts)}
    made["signatures"] = (signatures_view, signatures)
    for name, (make, result) in made.items():
        if result is not None:
            shown[name] = _accepted(name, make, trajectory, result, row)
            python[name] = codes[name] if name in codes else saved_code(name, result)
    if graph is not None:
        shown["graph"] = _accepted("graph", graph_view, trajectory, graph, row, words)
        python["graph"] = saved_code("graph", graph)
    if (conditioned := conditioning_view(trajectory, row, words)) is not None:
        shown["conditioning"], python["conditioning"] = conditioned, codes["conditioning"]
    present = {*shown, *(["trace"] if traced else [])}
    entry["words"] = words.texts
    entry["missing"] = {view: sentence for view, sentence in _MISSING.items() if view not in present}
    entry["python"] = python
    run = with_custom_views(PageRun.of(entry, traced, **shown), custom)
    scripts = [view.script for view in custom]
    return Page(
        f"{shown_model(record)}: {trajectory.text[row] or 'a run'}", [_model_info(record)], [run], scripts=scripts
    )


def with_custom_views(run: PageRun, custom: Sequence[CustomView]) -> PageRun:
    """A run with the data of views of the user's own; a `ValueError` if a name is taken."""
    for view in custom:
        if view.name in {*run.entry, *view_names()}:
            raise ValueError(
                f"there is a view or an entry {view.name!r} already; give the view in {view.module} another name"
            )
        run = PageRun({**run.entry, view.name: dict(view.entry)}, {**run.chunks, **view.packed})
    return run


def _accepted(view: str, make: Callable[..., Any], *given: Any) -> Any:
    """What `make` returns; the error of a result that it refuses also says what to pass."""
    try:
        return make(*given)
    except ValueError as error:
        raise ValueError(f"{error}. {(_MISSING | MISSING)[view]}") from None
    except AttributeError:  # it is no such result
        raise TypeError(f"{view}= is no such result. {(_MISSING | MISSING)[view]}") from None


def canvas_entry(trajectory: Trajectory, row: int, words: Words) -> dict[str, Any]:
    """The manifest's entry of one row of a run, without views; `words` may grow until the entry takes its texts."""
    record = trajectory.record
    canvases = trajectory.canvases[:, row].masked_fill(trajectory.is_masked(trajectory.canvases[:, row]), -1)
    unopened = (~reached(trajectory.canvases[:, row])).sum(dim=0)
    given = trajectory.given[row].tolist()
    words_given = [trajectory.words[t] for t, g in zip(trajectory.tokens[row].tolist(), given, strict=True) if g]
    # Tokens of most vocabularies contain their spaces; those of a vocabulary of words do not.
    prompt = next((text for text in ("".join(words_given), " ".join(words_given)) if text in trajectory.text[row]), "")
    return {
        "id": "run",
        "label": shown_model(record),
        "prompt": prompt,
        "text": trajectory.text[row],
        "guided": bool(record["cfg_scale"]),
        "n_steps": trajectory.n_steps,
        "first_step": trajectory.first_step,
        "steps": list(range(trajectory.first_step, trajectory.first_step + trajectory.n_steps + 1)),
        "times": record["times"][trajectory.first_step : trajectory.first_step + trajectory.n_steps + 1],
        "canvases": words.indices(canvases, trajectory.words).tolist(),
        # The step that first reads each position, where blocks are opened one after another.
        "opened_at": (trajectory.first_step + unopened).tolist() if trajectory.blank >= 0 and unopened.any() else None,
        "given": given,
        "real": trajectory.real[row].tolist(),
        "revealed_at": trajectory.revealed_at[row].tolist(),
        "confidence": [round(p, 6) for p in trajectory.confidence[row].tolist()],
    }


def check_lens(trajectory: Trajectory, lens: Any, row: int) -> None:
    """Raise a `ValueError` unless a lens read this row of this trajectory, under the network that wrote it."""
    if lens.steps is None and "step" not in lens.record:
        raise ValueError("the lens read an input that is no trajectory, so it has no steps")
    if lens.record.get("branch", "conditional") != "conditional":
        raise ValueError(f"the lens read the {lens.record['branch']} branch, and a page shows the conditional one")
    require_network("lens", lens.record, trajectory)
    steps = views.steps_of(lens)
    if outside := [step for step in steps if not 0 <= step - trajectory.first_step < trajectory.n_steps]:
        raise ValueError(f"the lens has the steps {outside}, which the trajectory does not have")
    n_rows, n_pos = trajectory.tokens.shape
    read = lens.tokens if lens.steps is not None else lens.tokens[None]
    if read.shape[1] != n_rows or max(lens.positions) >= n_pos:
        raise ValueError(
            f"the lens has {read.shape[1]} rows and position {max(lens.positions)}, and the trajectory {n_rows} rows "
            f"of {n_pos} positions"
        )
    indices = [step - trajectory.first_step for step in steps]
    if not torch.equal(read[:, row].cpu(), trajectory.canvases[indices, row].cpu()[:, lens.positions]):
        raise ValueError(f"the lens read other canvases than those of row {row} of the trajectory")


def _predicted(trajectory: Trajectory, lens: Any, predictions: Any, row: int) -> tuple[Predictions | None, bool]:
    """What each step predicted in one row: as given, as recorded with the run, or from a lens; and whether there are
    predictions, and all of the run."""
    predicted, positions = None, set(range(trajectory.tokens.shape[1]))
    if predictions is not None:
        predicted = _accepted("predictions", part_of, trajectory, predictions, row)
    elif trajectory.recorded is not None:
        predicted = trajectory.recorded.part([row])
    elif lens is not None and _reads_the_output(trajectory, lens):
        predicted, positions = predictions_of_lens(trajectory, lens, row), set(lens.positions)
    if predicted is None:
        return None, False
    is_open = trajectory.is_open(trajectory.canvases[:-1])[:, row].any(dim=0)
    is_whole = positions.issuperset(is_open.nonzero()[:, 0].tolist()) and len(predicted.steps) == trajectory.n_steps
    return predicted, is_whole and bool(predicted.masked.any())


def part_of(trajectory: Trajectory, predictions: Any, row: int) -> Predictions:
    """The row of predictions; a `ValueError` unless they are of this trajectory, under the network that wrote it."""
    require_network("recording of predictions", predictions.record, trajectory)
    require_shape("predictions", predictions.written.shape, trajectory)
    indices = [step - trajectory.first_step for step in predictions.steps]
    if outside := [step for step, i in zip(predictions.steps, indices, strict=True) if not 0 <= i < trajectory.n_steps]:
        raise ValueError(f"predictions= have the steps {outside}, which the trajectory does not have")
    masked = trajectory.is_open(trajectory.canvases[indices])[:, row].cpu()
    same = [(predictions.written, trajectory.tokens), (predictions.revealed_at, trajectory.revealed_at)]
    if bool((predictions.masked[:, row] & ~masked).any()) or not all(
        torch.equal(a[row], b[row].cpu()) for a, b in same
    ):
        raise ValueError(f"predictions= are of another run than row {row} of the trajectory")
    part: Predictions = predictions.part([row])
    return part


def predictions_of_lens(trajectory: Trajectory, lens: Any, row: int) -> Predictions | None:
    """What the last layer predicts at the open positions of one row, at the steps and positions of a lens; `None` if it
    reads none of these."""
    layer, order = lens.labels.index("final_post"), torch.tensor(lens.positions).argsort()

    def table(x: Tensor) -> Tensor:
        return (x[None] if lens.steps is None else x)[:, layer, row].cpu()[:, order]

    steps, top, positions = views.steps_of(lens), table(lens.top_tokens), sorted(lens.positions)
    canvases = trajectory.canvases[[step - trajectory.first_step for step in steps]]
    read = trajectory.is_open(canvases)[:, row, positions].cpu() & (top[..., 0] >= 0)
    if not read.any():
        return None
    masked = torch.zeros(len(read), 1, trajectory.tokens.shape[1], dtype=torch.bool)
    masked[:, 0, positions] = read
    return Predictions.of(
        top[read],
        table(lens.top_probabilities)[read],
        table(lens.entropy)[read],
        masked,
        steps=steps,
        written=trajectory.tokens[[row]].cpu(),
        revealed_at=trajectory.revealed_at[[row]].cpu(),
        words={**trajectory.words, **lens.words},
        record=trajectory.record,
    )


def attention_view(trajectory: Trajectory, cache: TrajectoryCache, row: int) -> View:
    """The attention patterns of the layers and steps that a cache contains."""
    steps, patterns = cached_steps("attention", cache, trajectory), {}
    n_pos = trajectory.tokens.shape[1]
    for step in steps:
        for name in cache[step].cache_dict:
            if name.endswith(".attn.hook_pattern"):
                pattern = cache[step][name]
                require_shape("attention", (pattern.shape[0], pattern.shape[2]), trajectory)
                if pattern.shape[3] != n_pos:
                    raise ValueError(f"attention= has {pattern.shape[3]} keys for {n_pos} positions")
                patterns[int(name.split(".")[1]), step] = pattern[row]
    if not patterns:
        raise ValueError("attention= contains no pattern")
    return views.attention_view(patterns)


def trace_view(trajectory: Trajectory, trace: Any, name: str, row: int) -> View:
    """The view of a `TrajectoryTrace`, or of a `CausalTrace` of one of the canvases, by the trajectory's steps."""
    require_network("trace", trace.record, trajectory)
    canvases = trajectory.str_canvases(row)
    answer = " ".join(word.strip() for word in trace.record["answer"])
    if trace.scores.dim() == 2:  # a CausalTrace, of a single canvas
        if trace.str_tokens not in canvases[:-1]:
            raise ValueError("the trace's canvas is none of the trajectory's")
        steps = [trajectory.first_step + canvases.index(trace.str_tokens)]
        where = trace.subject, trace.positions, trace.layers, steps
        entry = views.trace_entry(name, trace.record["kind"], *where, answer)
        return views.trace_view(entry, trace.scores[None], [trace.clean], [trace.corrupted])
    for step, canvas in zip(trace.steps, trace.str_canvases, strict=True):
        index = step - trajectory.first_step
        if not 0 <= index < trajectory.n_steps or canvases[index] != canvas:
            raise ValueError(f"the trace has another canvas at step {step} than the trajectory")
    return views.view_of_trace(trace, name, answer)


def answer_of(record: Mapping[str, Any], words: Words) -> dict[str, list[int]] | None:
    """The manifest's entry of the answer that a trace follows; `None` for files of earlier versions."""
    query = record.get("query")
    if query is None:
        return None
    texts = dict(zip(query["answer_tokens"], record["answer"], strict=True))
    indices = words.indices(query["answer_tokens"], texts)
    return {"positions": list(query["answer_positions"]), "words": indices.tolist()}


def verdict_of_trace(trajectory: Trajectory, row: int, record: Mapping[str, Any], wrote: str) -> dict[str, Any] | None:
    """The verdict on the answer that a trace follows, whose tokens stand at their positions where the run is right;
    `None` for files of earlier versions."""
    if (query := record.get("query")) is None:
        return None
    right = trajectory.tokens[row][query["answer_positions"]].tolist() == list(query["answer_tokens"])
    words = list(record["answer"])
    texts = ("".join(words), " ".join(words))
    return {"right": right, "wrote": wrote, "answer": next((text for text in texts if text.strip() in wrote), texts[1])}


def _model_info(record: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest's entry of the model that a record names."""
    architecture, is_uniform = record["architecture"], record.get("noise") == "uniform"
    return {
        "name": shown_model(record),
        "n_layers": architecture["n_layers"],
        "n_heads": architecture["n_heads"],
        "grows": record["blank"] < 0 and not is_uniform,
        "masks": record["blank"] >= 0 and not is_uniform,
        "shift": int(architecture.get("readout") == "shifted"),
        "samplers": [record["sampler"]["name"]],
        "length": None,
        "weights": record["weights_sha256"][:SHOWN_OF_HASH] if record.get("weights_sha256") else None,
    }


def _reads_the_output(trajectory: Trajectory, lens: Any) -> bool:
    """Whether the last layer of a lens predicts what the loop proposes: read directly, without guidance, and by passes
    over whole canvases."""
    record, cached = lens.record, trajectory.record["sampler"].get("approximate_cache")
    return "final_post" in lens.labels and not record["cfg_scale"] and record["translators"] is None and cached is None


def _named(traces: Sequence[Any]) -> dict[str, Any]:
    """The traces by a name for each: its kind, with a number if several are of one kind."""
    named: dict[str, Any] = {}
    for trace in traces:
        kind, number = trace.record["kind"], 2
        name = kind
        while name in named:
            name, number = f"{kind}-{number}", number + 1
        named[name] = trace
    return named


def verdict_of(answer: str | None, wrote: str) -> dict[str, Any] | None:
    """The manifest's entry of a verdict, {"right", "wrote", "answer"}; `None` without an answer."""
    return None if answer is None else {"right": has_words(answer, wrote), "wrote": wrote, "answer": answer}


def has_words(answer: str, wrote: str) -> bool:
    """Whether a text has an answer as whole words, ignoring case and outer spaces.

    No letter, digit or underscore continues a word of the answer on either side. Scripts of wide characters, such as
    Chinese, put no spaces between words, so there the answer may stand anywhere.
    """
    plain, text = answer.strip().lower(), wrote.lower()
    before, after = r"(?<!\w)" if _ends_word(plain[:1]) else "", r"(?!\w)" if _ends_word(plain[-1:]) else ""
    return re.search(f"{before}{re.escape(plain)}{after}", text) is not None


def _ends_word(char: str) -> bool:
    """Whether a letter at the edge of an answer must be the edge of a word."""
    return re.match(r"\w", char) is not None and unicodedata.east_asian_width(char) != "W"


def written_by(model: DiffusionTransformer, run: Trajectory, row: int = 0) -> tuple[int | None, str]:
    """Position of the first end token that the run wrote, `None` if there is none, and its text up to there."""
    end = end_of(run, row, [] if model.tokenizer is None else end_tokens(model, None))
    written = ~run.given[row] & run.real[row]
    return end, to_completion(model, run.tokens[row][:end][written[:end]]) if model.tokenizer is not None else ""


def recorded_by(run: Trajectory, row: int) -> tuple[int | None, str]:
    """The same from the texts of a run alone, of which `END_TEXTS` are end tokens."""
    end, completion = end_of(run, row, _ids(run.words)), run.completion[row]
    if end is None or not completion:
        return end, completion
    written = (~run.given[row] & run.real[row])[:end]
    words = [run.words[token] for token in run.tokens[row][:end][written].tolist()]
    # Tokens of most vocabularies contain their spaces; of a vocabulary of words the completion shows where they stand.
    place = 0
    for word in words:
        found = completion.find(word.strip(), place)
        place = place if found < 0 else found + len(word.strip())
    return end, completion[:place]


def end_of(run: Trajectory, row: int, ends: Collection[int]) -> int | None:
    """The first position of one row at which the run wrote one of these tokens; `None` if there is none."""
    written = ~run.given[row] & run.real[row]
    found = written & torch.isin(run.tokens[row], torch.tensor(list(ends), dtype=torch.long, device=run.tokens.device))
    return int(found.int().argmax()) if bool(found.any()) else None


def _ids(words: Mapping[int, str]) -> list[int]:
    return [token for token, text in words.items() if text.strip() in END_TEXTS]
