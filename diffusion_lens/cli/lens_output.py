"""What `diffusion-lens lens` prints and writes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion_lens.cli.report import save_figure

if TYPE_CHECKING:
    from diffusion_lens.analysis import LogitLens
    from diffusion_lens.denoising.trajectory import Trajectory

MOST_COLUMNS = 8
LONGEST_WORD = 12  # characters


def tables(lens: "LogitLens") -> Iterator[str]:
    """The lines of a table of the likeliest tokens, or of the states at which tokens become the likeliest."""
    from diffusion_lens.records import shown_model

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


def results_of(lens: "LogitLens") -> dict[str, Any]:
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


def save(lens: "LogitLens", trajectory: "Trajectory | None", out: Path) -> dict[str, Path]:
    """Write the lens and its run, and a figure: of each step, or a single one if there is one position or no step."""
    files = {"lens": lens.save(out / "lens.safetensors")}
    if trajectory is not None:
        files["trajectory"] = trajectory.save(out / "trajectory.safetensors")
        files["page"] = out / "lens.html"
        trajectory.explore(files["page"], lens=lens)
    if lens.steps is None:
        files["picture"] = save_figure(lens.plot(), out / "lens.png")
    elif len(lens.positions) == 1:
        files["picture"] = save_figure(lens.plot(position=lens.positions[0]), out / "lens.png")
    else:
        files |= {f"step_{step}": save_figure(lens.plot(step=step), out / f"step_{step}.png") for step in lens.steps}
    return files


def _likeliest(lens: "LogitLens") -> list[Any]:
    """The likeliest token by step (if there are steps), state and position; empty where nothing is read."""

    def words(tokens: list[Any]) -> list[Any]:
        return [words(each) if isinstance(each, list) else _word(lens, each) for each in tokens]

    return words(lens.top_tokens[..., 0, :, 0].tolist())


def _word(lens: "LogitLens", token: int) -> str:
    from diffusion_lens.plots import readable

    word = readable(lens.words[token]) if token >= 0 else ""
    return word if len(word) <= LONGEST_WORD else f"{word[: LONGEST_WORD - 1]}…"


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
