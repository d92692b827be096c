"""`diffusion-lens lens` reads what each layer predicts, on one canvas or at the steps of a denoising run."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from diffusion_lens.cli import cost
from diffusion_lens.cli.load_model import LoopOptions, ModelChoice, canvas_of, denoised, unnamed_subject
from diffusion_lens.cli.options import command
from diffusion_lens.cli.report import PictureReport, progress
from diffusion_lens.settings import at_least, pick_indices, setting
from diffusion_lens.settings.shared import LensSettings

if TYPE_CHECKING:
    from torch import Tensor

    from diffusion_lens.analysis import LogitLens
    from diffusion_lens.denoising.canvas import Canvas
    from diffusion_lens.denoising.trajectory import Trajectory
    from diffusion_lens.facts.fact import Query
    from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer

MOST_COLUMNS = 8
LONGEST_WORD = 12  # characters


@command(
    positions="Positions of the predicted tokens, negative ones from the end. Default: those of the answer, or all "
    "that are to be written; on one text of a causal model the next one."
)
def lens(
    given: LensSettings,
    loop: LoopOptions,
    chosen: ModelChoice,
    report: PictureReport,
    prompt: str = setting(..., 'Text before the answer, e.g. "Gustav Geisser is the".'),
    answer: str | None = setting(
        None,
        'Answer to follow through the layers, with its leading space, e.g. " bassoon". Default: with --steps the '
        "tokens that the run writes.",
    ),
    length: int | None = setting(
        None,
        "Number of positions of the canvas, including the prompt. Default: the training length; if that is unknown, "
        "the length of prompt and answer, or 52 without --answer.",
        partial(at_least, 1),
    ),
) -> None:
    """Show what the model would predict if it ended after each layer (the logit lens), by position or by step.

    Without --steps, the table has the likeliest token by layer and position. With --steps, it has the same by layer and
    step if one position is read, and otherwise the first state from which on the token at each position is likeliest.

    Example: diffusion-lens lens site-mdm --prompt "Plerrick Baupling plays" --answer " bassoon" --length 16 --out lens
    """
    from diffusion_lens.analysis import logit_lens
    from diffusion_lens.analysis.engine.layout import CanvasLayout
    from diffusion_lens.data.fact_files import STUDY_LENGTH

    # 1. Check the settings before the model is loaded.
    run_settings = loop.settings(chosen)
    shape = chosen.known_shape()
    one_text = run_settings is None and answer is None and shape is not None and shape.is_autoregressive
    if one_text and length is not None:
        raise ValueError(
            f"--length {length}: without --steps {chosen.model!r}, which is causal, reads the prompt alone; "
            "leave out --length"
        )
    length = None if one_text else chosen.length(length) or (STUDY_LENGTH if answer is None else None)
    if shape is not None:
        pick_indices("layers", given.layers, shape.n_layers + 1)
    fact = unnamed_subject(prompt, answer or "")
    layout = CanvasLayout(length)
    report.note(length=length)

    def read(loaded: "HookedDiffusionTransformer") -> Any:
        """The lens, and the run that it reads, if there is one."""
        query = None if answer is None else layout.query(loaded, fact)
        trajectory = None
        one_text = run_settings is None and query is None and loaded.cfg.is_autoregressive
        canvas = None if one_text else canvas_of(loaded, query or prompt, length)
        if run_settings is not None and canvas is not None:
            trajectory = denoised(loaded, canvas, run_settings)
        positions: Any = given.positions or _default_positions(query, canvas)
        inputs: Any = trajectory or query or (prompt if canvas is None else canvas.tokens)
        targets = None if trajectory is None or query is None else _targets(trajectory.tokens, query, positions)
        read = replace(given, positions=positions)
        result = logit_lens(loaded, inputs, settings=read, steps=loop.at_step, targets=targets, progress=progress())
        return result, trajectory

    # 2. Refuse a folder of another run; for a dry run, print the cost.
    report.begin()
    cost.dry_run(report, chosen, read, [prompt, answer or ""])

    # 3. Lay out the canvas or denoise it, and read it.
    result, trajectory = read(chosen.load())

    # 4. Show the table, and write the files.
    if trajectory is not None:
        report.say(f"the run writes: {trajectory.text[0]}")
    report.say(*_tables(result))
    _save(report, result, trajectory)
    report.finish(_numbers(result), result.record)


def _tables(lens: "LogitLens") -> Iterator[str]:
    """The lines of a table of the likeliest tokens, or of the states at which tokens become the likeliest."""
    from diffusion_lens.records.results import shown_model

    words, targets = _likeliest(lens), lens.targets[0, :, 0].tolist()
    probabilities = lens.top_probabilities[..., 0, :, 0].tolist()
    labels = [f"{place} {_word(lens, token)}".rstrip() for place, token in zip(lens.positions, targets, strict=True)]
    if lens.steps is None:
        yield f"{shown_model(lens.record)}: the likeliest token and its probability, by state and position"
        cells = [
            [f"{word} {p:.2f}" if word else "-" for word, p in zip(*of_layer, strict=True)]
            for of_layer in zip(words, probabilities, strict=True)
        ]
        yield from _table(["state", *labels], lens.labels, cells)
        first = [_label(lens, layer) for layer in lens.first_layer()[0, :, 0].tolist()]
        for label, token, since in zip(labels, targets, first, strict=True):
            if token >= 0:
                yield f"position {label}: {f'the likeliest from {since} on' if since else 'never the likeliest'}"
    elif len(lens.positions) == 1:
        place = f"{shown_model(lens.record)}, position {labels[0]}"
        yield f"{place}: the likeliest token and its probability, by state and step"
        cells = [
            [
                f"{words[step][layer][0]} {probabilities[step][layer][0]:.2f}" if words[step][layer][0] else "-"
                for step in range(len(lens.steps))
            ]
            for layer in range(len(lens.layers))
        ]
        yield from _table(["state", *_steps(lens)], lens.labels, cells)
    else:
        yield (
            f"{shown_model(lens.record)}: the first state from which on the token at a position is the likeliest, "
            "by step; - once it is revealed, and where nothing is read"
        )
        shown = lens.masked[:, 0] & (lens.top_tokens[:, 0, 0, :, 0] >= 0)
        layers = lens.first_layer()[:, 0, :, 0].T.tolist()
        cells = [
            [(_label(lens, layer) or "never") if is_shown else "-" for is_shown, layer in zip(*of_place, strict=True)]
            for of_place in zip(shown.T.tolist(), layers, strict=True)
        ]
        yield from _table(["position", *_steps(lens)], labels, cells)


def _numbers(lens: "LogitLens") -> dict[str, Any]:
    """The numbers of the JSON object; lists go over steps (if there are any), states and positions."""
    return {
        "positions": lens.positions,
        "steps": lens.steps,
        "states": lens.labels,
        "likeliest": _likeliest(lens),
        "probability": lens.top_probabilities[..., 0, :, 0].tolist(),
        "target_probability": lens.target_probabilities[..., 0, :, 0].tolist(),
        "entropy": lens.entropy[..., 0, :].tolist(),
    }


def _save(report: PictureReport, lens: "LogitLens", trajectory: "Trajectory | None") -> None:
    """Write the lens and its run, and a figure: of each step, or a single one if there is one position or no step."""
    report.save("lens", lens)
    if trajectory is not None and report.out is not None:
        report.save("trajectory", trajectory)
        report.files["page"] = trajectory.explore(report.out / "lens.html", lens=lens)
    if lens.steps is None:
        report.draw("picture", "lens.png", lens.plot)
    elif len(lens.positions) == 1:
        report.draw("picture", "lens.png", partial(lens.plot, position=lens.positions[0]))
    else:
        for step in lens.steps:
            report.draw(f"step_{step}", f"step_{step}.png", partial(lens.plot, step=step))


def _likeliest(lens: "LogitLens") -> list[Any]:
    """The likeliest token by step (if there are steps), state and position; empty where nothing is read."""

    def words(tokens: list[Any]) -> list[Any]:
        return [words(each) if isinstance(each, list) else _word(lens, each) for each in tokens]

    return words(lens.top_tokens[..., 0, :, 0].tolist())


def _word(lens: "LogitLens", token: int) -> str:
    from diffusion_lens.plots.axes import readable, shortened

    return shortened(readable(lens.words[token]), LONGEST_WORD) if token >= 0 else ""


def _label(lens: "LogitLens", layer: int) -> str:
    """The name of a state; empty for none."""
    return lens.labels[lens.layers.index(layer)] if layer >= 0 else ""


def _steps(lens: "LogitLens") -> list[str]:
    return [f"step {step}" for step in lens.steps or ()]


def _table(head: Sequence[str], names: Sequence[str], cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligned lines; columns beyond `MOST_COLUMNS` are counted below the table."""
    rows = [head, *([name, *of_row] for name, of_row in zip(names, cells, strict=True))]
    shown = [row[: MOST_COLUMNS + 1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        yield "  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
    if len(head) > MOST_COLUMNS + 1:
        yield f"  ({len(head) - MOST_COLUMNS - 1} more columns are in the saved lens and in --json)"


def _default_positions(query: "Query | None", canvas: "Canvas | None") -> list[int]:
    """The positions of the answer, or those to be written; the next one after a text of a causal model."""
    if query is not None:
        return list(query.answer_positions)
    return [-1] if canvas is None else canvas.blanks(canvas.tokens)[0].nonzero().flatten().tolist()


def _targets(written: "Tensor", query: "Query", positions: Sequence[int]) -> "Tensor":
    """The token to follow at each position: the answer's, elsewhere the one that the run has written.

    Args:
        written: Int[1 pos], the canvas at the end.
    """
    tokens = written.clone()
    tokens[0, list(query.answer_positions)] = tokens.new_tensor(query.answer_tokens)
    return tokens[:, pick_indices("position", positions, tokens.shape[1])]
