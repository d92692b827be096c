"""`diffusion-lens rome` and `compare`: keys and values of a fact, its edit, and keys and values of many facts."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusion_lens.cli import cost
from diffusion_lens.cli.load_model import LoadingOptions, ModelChoice, default_folder, different_labels, name_and_mode
from diffusion_lens.cli.options import LENGTH_OF_STUDY, SEED, FactOptions, FactsOptions, command
from diffusion_lens.cli.report import PictureReport, StudyReport, progress, require_folder
from diffusion_lens.cli.workers import FactStudy, WorkerChoice
from diffusion_lens.settings import at_least, pick_indices, pick_layer, setting
from diffusion_lens.settings.shared import CanvasFields, CompareSettings, ValueSettings, VectorFields

if TYPE_CHECKING:
    from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer


@command(n_masks=None)
def rome(
    given: FactOptions,
    layout: CanvasFields,
    search: ValueSettings,
    chosen: ModelChoice,
    report: PictureReport,
    layer: int = setting(..., "Layer whose MLP is read or edited."),
    target: str | None = setting(None, "New answer to write with an edit, e.g. ' famous miner of Tanmoor.'."),
    prefixes: int = setting(
        0,
        "Number of short texts, written by the model, to put before the prompt and average over, as in ROME.",
        partial(at_least, 0),
    ),
    seed: int = SEED,
    export: Path | None = setting(None, "Folder for the edited model, with --target."),
) -> None:
    """Compute the key k* at the last subject token and the value v* that makes the model give the answer.

    With --target, v* is computed for the new answer, and the command applies the rank-one edit and measures whether the
    edited model gives the new answer.

    Example: diffusion-lens rome site-ar --prompt "Plerrick Baupling plays" --subject "Plerrick Baupling"
    --answer " bassoon" --layer 1 --target " harp" --out rome
    """
    import torch

    from diffusion_lens.analysis import RankOneEdit, compute_key, edit_success
    from diffusion_lens.analysis.engine.layout import CanvasLayout
    from diffusion_lens.analysis.rome import Probe, lay_out_request, optimize_values, sample_prefixes

    # 1. Check the settings before the model is loaded.
    fact, length = given.fact(layout.occurrence, target), chosen.length(layout.length)
    if (shape := chosen.known_shape()) is not None:
        pick_layer(layer, shape.n_layers)
    if export is not None and target is None:
        raise ValueError("--export writes an edited model and needs --target; without it nothing is edited")
    if export is not None:
        require_folder(export, "--export")
    laid_out = CanvasLayout(length, first_tokens=layout.first_tokens)
    report.note(length=length)

    def searched(loaded: "HookedDiffusionTransformer", prefix_texts: Sequence[str]) -> Any:
        """Lay out the request, and compute key and value; with a target, also the probe of both answers."""
        request = lay_out_request(loaded, fact, prefix_texts, laid_out)
        probe = None
        if target is not None:
            probe = Probe(request[0], lay_out_request(loaded, replace(fact, answer=given.answer), [], laid_out)[0])
        if report.dry_run:  # The model has yet to write the texts before the prompt.
            request = [request[0]] * (1 + prefixes)
        at = layer % loaded.cfg.n_layers
        key = compute_key(loaded, request, at)
        shown = progress() and not report.dry_run
        return request, probe, key, optimize_values(loaded, [request], at, settings=search, progress=shown)[0]

    # 2. Refuse a folder of another run; for a dry run, print the cost.
    report.begin()
    cost.dry_run(report, chosen, partial(searched, prefix_texts=[]), [*cost.texts_of([fact]), given.answer])

    # 3. Compute key and value.
    loaded = chosen.load()
    layer %= loaded.cfg.n_layers
    prefix_texts = sample_prefixes(loaded, [5] * prefixes, seed=seed) if prefixes else []
    request, probe, key, value = searched(loaded, prefix_texts)
    answer_text = loaded.to_string(torch.tensor(request[0].answer_tokens)).strip()
    report.say(
        f"k* at layer {layer}, position {request[0].subject[1] - 1}: norm {key.vector.norm():.3f}",
        f"v*: p({answer_text}) {value.probability_before:.4f} becomes {value.probability_after:.4f} in "
        f"{len(value.losses)} iterations, loss {value.losses[0, 0]:.3f} becomes {value.losses[-1, 0]:.3f}",
    )
    results: dict[str, Any] = {
        "before": value.probability_before,
        "after": value.probability_after,
        "losses": value.losses.tolist(),
    }
    report.save("key", key)
    report.save("value", value)
    report.draw("picture", "losses.png", value.plot)

    # 4. With a target, apply the edit, and compare the new answer with the old one.
    if probe is not None:
        edit = RankOneEdit(loaded, layer, key, value)
        success = edit_success(loaded, edit, {"efficacy": [probe]})
        efficacy = success.table()["efficacy"]
        report.say(
            f"edit: p({answer_text}) {efficacy.probability_before:.4f} becomes {efficacy.probability_after:.4f}; it is "
            f"{'now above' if efficacy.after else 'still below'} p({given.answer.strip()})"
        )
        results["efficacy"] = efficacy.after
        report.save("edit", success)
        if export is not None:
            with edit:
                report.files["edited_model"] = loaded.save_pretrained(export)
    report.finish(results, value.record)


@command(asked=None, n_masks=None, occurrence=None, length=LENGTH_OF_STUDY)
def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="One or several models: published names (see `diffusion-lens models`), files, folders, or hub "
            "repositories. NAME@block and NAME@ar are two modes of one checkpoint.",
        ),
    ],
    given: FactsOptions,
    studied: VectorFields,
    layout: CanvasFields,
    compared: CompareSettings,
    spread: WorkerChoice,
    loading: LoadingOptions,
    report: StudyReport,
    vectors: str = setting("keys", "Vectors to compare: keys, values or outputs."),
    against: str | None = setting(None, "Vectors of the other direction: keys, values or outputs. Default: --vectors."),
    statistic: str = setting(
        "cka",
        "Statistic to print and draw: cka or procrustes; for vectors of one kind also cosine, centred_cosine, "
        "retrieval or subspace.",
    ),
) -> None:
    """Compare keys and values of both directions, paired by person. Are facts encoded symmetrically?

    OUT/MODEL contains one file per fact, so an interrupted run resumes, and --shard can split the work.

    Example: diffusion-lens compare site-mdm site-ar --length 16 --layer 0 --limit 7 --statistic cka --resamples 19
    --out compare
    """
    from diffusion_lens.analysis import KeyValueStudy, key_value_study
    from diffusion_lens.analysis.engine.layout import say_set_aside
    from diffusion_lens.analysis.representations import require_facts, statistics
    from diffusion_lens.analysis.rome.key_value_study import DIRECTIONS, KeyValueSettings, check_vectors

    # 1. Check the options that need neither data nor a model; the vectors take long to compute.
    loading = replace(loading, device=spread.model_device)
    several = len(models) > 1
    chosen = [
        loading.of(name, mode or loading.mode, beside=several and mode is not None)
        for name, mode in map(name_and_mode, models)
    ]
    names = different_labels(chosen)
    out = report.folder(default_folder("compare", names))
    for name in (vectors, against or vectors):
        check_vectors("vectors", name)
    available = statistics(rank=2, one_space=(against or vectors) == vectors)
    if statistic not in available:
        raise ValueError(
            f"statistic {statistic!r} is not computed of {vectors}; it must be one of {', '.join(available)}"
        )
    for shape in filter(None, (model.known_shape() for model in chosen)):
        pick_indices("layers", studied.layers, shape.n_layers)

    # 2. Read the facts, and lay out the study of each model.
    source = given.source(models[0], report.dry_run)
    facts = source.pick(given.trained, limit=given.limit)
    lengths = [model.length(layout.length, source.length) for model in chosen]
    forward, reverse = ({fact.person for fact in facts if fact.asked == asked} for asked in DIRECTIONS)
    require_facts(len(forward & reverse), compared.rank)
    report.note(data=source.name, facts=len(facts), lengths=lengths)

    # 3. Refuse a folder that holds another study; for a dry run, print the cost.
    studies = []
    for model, own_length in zip(chosen, lengths, strict=True):
        settings = KeyValueSettings(**{**vars(layout), "length": own_length, **vars(studied)})
        compute = partial(key_value_study, facts=facts, settings=settings)
        studies.append(FactStudy(model, out / model.label, compute, facts, settings, settings.request))
    spread.plan(studies, report, "models", "rank", "resamples", "seed")

    # 4. Compute the vectors of each model, or join their shards, and compare both directions.
    axes: Any = None
    sides = f"{vectors}_{against}" if against else vectors
    results = {}
    computed = spread.compute(studies, KeyValueStudy, report)
    for name, study in zip(names, computed, strict=True):
        comparisons = study.compare(vectors, against, progress=progress(), settings=compared)
        if study.record["set_aside"]:
            report.say(f"{name}: {say_set_aside(study.record['set_aside'])}")
        report.save(name, comparisons, f"{name}_{sides}")
        n_people = len(next(iter(comparisons.at.values())).ids)
        report.say(f"{name}: {vectors}, {n_people} people queried in both directions")
        results[name] = comparisons.table(statistic)
        for layer, row in results[name].items():
            report.say(
                f"  layer {layer}: {statistic} {row['value']:.3f} ({row['low']:.3f} to {row['high']:.3f}), "
                f"by chance {row['chance_low']:.3f} to {row['chance_high']:.3f}, p {row['p']:.3f}"
            )
        axes = comparisons.plot(statistic, ax=axes, label=name, title=f"{vectors} of a person, both directions")

    # 5. Write the figure and the record.
    report.draw("picture", f"{sides}_{statistic}.png", lambda: axes)
    report.finish(results, computed[-1].record)
