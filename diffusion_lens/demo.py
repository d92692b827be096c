"""The demonstration: both bundled models answer the forward and the reverse question of one fact.

It prints each canvas to the terminal and saves figures.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diffusion_lens import plots
from diffusion_lens.analysis import CausalTrace, causal_trace, noise_scale
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Direction, Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer

Say = Callable[[str], None]
DIRECTIONS: dict[str, Direction] = {"forward": "p2d", "reverse": "d2p"}

CAVEAT = """\
What this shows: both models learned this person only as "NAME is DESCRIPTION". The masked diffusion model also answers
the reverse question. The autoregressive (AR) baseline, trained on the same sentences, does not: the reversal curse.
In the maps (one colour scale, 0 to 1) the position where the answer is read carries nearly all of the effect, already
after the first block. This is the first [MASK] of the diffusion model and the last prompt token of the AR baseline. The
subject's own tokens carry little by then. The AR baseline's reverse map is blank, because its clean run does not
contain the answer either.
What it does not show: the models have 4 layers and made-up facts. They have no mid-layer subject site of the kind that
ROME reports for large models, and nothing here is evidence about SMDM itself. For that, load "smdm-1028m".
"""


@dataclass(frozen=True)
class DirectionResult:
    """One question to one model, with the denoising run and the causal trace of it."""

    model: HookedDiffusionTransformer
    fact: Fact
    direction: str
    trajectory: Trajectory
    trace: CausalTrace

    @property
    def answer(self) -> str:
        """Text that the model wrote after the prompt."""
        written = self.trajectory.text[0].removeprefix(self.fact.prompt)
        return written.split(".")[0].strip() + "." if "." in written else written.strip()

    @property
    def is_right(self) -> bool:
        """Whether the model wrote the answer of the fact."""
        return self.answer == self.fact.answer.strip()


def run(folder: Path, say: Say) -> list[Path]:
    """Denoise, trace and draw both directions on both models. Returns the paths of the figures.

    Args:
        folder: Folder for the figures.
        say: Receives each line for the terminal.
    """
    facts = toy_facts.load()
    person = facts.people[0]
    questions = {name: facts.facts(trained="p2d", asked=asked)[0] for name, asked in DIRECTIONS.items()}
    say(f'The fact, trained in this direction only: "{person.name} is the {person.description}."\n')
    results = []
    for name in ("tiny-mdm", "tiny-ar"):
        model = HookedDiffusionTransformer.from_pretrained(name, device="cpu")
        queries = [fact.to_query(model) for fact in facts.facts(trained="p2d")]
        noise = noise_scale(model, queries)
        for direction, fact in questions.items():
            results.append(_run_direction(model, fact, direction, noise))
            _print_result(results[-1], say)
    say(CAVEAT)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"denoising.png": _draw_denoising(results), "causal_traces.png": _draw_traces(results)}
    for file, figure in pictures.items():
        figure.savefig(folder / file, dpi=130)
        say(f"wrote {folder / file}")
    return [folder / file for file in pictures]


def _run_direction(model: HookedDiffusionTransformer, fact: Fact, direction: str, noise: float) -> DirectionResult:
    length = toy_facts.SENTENCE_LENGTH
    prompt_length = model.to_tokens(fact.prompt).shape[1]
    query = fact.to_query(model, n_masks=length - prompt_length, first_tokens=1)
    return DirectionResult(
        model=model,
        fact=fact,
        direction=direction,
        trajectory=model.denoise(fact.prompt, length=length, steps=8),
        trace=causal_trace(model, query, noise=noise),
    )


def _print_result(result: DirectionResult, say: Say) -> None:
    """Print the canvas after each step that changed it, then the answer."""
    say(f'{result.model.cfg.model_name}, {result.direction}: "{result.fact.prompt} …"')
    canvases = result.trajectory.str_canvases()
    given = int(result.trajectory.given[0].sum())
    for step, canvas in enumerate(canvases):
        if step and canvas == canvases[step - 1]:
            continue
        written = [word if word not in ("[MASK]", "") else "·" for word in canvas[given:]]
        label = "start " if step == 0 else f"step {step - 1}"
        say(f"  {label}  {' '.join(word.replace('<eos>', '∎') for word in written)}")
    first = result.trace.record["answer"][0].strip()
    verdict = "right" if result.is_right else f"wrong, it is{result.fact.answer}"
    say(f"  -> {result.answer}  {verdict};  p({first}) = {result.trace.clean:.2f} before anything is revealed\n")


def _draw_denoising(results: list[DirectionResult]) -> plots.Figure:
    figure, panels = plots.panels(2, 2, width=17.0, height=8.0)
    for result, ax in zip(results, panels, strict=True):
        result.trajectory.plot(ax=ax, title=_title(result))
    return figure


def _draw_traces(results: list[DirectionResult]) -> plots.Figure:
    rows = results[:2], results[2:]  # One row per model.
    return plots.trace_panels(
        [[result.trace for result in row] for row in rows],
        [[f"{_title(result)}\n{_clean_and_corrupted(result)}" for result in row] for row in rows],
        limits=(0.0, 1.0),
    )


def _title(result: DirectionResult) -> str:
    return f"{result.model.cfg.model_name}, {result.direction}: {'right' if result.is_right else 'wrong'}"


def _clean_and_corrupted(result: DirectionResult) -> str:
    return f"clean {result.trace.clean:.2f}, corrupted {result.trace.corrupted:.2f}"
