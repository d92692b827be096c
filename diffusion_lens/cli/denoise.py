"""`diffusion-lens denoise` and `recall`: what a model writes, and whether it is right."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusion_lens.cli import cost
from diffusion_lens.cli.load_model import ModelChoice, default_folder
from diffusion_lens.cli.options import (
    LENGTH_OF_STUDY,
    DenoiseOptions,
    FactsOptions,
    SamplerOptions,
    command,
    each_from_1,
)
from diffusion_lens.cli.report import EXTRAS, FolderReport, StudyReport, progress, require, save_figure
from diffusion_lens.cli.workers import WorkerChoice, describe_facts
from diffusion_lens.settings import at_least, check_seed, not_negative, setting

if TYPE_CHECKING:
    from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer


@command()
def denoise(
    chosen: ModelChoice,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue.")],
    run: DenoiseOptions,
    report: FolderReport,
    length: int | None = setting(
        None,
        "Number of positions of the canvas, including the prompt. Default: the training length, or 52 if it is "
        "unknown.",
        partial(at_least, 1),
    ),
    max_new_tokens: int | None = setting(
        None, "Number of masked positions after the prompt, instead of --length.", partial(at_least, 1)
    ),
) -> None:
    """Generate text by denoising a canvas, and show the canvas after each step that changed it.

    Example: diffusion-lens denoise site-mdm "Plerrick Baupling is the" --max-new-tokens 5 --steps 8 --out run
    """
    from diffusion_lens.data.fact_files import STUDY_LENGTH
    from diffusion_lens.denoising import denoise as run_denoising
    from diffusion_lens.denoising import lay_out

    # 1. Check the settings before the model is loaded.
    if length is not None and max_new_tokens is not None:
        raise ValueError(
            "give length= (all positions) or max_new_tokens= (masked positions after the prompt), not both"
        )
    if max_new_tokens is None:
        length = chosen.length(length) or STUDY_LENGTH
    else:
        chosen.check_length(max_new_tokens)
    settings = run.settings()
    if (shape := chosen.known_shape()) is not None:
        settings.on(shape, chosen.model)
    report.note(length=length, cfg_scale=settings.cfg_scale)
    if report.out is not None:
        require("pictures")

    # 2. For a dry run, print the cost.
    if report.dry_run:

        def job(network: "HookedDiffusionTransformer") -> None:
            run_denoising(network, lay_out(network, prompt, length, max_new_tokens), settings)

        cost.show(report, [(chosen, cost.planned(chosen, job, [prompt]))])

    # 3. Run the loop, and show each canvas that differs from the one before.
    loaded = chosen.load()
    trajectory = run_denoising(loaded, lay_out(loaded, prompt, length, max_new_tokens), settings, progress=progress())
    canvases = trajectory.str_canvases()
    n_given = int(trajectory.given[0].sum())
    for step, canvas in enumerate(canvases):
        if step == 0 or canvas != canvases[step - 1]:
            words = ["·" if word in ("[MASK]", "") else word for word in canvas[n_given:]]
            report.say(f"{'start' if step == 0 else step - 1:>5}  {' '.join(words)}")
    report.say(trajectory.text[0])

    # 4. Write the files.
    files: dict[str, Any] = {}
    if (out := report.out) is not None:
        files = {
            "trajectory": trajectory.save(out / "trajectory.safetensors"),
            "picture": save_figure(trajectory.plot(), out / "denoising.png"),
        }
    results: dict[str, Any] = {"text": trajectory.text[0], "revealed_at": trajectory.revealed_at[0].tolist()}
    report.finish(results, trajectory.record, **files)


@command()
def recall(
    given: FactsOptions,
    sampling: SamplerOptions,
    spread: WorkerChoice,
    chosen: ModelChoice,
    report: StudyReport,
    steps: list[int] | None = setting(
        None,
        "Number of denoising steps. Repeat the option for several. Default: those of the data set.",
        each_from_1,
    ),
    length: int | None = LENGTH_OF_STUDY,
    temperature: float = setting(
        0.0, "Sampling temperature. 0 selects the likeliest token.", partial(not_negative, zero="the likeliest token")
    ),
    score: str = setting("contained", "Score of the table: contained (SMDM's), exact, character_bleu or word_bleu."),
    seed: int = setting(1234, "Seed of the random number generator.", check_seed),
) -> None:
    """Measure recall in both directions at several numbers of denoising steps, next to the published numbers.

    The table shows both names of a cell: Berglund's files name the direction of training, SMDM's columns the direction
    of the question. OUT/replies contains one file per question, so an interrupted run resumes.

    Example: diffusion-lens recall site-mdm --length 16 --limit 5 --out recall
    """
    require("pictures", *({score} & set(EXTRAS)))
    from diffusion_lens.data.fact_files import STUDY_LENGTH
    from diffusion_lens.evaluation import Recall
    from diffusion_lens.evaluation.recall import cell_name
    from diffusion_lens.evaluation.recall_by_steps import RecallSettings, prompt_length, recall_by_steps
    from diffusion_lens.evaluation.scores import check_score
    from diffusion_lens.records.results import require_same_settings

    # 1. Read the facts, and check the settings before the model is loaded.
    check_score(score)
    chosen, out = spread.placed(chosen), report.folder(default_folder("recall", [chosen.label]))
    source = given.source(chosen.model, report.dry_run)
    facts = source.pick(given.trained, given.asked, given.limit)
    length = chosen.length(length, source.length) or STUDY_LENGTH
    cfg_scale = source.cfg_scale if sampling.cfg_scale is None else sampling.cfg_scale
    settings = RecallSettings(steps or source.steps, length, cfg_scale, sampling.sampler, temperature, seed)
    described = {**settings.describe_on(chosen.known_shape()), "dtype": chosen.dtype}

    # 2. Refuse a folder that holds another study; for a dry run, print the cost.
    n_facts = spread.share(len(facts))
    spread.require_parts("replies")
    if not spread.merge:
        if report.dry_run and (outline := chosen.without_weights()) is not None:
            described |= describe_facts(outline, facts, lambda fact: prompt_length(outline, fact, length))
        require_same_settings(out / "replies", described)
    report.note(data=source.name, facts=len(facts), steps=list(settings.steps), length=length, cfg_scale=cfg_scale)
    report.say(*spread.lines())
    if report.dry_run:
        some = cost.some_of(facts, 8)
        work = cost.planned(chosen, lambda network: recall_by_steps(network, some, settings), cost.texts_of(some))
        cost.show(report, [(chosen, work * (n_facts / len(some)))])

    # 3. Let the model answer the facts, or join the shards.
    with spread.open(out) as executor:

        def compute(loaded: Any, part: str) -> Recall:
            folder = out / "replies"
            return recall_by_steps(
                loaded, facts, settings, out=folder, shard=part, progress=progress(), executor=executor
            )

        result = spread.study(Recall, chosen, report, "replies", compute)
    if spread.shard is not None:
        report.part_done(spread.shard, len(result.facts))

    # 4. Show the table, and write the files.
    report.say(result.to_text(score))
    files: dict[str, Any] = {
        "recall": result.save(out / "recall.safetensors"),
        "picture": save_figure(result.plot(score), out / "recall.png"),
    }
    table = {
        cell_name(*cell): {str(step): share._asdict() for step, share in row.items()}
        for cell, row in result.table(score).items()
    }
    report.finish(table, result.record, **files)
