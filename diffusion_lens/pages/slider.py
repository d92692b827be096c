"""`step_slider`: causal traces by denoising step, as a page."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from diffusion_lens.pages.page import Page, PageRun
from diffusion_lens.pages.views import TraceGrids, trace_view
from diffusion_lens.pages.words import Words

_BLANKS = ("", "[MASK]")
_MISSING = "This page contains a causal trace only. trajectory.explore(path, trace=...) writes one with all views."


def step_slider(
    scores: Float[Tensor, "step pos layer"],
    *,
    str_canvases: Sequence[Sequence[str]],
    subject: tuple[int, int],
    steps: Sequence[int],
    layers: Sequence[int],
    positions: Sequence[int],
    kind: str,
    answer: Sequence[str],
    clean: Float[Tensor, "step"],
    corrupted: Float[Tensor, "step"],
    title: str,
) -> Page:
    """A heat map of each denoising step, with a slider over the steps and one colour scale for all.

    The scale goes from the lowest corrupted run to the highest score. Positions that the canvas does not contain yet
    (NaN) are grey.

    Args:
        str_canvases: Text of every position of the canvas, for each step; "" and "[MASK]" are masked.
        subject: First position of the subject, and one past its last.
        steps: Number of each step.
        layers: Layer of each column.
        positions: Position of each row.
        kind: Kind of state that was restored, "resid", "mlp" or "attn"; it selects the hue.
        answer: Text of each answer token.
        clean, corrupted: p(answer) in the clean and in the corrupted run.
    """
    texts = list(dict.fromkeys(word for canvas in str_canvases for word in canvas if word not in _BLANKS))
    words, by_id = Words(), dict(enumerate(texts))
    ids = {text: token for token, text in by_id.items()}
    canvases = [[words.index(ids.get(word, -1), by_id) for word in canvas] for canvas in str_canvases]
    grids = TraceGrids(
        name=kind,
        kind=kind,
        subject=subject,
        positions=positions,
        layers=layers,
        steps=steps,
        answer="".join(answer),
        scores=scores,
        clean=clean.tolist(),
        corrupted=corrupted.tolist(),
    )
    n_pos = len(canvases[0])
    entry = {
        "id": "trace",
        "model": 0,
        "label": title,
        "prompt": "",
        "text": "",
        "spec": None,
        "base": None,
        "words": words.texts,
        "n_steps": len(steps),
        "first_step": steps[0],
        "steps": list(steps),
        "times": None,
        "canvases": canvases,
        "given": [False] * n_pos,
        "real": [True] * n_pos,
        "revealed_at": None,
        "confidence": None,
        "missing": dict.fromkeys(("alternatives", "lens", "attention"), _MISSING),
        "python": {},
    }
    return Page(title, [], [PageRun.of(entry, [trace_view(grids)])])
