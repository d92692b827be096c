"""`diffusion-lens denoise` and `recall`: what a model writes, and whether it is right."""

from functools import partial
from typing import TYPE_CHECKING

from diffusion_lens.cli import cost
from diffusion_lens.cli.load_model import ModelChoice, changed_canvases, default_folder
from diffusion_lens.cli.options import LENGTH_OF_STUDY, FactsOptions, command
from diffusion_lens.cli.report import EXTRAS, PictureReport, StudyReport, progress, require
from diffusion_lens.cli.workers import FactStudy, WorkerChoice
from diffusion_lens.settings import at_least, setting
from diffusion_lens.settings.shared import DenoiseFields, RecallFields

if TYPE_CHECKING:
    from diffusion_lens.denoising.trajectory import Trajectory
    from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer


@command()
def denoise(
    chosen: ModelChoice,
    run: DenoiseFields,
    report: PictureReport,
    prompt: str = setting(..., "Text to continue; a masked diffusion model also fills each [MASK] in it."),
    length: int | None = setting(
        None,
        "Number of positions of the canvas, including the prompt. Default: the training length, or 52 if it is "
        "unknown.",
        partial(at_least, 1),
    ),
    max_new_tokens: int | None = setting(
        None, "Number of masked positions after the prompt, instead of --length.", partial(at_least, 1)
    ),
    predictions: int | None = setting(
        None,
        "Number of likeliest tokens to record at every masked position of every step; OUT/predictions.png then shows "
        "the entropy. Default: none.",
        partial(at_least, 1),
    ),
) -> None:
    """Generate text by denoising a canvas, and show the canvas after each step that changed it.

    Example: diffusion-lens denoise site-mdm "Plerrick Baupling is the" --max-new-tokens 5 --steps 8 --out run
    """
    from diffusion_lens.data.fact_files import STUDY_LENGTH
    from diffusion_lens.denoising import DenoiseSettings, lay_out
    from diffusion_lens.denoising import denoise as run_denoising

    # 1. Check the settings before the model is loaded.
    if length is not None and max_new_tokens is not None:
        raise ValueError(
            "give length= (all positions) or max_new_tokens= (masked positions after the prompt), not both"
        )
    shape = chosen.known_shape()
    if length is None and max_new_tokens is None and shape is not None and shape.opens_blocks and shape.uniform_noise:
        max_new_tokens = shape.block_size  # canvases behind the prompt are whole
    if max_new_tokens is None:
        length = chosen.length(length) or STUDY_LENGTH
    else:
        chosen.check_length(max_new_tokens)
    settings = DenoiseSettings(**vars(run))
    if shape is not None:
        settings.on(shape, chosen.model)
    report.note(length=length)

    # 2. Refuse a folder of another run; for a dry run, print the cost.
    def written(loaded: "HookedDiffusionTransformer") -> "Trajectory":
        canvas = lay_out(loaded, prompt, length, max_new_tokens)
        shown = progress() and not report.dry_run
        return run_denoising(loaded, canvas, settings, predictions=predictions, progress=shown)

    report.begin()
    cost.dry_run(report, chosen, written, [prompt])

    # 3. Run the loop, and show each canvas that differs from the one before.
    trajectory = written(chosen.load())
    for step, words in changed_canvases(trajectory):
        report.say(f"{'start' if step < 0 else step:>5}  {words}")
    report.say(trajectory.text[0])

    # 4. Write the files.
    report.save("trajectory", trajectory)
    report.draw("picture", "denoising.png", trajectory.plot)
    if trajectory.recorded is not None:
        report.draw("picture of the predictions", "predictions.png", trajectory.recorded.plot)
    report.finish({"text": trajectory.text[0], "revealed_at": trajectory.revealed_at[0].tolist()}, trajectory.record)


@command(length=LENGTH_OF_STUDY)
def recall(
    given: FactsOptions,
    asked: RecallFields,
    spread: WorkerChoice,
    chosen: ModelChoice,
    report: StudyReport,
    score: str = setting("contained", "Score of the table: contained (SMDM's), exact, character_bleu or word_bleu."),
) -> None:
    """Measure recall in both directions at several numbers of denoising steps, next to the published numbers.

    The table shows both names of a cell: Berglund's files name the direction of training, SMDM's columns the direction
    of the question. OUT/replies contains one file per question, so an interrupted run resumes.

    Example: diffusion-lens recall site-mdm --length 16 --limit 5 --out recall
    """
    require(*({score} & set(EXTRAS)))
    from diffusion_lens.data.fact_files import STUDY_LENGTH
    from diffusion_lens.evaluation import Recall
    from diffusion_lens.evaluation.recall import cell_name, check_score
    from diffusion_lens.evaluation.recall_by_steps import RecallSettings, prompt_length, recall_by_steps

    # 1. Read the facts, and check the settings before the model is loaded.
    check_score(score)
    chosen, out = spread.placed(chosen), report.folder(default_folder("recall", [chosen.label]))
    source = given.source(chosen.model, report.dry_run)
    facts = source.pick(given.trained, given.asked, given.limit)
    length = chosen.length(asked.length, source.length) or STUDY_LENGTH
    cfg_scale = source.cfg_scale if asked.cfg_scale is None else asked.cfg_scale
    own = {"steps": asked.steps or source.steps, "length": length, "cfg_scale": cfg_scale}
    settings = RecallSettings(**{**vars(asked), **own})
    report.note(data=source.name, facts=len(facts), **own)

    # 2. Refuse a folder that holds another study; for a dry run, print the cost.
    study = FactStudy(
        chosen,
        out / "replies",
        partial(recall_by_steps, facts=facts, settings=settings),
        facts,
        settings,
        prepare=partial(prompt_length, length=length),
        together=settings.batch_size,
    )
    spread.plan([study], report)

    # 3. Let the model answer the facts, or join the shards.
    (result,) = spread.compute([study], Recall, report)

    # 4. Show the table, and write the files.
    report.say(result.to_text(score))
    report.save("recall", result)
    report.draw("picture", "recall.png" if score == "contained" else f"recall_{score}.png", partial(result.plot, score))
    table = {
        cell_name(*cell): {str(step): share._asdict() for step, share in row.items()}
        for cell, row in result.table(score).items()
    }
    report.finish(table, result.record)
