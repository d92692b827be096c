"""`diffusion-lens patch` patches activations of a clean prompt into a corrupted one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from diffusion_lens.cli import cost
from diffusion_lens.cli.load_model import LoopOptions, ModelChoice, canvas_of, denoised, unnamed_subject
from diffusion_lens.cli.options import LENGTH, command
from diffusion_lens.cli.report import PictureReport, progress, strongest
from diffusion_lens.settings import setting
from diffusion_lens.settings.shared import PatchFields

if TYPE_CHECKING:
    from diffusion_lens.analysis import PatchGrid
    from diffusion_lens.analysis.engine.layout import CanvasLayout
    from diffusion_lens.facts.fact import Query
    from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer

SHOWN = 5  # cells of a grid


@command(
    at_step="Step at which to patch, counted from 0. Repeat the option for several. Default: all up to the one that "
    "reveals the first token of the answer in the corrupted run."
)
def patch(
    given: PatchFields,
    loop: LoopOptions,
    chosen: ModelChoice,
    report: PictureReport,
    prompt: str = setting(..., 'Clean prompt, e.g. "Plerrick Baupling plays".'),
    corrupted: str = setting(
        ..., "Corrupted prompt, which has as many tokens. Its activations are replaced by those of --prompt."
    ),
    answer: str = setting(..., 'Answer to the clean prompt with its leading space, e.g. " bassoon".'),
    rival: str | None = setting(
        None,
        "Answer to the corrupted prompt. With it, the metric is the logit of the answer's first token less that of the "
        "rival's; without it, the probability of the whole answer.",
    ),
    site: list[str] | None = setting(
        None,
        "Activation to patch: resid_pre, resid_mid, resid_post, attn_out, mlp_out, post (the MLP's hidden neurons), or "
        "by head q, k, v, z, pattern. Repeat the option for several. Default: resid_pre.",
    ),
    position: list[int] | None = setting(None, "Position to patch. Repeat the option for several. Default: each one."),
    together: bool = setting(False, "Patch the positions together, as one cell for each layer (and head)."),
    length: int | None = LENGTH,
) -> None:
    """Patch activations of a clean prompt into the run of a corrupted one, cell by cell, and measure the answer.

    With --steps, both prompts are denoised, and the canvas of a step of the one is patched into that of the other.

    Example: diffusion-lens patch site-mdm --prompt "Plerrick Baupling plays" --corrupted "Mondall Rorrick plays"
    --answer " bassoon" --length 16 --out patch
    """
    from diffusion_lens.analysis import patch_grid
    from diffusion_lens.analysis.engine.layout import CanvasLayout
    from diffusion_lens.analysis.engine.trajectory import TracedTrajectory
    from diffusion_lens.analysis.patching.grid import PatchSettings
    from diffusion_lens.analysis.patching.runs import resolve_sites
    from diffusion_lens.model.config import DiffusionConfig
    from diffusion_lens.settings import pick_indices, unique_indices

    # 1. Check the settings before the model is loaded.
    run_settings = loop.settings(chosen)
    sites = resolve_sites(site or ["resid_pre"])
    selected: Any = list(unique_indices("position", position) or ()) or None
    cells: Any = ([selected] if selected else "all") if together else selected
    settings = PatchSettings(**vars(given), positions=cells)
    settings.check_units(sites)
    if (shape := chosen.known_shape()) is not None:
        pick_indices("layers", settings.layers, shape.n_layers)
        cfg = DiffusionConfig.from_architecture(shape, device="cpu", dtype=chosen.dtype)
        _ = [(one.pick_heads(settings.heads, cfg), one.pick_neurons(settings.neurons, cfg)) for one in sites]
    length = chosen.length(length)
    prompts = _Prompts(prompt, corrupted, answer, rival, CanvasLayout(length))
    report.note(site=[one.name for one in sites], length=length)

    def patched(loaded: "HookedDiffusionTransformer", prompts: _Prompts, is_planned: bool = False) -> Any:
        """Lay out both prompts or denoise them, and patch. The plan of a run does not know the steps that it reads."""
        clean, other, rival_token = prompts.on(loaded)
        metric, row = _metric(loaded, other, rival_token)
        inputs: Any = (clean, other)
        steps: Any = [None]
        if run_settings is not None:
            inputs = [denoised(loaded, canvas_of(loaded, query), run_settings) for query in (clean, other)]
            reading = TracedTrajectory.of(loaded, other, inputs[1])
            last = reading.revealed_at[0] if rival else reading.last_step
            written = list(range(reading.trajectory.first_step, reading.answered_from + 1))
            steps = loop.reads(last, written, is_planned)
        for at in steps:
            grids = patch_grid(
                loaded,
                inputs[0],
                inputs[1],
                metric,
                [one.name for one in sites],
                at,
                settings=settings,
                logits_at=row,
                progress=progress() and not is_planned,
            )
        return grids

    # 2. Refuse a folder of another run; for a dry run, print the cost.
    report.begin()
    guessed = prompts if chosen.is_here else prompts.of_one_length()
    cost.dry_run(report, chosen, partial(patched, prompts=guessed, is_planned=True), guessed.texts)

    # 3. Patch, and show the strongest cells.
    grids = patched(chosen.load(), prompts)
    _say(report, grids, "logit difference" if rival else "p(answer)")
    _save(report, grids)
    report.finish(_numbers(grids), next(iter(grids.values())).record)


def _say(report: PictureReport, grids: "Mapping[str, PatchGrid]", metric: str) -> None:
    """Print the metric of both runs, and the cells of each site with the largest effects."""
    grid = next(iter(grids.values()))
    for step, clean, corrupted in zip(_steps(grid), grid.clean.view(-1), grid.corrupted.view(-1), strict=True):
        report.say(f"{step}{metric} {clean:.3f} in the clean run, {corrupted:.3f} in the corrupted one")
    for site, grid in grids.items():
        report.say(f"largest effects of {site}:")
        for cell in strongest(grid.effect, SHOWN):
            report.say(f"  {_cell(grid, cell)}: {grid.effect[cell]:+.3f}")
        if grid.error is not None:
            report.say(
                f"  these are estimates; {len(grid.error.exact)} cells were also patched exactly, and differ by at "
                f"most {grid.error.max_abs:.3f}"
            )


def _numbers(grids: "Mapping[str, PatchGrid]") -> dict[str, Any]:
    """The numbers of the JSON object, by site."""
    return {
        site: {
            "axes": grid.axes,
            "coordinates": grid.coordinates,
            "clean": grid.clean.tolist(),
            "corrupted": grid.corrupted.tolist(),
            "effect": grid.effect.tolist(),
        }
        for site, grid in grids.items()
    }


def _save(report: PictureReport, grids: "Mapping[str, PatchGrid]") -> None:
    """Write each grid, and the figure of the step and head with its largest effect."""
    from diffusion_lens.records.results import shown_model

    for site, grid in grids.items():
        report.save(site, grid)
        (cell,) = strongest(grid.effect, 1)
        chosen = {axis: grid.coordinates[axis][index] for axis, index in zip(grid.axes, cell, strict=True)}
        drawn = {axis: chosen[axis] for axis in ("step", "head", "neuron") if axis in chosen}
        if "pos" not in chosen:  # The heads or neurons are the rows of the figure.
            drawn = {axis: number for axis, number in drawn.items() if axis == "step"}
        title = ", ".join([shown_model(grid.record), *(f"{axis} {number}" for axis, number in drawn.items())])
        report.draw(f"{site}_picture", f"{site}.png", partial(grid.plot, **drawn, title=title))


def _steps(grid: "PatchGrid") -> list[str]:
    return [f"step {step}: " for step in grid.coordinates.get("step", ())] or [""]


def _cell(grid: "PatchGrid", cell: tuple[int, ...]) -> str:
    """A cell in words."""
    index = dict(zip(grid.axes, cell, strict=True))
    words = []
    for axis in ("step", "layer", "head", "neuron", "pos"):
        if axis in index:
            place = grid.coordinates[axis][index[axis]]
            several = f"positions {', '.join(str(clean) for clean, _ in place)}" if isinstance(place, list) else ""
            words.append(several or f"{'position' if axis == 'pos' else axis} {place}")
    if "pos" in index:
        words[-1] += f" ({grid.labels[index.get('step', 0)][index['pos']]})"
    return ", ".join(words)


@dataclass(frozen=True)
class _Prompts:
    """The two prompts and the answers."""

    clean: str
    corrupted: str
    answer: str
    rival: str | None
    layout: "CanvasLayout"

    def __post_init__(self) -> None:
        for prompt in (self.clean, self.corrupted):
            unnamed_subject(prompt, self.answer)

    @property
    def texts(self) -> list[str]:
        """All texts."""
        return [self.clean, self.corrupted, self.answer, self.rival or ""]

    def of_one_length(self) -> "_Prompts":
        """Prompts and answers that stand for these where nobody knows their tokens."""
        return replace(self, corrupted=self.clean.swapcase(), rival=self.rival and self.answer.swapcase())

    def on(self, model: "HookedDiffusionTransformer") -> "tuple[Query, Query, int | None]":
        """Both prompts on the canvas, with the clean one's answer, and the first token of the rival."""
        clean, corrupted = (
            self.layout.query(model, unnamed_subject(prompt, self.answer)) for prompt in (self.clean, self.corrupted)
        )
        ends = [query.answer_positions[0] for query in (clean, corrupted)]
        if ends[0] != ends[1]:
            raise ValueError(
                f"the prompt has {ends[0]} tokens and the corrupted one {ends[1]}: states are patched between equal "
                "positions, so give prompts with the same number of tokens"
            )
        if self.rival is None:
            return clean, corrupted, None
        token = unnamed_subject(self.corrupted, self.rival).tokenize(model)[1][0]
        if token == clean.answer_tokens[0]:
            raise ValueError(f"the answer {self.answer!r} and the rival {self.rival!r} begin with the same token")
        return clean, corrupted, token


def _metric(model: "HookedDiffusionTransformer", query: "Query", rival_token: int | None) -> tuple[Any, Any]:
    """The metric of a corrupted run, and the row of the logits that it reads; `None` where the metric has its own."""
    from diffusion_lens.analysis import answer_probability
    from diffusion_lens.analysis.engine.answer import Answer

    if rival_token is None:
        return answer_probability(model, query), None
    token = query.answer_tokens[0]

    def logit_difference(logits: Any) -> Any:
        return (logits[:, 0, token] - logits[:, 0, rival_token]).mean()

    return logit_difference, Answer.of(model, query).rows[:1]
