"""The table of `diffusion-lens signatures`, and its numbers for the JSON object."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusion_lens.analysis import ReversalSignatures

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


def table(study: "ReversalSignatures", trained: str) -> Iterator[str]:
    """The means over pairs, with a row for each layer."""
    from diffusion_lens.records import shown_model

    forward, reverse = study.probability.tolist()
    n_pairs = f"{len(study.ids)} pair{'s' if len(study.ids) > 1 else ''}"
    yield f"{shown_model(study.record)}: {n_pairs} trained {trained}, {len(study.candidates)} candidates"
    yield f"  p(answer): {forward:.3f} forward, {reverse:.3f} reverse"
    yield "         percentile                edge cut (nats)  route correlation  cosine of gradients (shuffled pairs)"
    yield (
        "  layer  forw. rev.  (other) reuse   forw.   rev.   measured counterf.  "
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


def numbers_of(study: "ReversalSignatures") -> dict[str, Any]:
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
