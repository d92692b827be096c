"""A trajectory as an explorer page: its canvases, and the results on it that the caller gives."""

from collections.abc import Mapping
from typing import Any

from diffusion_lens.config import reached
from diffusion_lens.denoising.as_python import RunCode
from diffusion_lens.denoising.explored_code import (
    alternatives_code,
    attention_code,
    lens_code,
    run_code,
    trace_code,
)
from diffusion_lens.denoising.explored_results import (
    LOGITS,
    Results,
    alternatives_view,
    answer_of,
    attention_view,
    check_lens,
    grids_of,
)
from diffusion_lens.denoising.recording import Recording
from diffusion_lens.pages import views
from diffusion_lens.pages.page import Page, PageRun
from diffusion_lens.pages.views import Lens, View
from diffusion_lens.pages.words import Words
from diffusion_lens.records import shown_model

MISSING = {
    "alternatives": "Pass logits=cache, where trajectory, cache = model.denoise_with_cache(prompt, "
    f'names_filter="{LOGITS}"), to see the likeliest tokens at every masked position. Without guidance, a lens of the '
    "last layer shows them too.",
    "lens": "Pass lens=logit_lens(model, trajectory) to see what each layer predicts.",
    "attention": "Pass attention=cache, where trajectory, cache = model.denoise_with_cache(prompt, "
    'names_filter="blocks.0.attn.hook_pattern"), to see attention patterns.',
    "trace": "Pass trace=trace_trajectory(model, fact, trajectory=trajectory, noise=0.5) to see which states carry the "
    "answer.",
}


def page_of(trajectory: Recording, results: Results, row: int = 0) -> Page:
    """The page of one row of a trajectory.

    Raises:
        ValueError: A result of another run or network, or without what its view shows.
    """
    if not -len(trajectory) <= row < len(trajectory):
        raise ValueError(f"row={row}, but the trajectory has {len(trajectory)} rows")
    row %= len(trajectory)
    record = trajectory.record
    title = f"{shown_model(record)}: {trajectory.text[row] or 'a run'}"
    return Page(title, [model_info(record)], [page_run(trajectory, results, row)])


def page_run(trajectory: Recording, results: Results, row: int) -> PageRun:
    """One row of a trajectory with the results on it."""
    words, code = Words(), RunCode(trajectory, row)
    entry = canvas_entry(trajectory, row, words)
    shown: dict[str, View] = {}
    python = run_code(code)

    if (lens := results.lens) is not None:
        check_lens(trajectory, lens, row)
        shown["lens"] = views.lens_view(lens, row, words)
        python["lens"] = lens_code(code, lens, row)
    if results.logits is not None:
        shown["alternatives"] = alternatives_view(trajectory, results.logits, row, words)
        python["alternatives"] = alternatives_code(code)
    elif lens is not None and _reads_the_output(lens):
        by_step = list(views.alternatives_of_lens(lens, row, trajectory.blank))
        shown["alternatives"] = views.alternatives_view(by_step, words, lens.words)
        python["alternatives"] = python["lens"]
    if results.attention is not None:
        shown["attention"] = attention_view(trajectory, results.attention, row)
        python["attention"] = attention_code(code)
    grids = [grids_of(trajectory, trace, name, row) for name, trace in results.named_traces().items()]
    if grids:
        python["trace"] = trace_code(code, results.named_traces())
        entry["answer"] = answer_of(results.traces, words)
    present = {*shown, *(["trace"] if grids else [])}
    entry["words"] = words.texts
    entry["missing"] = {view: sentence for view, sentence in MISSING.items() if view not in present}
    entry["python"] = python
    return PageRun.of(entry, [views.trace_view(one) for one in grids], **shown)


def _reads_the_output(lens: Lens) -> bool:
    """Whether the last layer of a lens predicts what the loop proposes: read directly, and without guidance."""
    record = lens.record
    return "final_post" in lens.labels and not record["cfg_scale"] and record["translators"] is None


def model_info(record: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest's entry of the model that a record names."""
    architecture = record["architecture"]
    return {
        "name": shown_model(record),
        "n_layers": architecture["n_layers"],
        "n_heads": architecture["n_heads"],
        "grows": record["blank"] < 0,
        "masks": record["blank"] >= 0 and record.get("noise") != "uniform",
        "samplers": [record["sampler"]["name"]],
        "length": None,
    }


def canvas_entry(trajectory: Recording, row: int, words: Words) -> dict[str, Any]:
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
        "model": 0,
        "label": shown_model(record),
        "prompt": prompt,
        "text": trajectory.text[row],
        "spec": None,
        "base": None,
        "words": [],
        "guided": bool(record["cfg_scale"]),
        "n_steps": trajectory.n_steps,
        "first_step": trajectory.first_step,
        "steps": list(range(trajectory.first_step, trajectory.first_step + trajectory.n_steps + 1)),
        "times": record["times"],
        "canvases": words.indices(canvases, trajectory.words).tolist(),
        # The step that first reads each position, where blocks are opened one after another.
        "opened_at": (trajectory.first_step + unopened).tolist() if trajectory.blank >= 0 and unopened.any() else None,
        "given": given,
        "real": trajectory.real[row].tolist(),
        "revealed_at": trajectory.revealed_at[row].tolist(),
        "confidence": [round(p, 6) for p in trajectory.confidence[row].tolist()],
    }
