"""The demonstration: one fact, asked forwards and backwards, of the embedded pair; in the terminal and as pictures."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diffusion_lens import plots
from diffusion_lens.analysis import CausalTrace, causal_trace, noise_scale
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.facts import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer

Say = Callable[[str], None]

CAVEAT = """\
What this shows: both models learned this person only as "NAME is DESCRIPTION". The masked diffusion model also answers
the reverse question; its autoregressive twin, trained on the same sentences, does not: the reversal curse.
In the maps (one colour scale, 0 to 1) the place where the answer is read, the first [MASK] of the diffusion model and
the last prompt token of the twin, carries nearly all of the effect, already after the first block; the subject's own
tokens carry little by then. The twin's backward map is blank: nothing can be restored that was never there.
What it does not show: the pair has 4 layers and made-up facts. There is no mid-layer subject site of the kind ROME
reports for large models, and nothing here is evidence about SMDM itself: for that, load "smdm-1028m".
"""


@dataclass(frozen=True)
class Asked:
    """One question to one model."""

    model: HookedDiffusionTransformer
    fact: Fact
    way: str
    trajectory: Trajectory
    trace: CausalTrace

    @property
    def answer(self) -> str:
        """What the model wrote after the prompt."""
        written = self.trajectory.text[0].removeprefix(self.fact.prompt)
        return written.split(".")[0].strip() + "." if "." in written else written.strip()

    @property
    def is_right(self) -> bool:
        """Whether it wrote the fact's answer."""
        return self.answer == self.fact.answer.strip()


def run(folder: Path, say: Say) -> list[Path]:
    """Ask, trace, draw; `say` gets the lines for the terminal. Returns the pictures' paths."""
    facts = toy_facts.load()
    person = facts.people[0]
    forwards, backwards = (facts.facts(trained="p2d", asked=direction)[0] for direction in ("p2d", "d2p"))
    say(f'The fact, taught in this direction only: "{person.name} is the {person.description}."\n')
    asked = []
    for name in ("tiny-mdm", "tiny-ar"):
        model = HookedDiffusionTransformer.from_pretrained(name, device="cpu")
        queries = [fact.to_query(model) for fact in facts.facts(trained="p2d")]
        noise = noise_scale(model, queries)
        for way, fact in (("forwards", forwards), ("backwards", backwards)):
            asked.append(_ask(model, fact, way, noise))
            _tell(asked[-1], say)
    say(CAVEAT)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"denoising.png": _draw_denoising(asked), "causal_traces.png": _draw_traces(asked)}
    for file, figure in pictures.items():
        figure.savefig(folder / file, dpi=130)
        say(f"wrote {folder / file}")
    return [folder / file for file in pictures]


def _ask(model: HookedDiffusionTransformer, fact: Fact, way: str, noise: float) -> Asked:
    length = toy_facts.SENTENCE_LENGTH
    prompt_length = model.to_tokens(fact.prompt).shape[1]
    query = fact.to_query(model, answer_places=length - prompt_length, first_tokens=1)
    return Asked(
        model=model,
        fact=fact,
        way=way,
        trajectory=model.denoise(fact.prompt, length=length, steps=8),
        trace=causal_trace(model, query, noise=noise),
    )


def _tell(asked: Asked, say: Say) -> None:
    """The canvas after each step that changed it, then the answer."""
    say(f'{asked.model.cfg.model_name}, asked {asked.way}: "{asked.fact.prompt} …"')
    canvases = asked.trajectory.str_canvases()
    given = int(asked.trajectory.given[0].sum())
    for step, canvas in enumerate(canvases):
        if step and canvas == canvases[step - 1]:
            continue
        written = [word if word not in ("[MASK]", "") else "·" for word in canvas[given:]]
        label = "start " if step == 0 else f"step {step - 1}"
        say(f"  {label}  {' '.join(word.replace('<eos>', '∎') for word in written)}")
    first = asked.trace.record["answer"][0].strip()
    verdict = "right" if asked.is_right else f"wrong, it is{asked.fact.answer}"
    say(f"  -> {asked.answer}  {verdict};  p({first}) = {asked.trace.clean:.2f} before anything is revealed\n")


def _draw_denoising(asked: list[Asked]) -> plots.Figure:
    figure, panels = plots.panels(2, 2, width=17.0, height=8.0)
    for each, ax in zip(asked, panels, strict=True):
        each.trajectory.plot(ax=ax, title=_title(each))
    return figure


def _draw_traces(asked: list[Asked]) -> plots.Figure:
    rows = asked[:2], asked[2:]  # a row a model
    return plots.trace_panels(
        [[each.trace for each in row] for row in rows],
        [
            [f"{_title(each)}\nclean {each.trace.clean:.2f}, corrupted {each.trace.corrupted:.2f}" for each in row]
            for row in rows
        ],
        limits=(0.0, 1.0),
    )


def _title(asked: Asked) -> str:
    return f"{asked.model.cfg.model_name}, {asked.way}: {'right' if asked.is_right else 'wrong'}"
