"""`diffusion-lens signatures` measures evidence, routes and gradients of facts that were trained in one direction."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from diffusion_lens.cli import cost
from diffusion_lens.cli.load_model import ModelChoice, default_folder, different_labels
from diffusion_lens.cli.options import FactsOptions, command
from diffusion_lens.cli.report import StudyReport
from diffusion_lens.cli.workers import ModelStudy, WorkerChoice
from diffusion_lens.settings import at_least, setting
from diffusion_lens.settings.shared import SignatureSettings

if TYPE_CHECKING:
    from diffusion_lens.analysis import ReversalSignatures
    from diffusion_lens.analysis.planned_work import PlannedWork
    from diffusion_lens.facts.taught_pairs import TaughtPair
    from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer

# Matrices whose gradients the table shows by layer, and those outside the blocks, with their usual names.
IN_BLOCKS = {"V": "attn.v", "O": "attn.o", "down": "mlp.down", "Q": "attn.q"}
OUTSIDE = {"W_E": "embed.weight", "W_U": "unembed.weight"}
MEANS = (
    "evidence_percentile",
    "shuffled_percentile",
    "evidence_reuse",
    "edge_cut",
    "route_correlation",
    "counterfactual_correlation",
    "probability",
)


@command(asked=None, limit="Largest number of pairs of facts, evenly spread.")
def signatures(
    given: FactsOptions,
    studied: SignatureSettings,
    spread: WorkerChoice,
    chosen: ModelChoice,
    report: StudyReport,
    against: str | None = setting(
        None, "Another model for the same facts, such as the AR baseline: a name, a path, or another mode, NAME@ar."
    ),
    trained: str = setting(
        "p2d", "Direction in which the facts were trained, p2d or d2p. They are queried in the other."
    ),
    per_person: int = setting(
        1,
        "Largest number of pairs for each person, in different wordings. Pairs of one person are not independent: "
        "intervals resample persons, so more pairs do not narrow them as more people do.",
        partial(at_least, 1),
    ),
    length: int | None = setting(
        None,
        "Number of positions of the canvas. Default: the training length of the model, or that of the data set if it "
        "is shorter. Where the former is unknown, a canvas ends with its sentence.",
        partial(at_least, 1),
    ),
) -> None:
    """Measure why a fact trained in one direction is, or is not, recalled in the other: evidence, routes, gradients.

    Each fact is a sentence as trained and the reverse question. The percentile ranks the right answer among the answers
    of all pairs. --config and --tokenizer are those of MODEL. OUT/MODEL contains one file per pair, so an interrupted
    run resumes, and --shard can split the work by batches.

    Example: diffusion-lens signatures site-mdm --against site-ar --limit 6 --out signatures
    """
    models = [spread.placed(chosen)]
    if against is not None:
        models.append(ModelChoice(against, device=models[0].device, dtype=chosen.dtype))
    from diffusion_lens.analysis import ReversalSignatures, reversal_signatures
    from diffusion_lens.analysis.engine.layout import say_set_aside
    from diffusion_lens.analysis.signatures import SignaturePlan
    from diffusion_lens.facts.taught_pairs import OPPOSITE, lay_out_pairs, pairs_in_common
    from diffusion_lens.records.results import require_same_settings

    # 1. Read the facts, and check the options that need no model.
    if trained not in OPPOSITE:
        raise ValueError(f"--trained {trained!r}; it must be {' or '.join(OPPOSITE)}, the one direction of training")
    names = different_labels(models)
    out = report.folder(default_folder("signatures", names))
    source = given.source(chosen.model, report.dry_run)
    fact_pairs = source.fact_pairs(trained, per_person=per_person, limit=given.limit)
    lengths = [each.length(length, source.length if each.length(None) else None) for each in models]
    spread.share(len(fact_pairs))
    spread.require_parts(*names)

    # 2. Lay out the pairs of facts that all models can be given, without weights, if the texts are here.
    laid_out: dict[str, Any] = {}
    plans: dict[str, SignaturePlan] = {}
    if not spread.merge and any(forward.prompt for forward, _ in fact_pairs):
        outlines = [each.without_weights(fetch=not report.dry_run) for each in models]
        known = {
            name: (outline, lay_out_pairs(outline, fact_pairs, length=own_length))
            for name, outline, own_length in zip(names, outlines, lengths, strict=True)
            if outline is not None
        }
        laid_out = pairs_in_common({name: pairs for name, (_, pairs) in known.items()}) if known else {}
        for name, (outline, _) in known.items():
            plan = SignaturePlan.of(outline, laid_out[name], studied)
            described = {**plan.describe(), "model": outline.cfg.model_name} if len(known) == len(models) else {}
            require_same_settings(out / name, {**described, "dtype": chosen.dtype})
            plans[name] = plan
    n_pairs = len(next(iter(plans.values())).pairs) if plans else len(fact_pairs)
    report.note(data=source.name, facts=n_pairs, lengths=lengths)

    # 3. Refuse a folder of another run; for a dry run, print the cost.
    report.begin(["against"])
    report.say(*spread.lines())
    if report.dry_run:
        n_own = spread.share(n_pairs)
        work = [
            _planned(each, laid_out.get(each.label) or _invented(n_pairs, own or 32), n_own, studied)
            for each, own in zip(models, lengths, strict=True)
        ]
        if not spread.merge and len(plans) < len(models):
            report.say(f"{n_pairs} pairs at most: those that a tokenizer does not allow are set aside later")
        cost.show(report, list(zip(models, work, strict=True)))

    # 4. Compute the signatures of each model, or join their shards.
    todo = [
        ModelStudy(each, out / name, partial(reversal_signatures, settings=studied, pairs=laid_out.get(name, [])))
        for name, each in zip(names, models, strict=True)
    ]
    studies = spread.compute(todo, ReversalSignatures, report)

    # 5. Show the tables, and write the files.
    if studies[0].set_aside:
        report.say(say_set_aside(studies[0].set_aside))
    for name, study in zip(names, studies, strict=True):
        report.save(name, study)
        report.say(*_table(study, trained))
    report.draw("picture", "signatures.png", partial(studies[0].plot, studies[1:]))
    record = dict(studies[0].record)
    for study in studies[1:]:
        record["against"] = {key: value for key, value in study.record.items() if key != "facts"}
    report.finish(dict(zip(names, map(_numbers, studies), strict=True)), record)


def _table(study: "ReversalSignatures", trained: str) -> Iterator[str]:
    """The means over pairs, with a row for each layer."""
    from diffusion_lens.records.results import shown_model

    forward, reverse = study.probability.tolist()
    n_pairs = f"{len(study.ids)} pair{'s' if len(study.ids) > 1 else ''}"
    yield f"{shown_model(study.record)}: {n_pairs} trained {trained}, {len(study.candidates)} candidates"
    yield f"  p(answer): {forward:.3f} forward, {reverse:.3f} reverse"
    yield "         percentile                edge cut (nats)  route correlation  cosine of gradients (shuffled pairs)"
    yield (
        "  layer  forw. rev.    (all) reuse   forw.   rev.   measured counterf.  "
        + "".join(f"{label:14}" for label in IN_BLOCKS).rstrip()
    )
    cosines, undefined = study.gradient_cosine, [None] * study.reuses.shape[1]
    routes = [
        undefined if each is None else each.tolist()
        for each in (study.route_correlation, study.counterfactual_correlation)
    ]
    percentiles, of_others = study.evidence_percentile.T.tolist(), study.shuffled_percentile[1].tolist()
    cuts = study.edge_cut.T.tolist()
    for layer, reuse in enumerate(study.evidence_reuse.tolist()):
        of_layer = [cosines[f"blocks.{layer}.{name}.weight"] for name in IN_BLOCKS.values()]
        cells = [
            *(f"{_number(value, '.2f'):>5}" for value in percentiles[layer]),
            f"({_number(of_others[layer], '.2f'):>4}) {_number(reuse, '.2f'):>6}",
            *(f"{_number(value, '+.3f'):>7}" for value in cuts[layer]),
            *(f"{_number(each[layer], '.2f'):>8}" for each in routes),
        ]
        yield f"  {layer:5}  {' '.join(cells)}   {' '.join(f'{_pair(*each):13}' for each in of_layer)}".rstrip()
    if study.route_correlation is None:
        yield "  routes, and the cut edge of the forward sentence, are undefined: the reader does not see the source"
    elif study.isotropic_correlation is None:
        yield "  routes of isotropic queries and keys: not predicted, because positions are not rotary"
    else:
        yield f"  routes of isotropic queries and keys: correlation {study.isotropic_correlation:.2f} in every layer"
    outside = [f"{label} {_pair(*cosines[name])}" for label, name in OUTSIDE.items() if name in cosines]
    yield f"  cosine of gradients outside the blocks: {', '.join(outside)}"
    predicted, measured = study.first_order
    yield (
        "  a step that lowers the forward loss by 0.1% changes the reverse loss by "
        f"{predicted:+.2e} nats as predicted to first order, "
        + (f"not measured in {study.record['dtype']}" if math.isnan(measured) else f"{measured:+.2e} as measured")
    )


def _number(value: float | None, form: str) -> str:
    """A number, or a dash where it is undefined."""
    if value is None or math.isnan(value):
        return "-"
    text = f"{value:{form}}"
    return text if float(text) else f"{0:{form}}"  # without the sign of a rounded zero


def _pair(own: float, shuffled: float) -> str:
    return f"{_number(own, '.2f')} ({_number(shuffled, '.2f')})"


def _numbers(study: "ReversalSignatures") -> dict[str, Any]:
    """All means for the JSON object, with the ends of their intervals."""
    numbers: dict[str, Any] = {
        "facts": len(study.ids),
        "set_aside": study.set_aside,
        "candidates": study.candidates,
        "isotropic_correlation": study.isotropic_correlation,
    }
    for name in MEANS:
        mean = getattr(study, name)
        numbers[name] = None
        if mean is not None:
            low, high = study.interval(name)
            numbers[name] = {"mean": mean.tolist(), "low": low.tolist(), "high": high.tolist()}
    named: dict[str, dict[str, Any]] = {
        "gradient_cosine": study.gradient_cosine,
        "transfer": study.transfer,
        "first_order": dict(zip(("predicted", "measured"), study.first_order, strict=True)),
    }
    for name, means in named.items():
        ends = (end.tolist() for end in study.interval(name))
        numbers[name] = {
            of: {"mean": mean, "low": low, "high": high}
            for (of, mean), low, high in zip(means.items(), *ends, strict=True)
        }
    return numbers


def _planned(model: ModelChoice, given: Any, n_own: int, studied: SignatureSettings) -> "PlannedWork":
    """The work of `n_own` of the pairs on one model, of which one batch runs.

    Args:
        given: The pairs on this model's canvases, or a function from the model to invented ones.
    """
    from diffusion_lens.analysis import reversal_signatures
    from diffusion_lens.analysis.signatures import SignaturePlan
    from diffusion_lens.analysis.signatures.evidence import longest_canvas, pair_bytes

    n_together, n_bytes = 1, 0

    def job(network: "HookedDiffusionTransformer") -> None:
        nonlocal n_together, n_bytes
        pairs = given(network) if callable(given) else given
        plan = SignaturePlan.of(network, pairs, studied)
        n_together = len(plan.batches[0])
        most = max(map(len, plan.batches))
        positions = longest_canvas(list(plan.pairs.values()))
        n_bytes = most * pair_bytes(network.cfg, positions, most, len(plan.candidates))
        reversal_signatures(network, pairs, settings=studied, shard=(0, len(plan.batches)))

    work = cost.planned(model, job) * (1 / n_together) * n_own
    return replace(work, batch_bytes=n_bytes)


def _invented(n_pairs: int, n_positions: int) -> "Callable[[HookedDiffusionTransformer], list[TaughtPair]]":
    """Pairs of canvases of this length, each with its own answer, that stand for those of an unknown tokenizer."""
    import torch

    from diffusion_lens.facts.taught_pairs import TaughtCanvas, TaughtPair

    def pairs_of(network: "HookedDiffusionTransformer") -> "list[TaughtPair]":
        rows = network.readout.rows(torch.tensor([n_positions - 1, 1])).tolist()
        tokens = torch.full((2, n_positions), 3)
        if network.cfg.has_mask:
            tokens[0, -1] = network.cfg.blank
            tokens[1, 1] = network.cfg.blank
        return [
            TaughtPair(TaughtCanvas(tokens[0], rows[0], i, 0), TaughtCanvas(tokens[1], rows[1], i, n_positions - 1))
            for i in range(n_pairs)
        ]

    return pairs_of
