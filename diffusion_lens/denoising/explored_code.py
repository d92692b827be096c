"""The Python code of each view of a trajectory's page: it runs, and gives the numbers that the view shows."""

from collections.abc import Mapping, Sequence
from typing import Any

from diffusion_lens.denoising.as_python import RunCode, call
from diffusion_lens.denoising.explored_results import TOP_K, Trace
from diffusion_lens.denoising.recording import Recording
from diffusion_lens.hook_names import loop_hook
from diffusion_lens.pages.views import Lens

PATTERN = '"blocks.{layer}.attn.hook_pattern"'
TRACE_SCORES = "scores = trace.at_step({step}).scores  # [pos layer]"
_TRACE_SETTINGS = ("kind", "window", "severed", "corruption", "noise", "samples", "seed", "swap", "canvas")


def run_code(code: RunCode) -> dict[str, str]:
    """The manifest's `python` of the run and of its canvas after a step."""
    return {"run": code.run, "canvas": f"{code.run}\n\n{canvas_statements()}"}


def canvas_statements() -> str:
    """Statements that read the canvas after a step of `trajectory`."""
    index = "{step} - trajectory.first_step + 1"
    return (
        "# the ids at each position after the step, and their texts\n"
        f"canvas = trajectory.canvases[{index}, 0]\nwords = trajectory.str_canvases()[{index}]"
    )


def alternatives_code(code: RunCode) -> str:
    """The likeliest tokens at the masked positions of a step, after guidance."""
    point = loop_hook("hook_logits")
    has_column = 0 <= code.trajectory.blank < code.record["architecture"]["d_vocab_out"]
    return f"{code.cached(repr(point))}\n{alternatives_statements(code.trajectory.blank if has_column else -1)}"


def alternatives_statements(unwritten: int) -> str:
    """Statements that read the likeliest tokens at a position from `cache`.

    Args:
        unwritten: Id of the logits that is never written, that of [MASK]; -1 for none.
    """
    without = f"ranked[:, {unwritten}] = -torch.inf  # [MASK] is never written\n" if unwritten >= 0 else ""
    return (
        "# Float[pos d_vocab_out], 0 where no token is proposed\n"
        f"logits = cache[{{step}}][{loop_hook('hook_logits')!r}][0].double()\n"
        f"ranked = logits.clone()\n{without}"
        f"top = ranked.topk({TOP_K}).indices\np = logits.softmax(dim=-1).gather(-1, top)\n"
        "print(list(zip(model.words(top[{position}].tolist()), p[{position}].tolist())))"
    )


def attention_code(code: RunCode) -> str:
    """The pattern of a head."""
    return f"{code.cached(PATTERN)}\n{attention_statements()}"


def attention_statements() -> str:
    """Statements that read the pattern of a head from `cache`."""
    return f"pattern = cache[{{step}}][{PATTERN}][0, {{head}}]  # [query key]"


def lens_code(code: RunCode, lens: Lens, row: int) -> str:
    """The lens at a step."""
    return f"{code.run}\n\n{lens_statements(code.trajectory, lens, row)}"


def lens_statements(trajectory: Recording, lens: Lens, row: int) -> str:
    """Statements that read `trajectory` at a step as a lens did."""
    record, n_pos = lens.record, trajectory.tokens.shape[1]
    keywords = {
        "layers": None if lens.layers == list(range(record["architecture"]["n_layers"] + 1)) else lens.layers,
        "positions": None if lens.positions == list(range(trajectory.blank < 0, n_pos)) else lens.positions,
        "top_k": lens.top_tokens.shape[-1],
    }
    more = [f"targets={targets}"] if (targets := _targets(trajectory, lens, row)) else []
    fitted = ""
    if record["translators"] is not None:
        more.append("translators=translators")
        fitted = "# translators: the maps of the tuned lens, fit_translators(...) or Translators.load(...)\n"
    return fitted + lens_call([*more], **keywords)


def lens_call(more: Sequence[str] = (), **keywords: Any) -> str:
    """Statements that read `trajectory` at a step with a lens, and print what each layer predicts at a position.

    Args:
        more: Further arguments, as code.
    """
    made = call("logit_lens", "model", "trajectory", "steps=[{step}]", *more, **keywords)
    return (
        f"from diffusion_lens.analysis import logit_lens\n\nlens = {made}.at_step({{step}})\n"
        "index = lens.positions.index({position})\n"
        "for layer, label in enumerate(lens.labels):\n"
        "    tokens = [lens.words[token] for token in lens.top_tokens[layer, 0, index].tolist() if token >= 0]\n"
        "    print(label, tokens, lens.top_probabilities[layer, 0, index].tolist())"
    )


def _targets(trajectory: Recording, lens: Lens, row: int) -> str:
    """The targets of a lens as an expression; empty for the default."""
    if lens.record["targets"] != "at each position":
        return repr(lens.record["targets"])
    ids, final = lens.targets[row, :, 0].tolist(), trajectory.tokens[0, lens.positions].tolist()
    is_default = all(token in (known, -1) for token, known in zip(ids, final, strict=True))
    return "" if is_default else f"torch.tensor([{ids}])"


def trace_code(code: RunCode, traces: Mapping[str, Trace]) -> str:
    """The traces at a step, by name."""
    return f"{code.run}\n\n{trace_statements(traces)}"


def trace_statements(traces: Mapping[str, Trace]) -> str:
    """Statements that trace `trajectory` at a step as the trace `{name}` was made."""
    one = next(iter(traces.values()))
    if (query := one.record.get("query")) is None:
        return "# The trace was saved by an earlier version, which did not record its query."
    settings = {name: _trace_settings(trace) for name, trace in traces.items()}
    if len({*settings.values()}) == 1:
        chosen, keywords = "", next(iter(settings.values()))
    else:
        listed = "".join(f"    {name!r}: dict({written}),\n" for name, written in settings.items())
        chosen, keywords = f"settings = {{\n{listed}}}\n", '**settings["{name}"]'
    return (
        "import torch\nfrom diffusion_lens import Query\nfrom diffusion_lens.analysis import trace_trajectory\n\n"
        f"{query_statement(**query)}{chosen}"
        f"trace = trace_trajectory(model, query, steps=[{{step}}], trajectory=trajectory, {keywords})\n{TRACE_SCORES}"
    )


def query_statement(
    tokens: Sequence[int], subject: Sequence[int], answer_positions: Sequence[int], answer_tokens: Sequence[int]
) -> str:
    """The statement that makes `query`."""
    return (
        f"query = Query(\n    torch.tensor({list(tokens)}),\n    subject={tuple(subject)},\n"
        f"    answer_positions={tuple(answer_positions)},\n    answer_tokens={tuple(answer_tokens)},\n)\n"
    )


def _trace_settings(trace: Trace) -> str:
    """The keywords of a trace that differ from the defaults, as code."""
    record = trace.record
    keywords = {name: record.get(name) for name in _TRACE_SETTINGS}
    keywords["canvas"] = None if keywords["canvas"] == "forced" else keywords["canvas"]
    n_pos, n_layers = len(record["query"]["tokens"]), record["architecture"]["n_layers"]
    keywords["layers"] = None if trace.layers == list(range(n_layers)) else trace.layers
    keywords["positions"] = None if len(trace.positions) >= n_pos else trace.positions
    return ", ".join(f"{name}={value!r}" for name, value in keywords.items() if value is not None)
