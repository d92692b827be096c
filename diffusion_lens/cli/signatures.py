"""`diffusion-lens signatures` measures evidence, routes and gradients of facts that were trained in one direction."""

from typing import TYPE_CHECKING, Annotated

import typer

from diffusion_lens.cli import cost, options, ranges
from diffusion_lens.cli.app import app
from diffusion_lens.cli.extras import require
from diffusion_lens.cli.load_model import ModelChoice, default_folder, different_labels
from diffusion_lens.cli.report import Report, progress, save_figure
from diffusion_lens.cli.signatures_output import numbers_of, table
from diffusion_lens.cli.workers import WorkerChoice, failed_facts

if TYPE_CHECKING:
    from diffusion_lens.analysis.signatures import SignaturePlan
    from diffusion_lens.cost import Cost


@app.command()
def signatures(
    model: options.Model,
    against: Annotated[
        str | None,
        typer.Option(
            help="Another model for the same facts, such as the AR baseline: a name, a path, or another mode, NAME@ar."
        ),
    ] = None,
    out: options.OutNeeded = None,
    data: options.Data = None,
    trained: Annotated[
        str, typer.Option(help="Direction in which the facts were trained, p2d or d2p. They are queried in the other.")
    ] = "p2d",
    limit: Annotated[
        int | None,
        typer.Option(help="Largest number of pairs of facts, evenly spread.", callback=ranges.at_least(1)),
    ] = None,
    per_person: Annotated[
        int,
        typer.Option(
            help="Largest number of pairs for each person, in different wordings. Pairs of one person are not "
            "independent: intervals resample persons, so more pairs do not narrow them as more people do.",
            callback=ranges.at_least(1),
        ),
    ] = 1,
    length: Annotated[
        int | None,
        typer.Option(
            help="Number of positions of the canvas. Default: the training length of the model, or that of the data "
            "set if it is shorter. Where the former is unknown, a canvas ends with its sentence.",
            callback=ranges.at_least(1),
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Largest number of pairs computed together, which are each other's baseline of shuffled pairs; a pair "
            "alone would have none. In batches of 2, an odd number of pairs has one batch of 3. Default: as many as "
            "--max-bytes allows, at most 32.",
            callback=ranges.at_least(2),
        ),
    ] = None,
    max_bytes: options.BatchBytes = 2**30,
    workers: options.Workers = None,
    dask: options.Dask = None,
    slurm: options.Slurm = None,
    shard: options.Shard = None,
    merge: options.Merge = None,
    config: options.Config = None,
    tokenizer: options.Tokenizer = None,
    mode: options.Mode = None,
    block_size: options.BlockSize = None,
    mask_token_id: options.MaskTokenId = None,
    device: options.Device = None,
    dtype: options.Dtype = "float32",
    json: options.Json = False,
    dry_run: options.DryRun = False,
    flops: options.Flops = None,
) -> None:
    """Measure why a fact trained in one direction is, or is not, recalled in the other: evidence, routes, gradients.

    Each fact is a sentence as trained and the reverse question. The percentile ranks the right answer among the answers
    of all pairs. --config and --tokenizer are those of MODEL. OUT/MODEL contains one file per pair, so an interrupted
    run resumes, and --shard can split the work by batches.

    Example: diffusion-lens signatures site-mdm --against site-ar --limit 6 --out signatures
    """
    arguments = dict(locals())
    spread = WorkerChoice(workers, dask, slurm, device, merge)
    chosen = [ModelChoice(model, config, tokenizer, spread.device, dtype, mode, block_size, mask_token_id)]
    if against is not None:
        chosen.append(ModelChoice(against, device=spread.device, dtype=dtype))
    require("pictures")
    from diffusion_lens.analysis import ReversalSignatures, reversal_signatures
    from diffusion_lens.analysis.signatures import SignaturePlan
    from diffusion_lens.analysis.usable_facts import say_set_aside
    from diffusion_lens.cli.shards import require_model, require_parts, share_of_work
    from diffusion_lens.data.sources import default_source, open_source
    from diffusion_lens.records import require_same_settings
    from diffusion_lens.taught_pairs import LaidOutPairs, lay_out_pairs, pairs_in_common
    from diffusion_lens.taught_pairs.matching import OPPOSITE

    # 1. Read the facts, and check the options that need no model.
    if trained not in OPPOSITE:
        raise ValueError(f"--trained {trained!r}; it must be {' or '.join(OPPOSITE)}, the one direction of training")
    names = different_labels(chosen)
    out = out or default_folder("signatures", names)
    source = open_source(data or default_source(model), outline_only=dry_run)
    fact_pairs = source.fact_pairs(trained, per_person=per_person, limit=limit)
    lengths = [each.length(length, source.length if each.length(None) else None) for each in chosen]
    share_of_work(len(fact_pairs), shard, merge)
    require_parts(merge, names)

    # 2. Lay out the pairs of facts that all models can be given, without weights, if the texts are here.
    laid_out: dict[str, LaidOutPairs] = {}
    plans: dict[str, SignaturePlan] = {}
    if not merge and any(forward.prompt for forward, _ in fact_pairs):
        outlines = [each.without_weights(fetch=not dry_run) for each in chosen]
        known = {
            name: (outline, lay_out_pairs(outline, fact_pairs, length=own_length))
            for name, outline, own_length in zip(names, outlines, lengths, strict=True)
            if outline is not None
        }
        laid_out = pairs_in_common({name: pairs for name, (_, pairs) in known.items()}) if known else {}
        for name, (outline, _) in known.items():
            plan = SignaturePlan.of(outline, laid_out[name], batch_size=batch_size, max_bytes=max_bytes)
            described = {**plan.describe(), "model": outline.cfg.model_name} if len(known) == len(chosen) else {}
            require_same_settings(out / name, {**described, "dtype": dtype})
            plans[name] = plan
    n_pairs = len(next(iter(plans.values())).pairs) if plans else len(fact_pairs)
    effective = {"data": source.name, "facts": n_pairs, "lengths": lengths}
    report = Report("signatures", {**arguments, **effective}, out, json)

    # 3. For a dry run, print the cost.
    report.say(*spread.describe())
    if dry_run:
        n_own = share_of_work(n_pairs, shard, merge)
        limits = (batch_size, max_bytes)
        work = [
            _work(each, plans.get(each.label), own or 32, n_pairs, n_own, limits)
            for each, own in zip(chosen, lengths, strict=True)
        ]
        if not merge and len(plans) < len(chosen):
            report.say(f"{n_pairs} pairs at most: those that a tokenizer does not allow are set aside later")
        cost.show(report, list(zip(chosen, work, strict=True)), flops)

    # 4. Compute the signatures of each model, or join their shards.
    studies: list[ReversalSignatures] = []
    with spread.open(out) as executor:
        for each in chosen:
            if merge:
                study = ReversalSignatures.merge([folder / each.label for folder in merge])
                require_model(each, study.record)
            else:
                study = reversal_signatures(
                    each.load(on=spread.layout),
                    laid_out[each.label],
                    batch_size=batch_size,
                    max_bytes=max_bytes,
                    out=out / each.label,
                    shard=shard or "0/1",
                    progress=progress(),
                    executor=executor,
                )
                report.notes.extend(failed_facts(study))
            studies.append(study)
    if shard is not None:
        report.part_done(shard, sum(len(study.ids) for study in studies), out)

    # 5. Show the tables, and write the files.
    if studies[0].set_aside:
        report.say(say_set_aside(studies[0].set_aside))
    files = {}
    for name, study in zip(names, studies, strict=True):
        files[name] = study.save(out / f"{name}.safetensors")
        report.say(*table(study, trained))
    files["picture"] = save_figure(studies[0].plot(studies[1:]), out / "signatures.png")
    record = dict(studies[0].record)
    for study in studies[1:]:
        record["against"] = {key: value for key, value in study.record.items() if key != "facts"}
    report.finish(dict(zip(names, map(numbers_of, studies), strict=True)), record, **files)


def _work(
    model: ModelChoice,
    plan: "SignaturePlan | None",
    n_positions: int,
    n_pairs: int,
    n_own: int,
    limits: tuple[int | None, int],
) -> "Cost":
    """Cost of `n_own` of the pairs on one model.

    Args:
        plan: The study on this model, or `None` where it is not known yet: then each pair has its own answer.
        n_positions: Number of positions of a canvas, if there is no plan.
        limits: Size of a batch, and its bytes.
    """
    from diffusion_lens.analysis.signatures.batches import longest_canvas, plan_batches
    from diffusion_lens.cost import signatures as price_signatures

    cfg, n_candidates = cost.config_of(model), n_pairs
    if plan is not None:
        n_positions, n_candidates = longest_canvas(list(plan.pairs.values())), len(plan.candidates)
    n_together = max(map(len, plan_batches(cfg, n_positions, n_pairs, *limits, n_candidates)))
    return price_signatures(cfg, n_own, n_positions, n_together, n_candidates)
