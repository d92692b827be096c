"""Python code that repeats a run and its analyses: of what the explorer computes, and from the records of results.

`{step}`, `{layer}`, `{head}`, `{position}` and `{name}` stand for the selection on a page, which fills them in. The
code of each view runs, and gives the numbers that the view shows. `Written` joins a value and its code, so that what
runs and what is shown cannot differ.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffusion_lens.denoising.samplers import SAMPLERS, describe_sampler, sampler_from
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.hooks.names import loop_hook

TOP_K = 5
LOGITS = loop_hook("hook_logits")
PATTERN = '"blocks.{layer}.attn.hook_pattern"'
EXPERTS = '"blocks.{layer}.mlp.hook_experts"'
WEIGHTS = ("diffusion_lens.records.results", "weights_sha256")  # module and name of the function that hashes them
TRACE_SCORES = "scores = trace.at_step({step}).scores  # [pos layer]"
_TRACE_SETTINGS = ("kind", "window", "severed", "corruption", "noise", "samples", "seed", "swap", "canvas")
_SHOWN = 16  # characters of the digest


@dataclass(frozen=True, eq=False)
class Written:
    """A value, the expression that makes it, and the imports (module, name) that the expression needs."""

    value: Any
    text: str
    imports: frozenset[tuple[str, str]] = frozenset()


def call(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Written:
    """The result of a call and its text. Arguments may be `Written`; keywords that are `None` are left out."""

    def written(x: Any) -> Written:
        return x if isinstance(x, Written) else Written(x, repr(x))

    given = [written(x) for x in arguments]
    named = {name: written(x) for name, x in keywords.items() if x is not None}
    value = function(*(x.value for x in given), **{name: x.value for name, x in named.items()})
    texts = [*(x.text for x in given), *(f"{name}={x.text}" for name, x in named.items())]
    own = frozenset({(function.__module__, function.__name__)})
    inner = (x.imports for x in (*given, *named.values()))
    return Written(value, f"{function.__name__}({', '.join(texts)})", own.union(*inner))


def import_lines(imports: Iterable[tuple[str, str]]) -> str:
    """The import statements of expressions, one for each module; a name that is empty imports the module itself."""
    by_module: dict[str, list[str]] = {}
    for module, name in sorted(imports):
        by_module.setdefault(module, []).append(name)
    plain = [f"import {module}" for module, names in by_module.items() if names == [""]]
    return "\n".join(
        [*plain, *(f"from {module} import {', '.join(names)}" for module, names in by_module.items() if names != [""])]
    )


def load_code(record: Mapping[str, Any], imports: Iterable[tuple[str, str]] = ()) -> str:
    """The statements that import `imports`, load the model of a record, and stop if its weights are not the recorded
    ones.

    A checkpoint of one's own and edited weights have the name of the published model, which is the one that is loaded.
    """
    dtype, mode, name = record.get("dtype", "float32"), record.get("mode"), record["model"]
    options = {"dtype": None if dtype == "float32" else dtype, "mode": mode, **record.get("loaded_with", {})}
    loaded = f"HookedDiffusionTransformer.from_pretrained({', '.join([repr(name), *_keywords(options)])})"
    needed, check = {("diffusion_lens", "HookedDiffusionTransformer"), *imports}, ""
    if weights := record.get("weights_sha256"):
        needed.add(WEIGHTS)
        check = f"\nassert {WEIGHTS[1]}(model).startswith({weights[:_SHOWN]!r}), 'the run was made with other weights'"
    return f"{import_lines(needed)}\n\nmodel = {loaded}{check}"


def _keywords(values: Mapping[str, Any]) -> list[str]:
    """Keyword arguments as code, without those that are `None`."""
    return [f"{name}={value!r}" for name, value in values.items() if value is not None]


class RunCode:
    """The code of one row of a recorded run.

    Hooks, and samplers of one's own, are objects of the program that made the run: the code of such a run loads the
    trajectory from the file that the program saves.
    """

    def __init__(self, trajectory: Trajectory, row: int) -> None:
        self.trajectory = trajectory.row(row)
        record = self.record = trajectory.record
        self.is_repeatable = (
            record["sampler"]["name"] in SAMPLERS and not record.get("hooks") and "replay" not in record
        )
        if not self.is_repeatable:
            chosen = f".row({row})" if len(trajectory) > 1 else ""
            self.run = (
                f"{load_code(record)}\n\n"
                "# The run had hooks or a sampler of its own, or replays another run. This file is the one that\n"
                '# trajectory.save("trajectory.safetensors") writes in the program that made the run.\n'
                "from diffusion_lens.denoising import Trajectory\n\n"
                f'trajectory = Trajectory.load("trajectory.safetensors"){chosen}'
            )
            return
        # A sampler is written by its name, or as an object if its settings differ from those of the name.
        sampler, imports = sampler_from(record["sampler"]), {("torch", "")}
        self._steps = _steps_argument(trajectory)
        self._arguments = self._written_arguments(repr(sampler.name))
        if describe_sampler(SAMPLERS[sampler.name]) != describe_sampler(sampler):
            self._arguments = self._written_arguments(repr(sampler))
            imports |= {("diffusion_lens.denoising.samplers", name) for name in ("Proposal", type(sampler).__name__)}
        self._loaded = f"{load_code(record, imports)}\n\n"
        first = self.trajectory.first_step
        branch = f".from_step({first})" if first else ""
        self.run = f"{self._loaded}trajectory = model.denoise({self._arguments}){branch}"

    def _written_arguments(self, sampler: str) -> str:
        """The arguments of `denoise`."""
        run, record = self.trajectory, self.record
        prompt = run.tokens.masked_fill(run.real & ~run.given, run.blank)
        tokens, given, real = (x[0].tolist() for x in (prompt, run.given, run.real))
        length = None
        if run.blank < 0:  # The text grows: the prompt ends where the text begins.
            n_given = max(i for i, is_given in enumerate(given) if is_given) + 1
            # Padding follows the text of a shorter row, which alone needs none.
            tokens, length = tokens[:n_given], max(i for i, is_real in enumerate(real) if is_real) + 1
        mask = [int(x) for x in real[: len(tokens)]]
        keywords = {
            "length": length,
            "steps": self._steps,
            "cfg_scale": record["cfg_scale"] or None,
            "temperature": record["temperature"] or None,
            "seed": [int(seed) for seed in run.record["seeds"]],
        }
        given_mask = [] if all(mask) else [f"attention_mask=torch.tensor([{mask}])"]
        return ", ".join([_tokens(tokens, run.blank), *_keywords(keywords), f"sampler={sampler}", *given_mask])

    def predictions(self, top_k: int) -> str:
        """What the steps of `trajectory` predicted, as an expression."""
        if self.is_repeatable or self.trajectory.recorded is None:
            return f"trajectory.predictions(model, top_k={top_k})"
        return "trajectory.predictions"

    def cached(self, names: str) -> str:
        """Makes `cache`, the activations of some hook points at one step; `names` is an expression."""
        if not self.is_repeatable:
            return f"{self.run}\n\n# Hooks are not part of a record: denoise_with_cache under them gives\n# {names}"
        return (
            f"{self._loaded}trajectory, cache = model.denoise_with_cache(\n    {self._arguments},\n"
            f"    names_filter={names}, steps_filter={{step}},\n)"
        )


def _steps_argument(trajectory: Trajectory) -> int | None:
    """The argument `steps` of `denoise`: of a sampler that hands predictions on, the steps of one canvas."""
    record = trajectory.record
    if record["sampler"]["name"] == "left_to_right":
        return None
    block = trajectory.state_at(trajectory.first_step).block if trajectory.handed is not None else None
    steps: int = record["steps"]
    return steps if block is None else block.steps_of_all(steps)


def _tokens(tokens: Sequence[int], blank: int) -> str:
    """A prompt as an expression: the ids, with the masked positions at its end by their number."""
    n_given = len(tokens)
    while n_given and tokens[n_given - 1] == blank:
        n_given -= 1
    rest = f", *[{blank}] * {len(tokens) - n_given}" if n_given < len(tokens) else ""
    return f"torch.tensor([[{', '.join(map(str, tokens[:n_given]))}{rest}]])"


def views_code(run: str, cached: Callable[[str], str], predictions: str) -> dict[str, str]:
    """The code of the views that need no other result: run, canvas after a step, predictions, attention, experts and
    self-conditioning.

    Args:
        run: Statements that make `trajectory`.
        cached: Function from an expression for hook points to statements that make their `cache` at a step.
        predictions: Expression for what the steps of `trajectory` predicted.
    """
    index = "{step} - trajectory.first_step + 1"
    return {
        "run": run,
        "canvas": f"{run}\n\n# the ids at each position after the step, and their texts\n"
        f"canvas = trajectory.canvases[{index}, 0]\nwords = trajectory.str_canvases()[{index}]",
        "predictions": f"from diffusion_lens.analysis import commitment\n{run}\n\n"
        f"predictions = {predictions}\n"
        "# [step pos], NaN or -1 where a step predicts nothing\n"
        "entropy, likeliest = predictions.entropy[:, 0], predictions.likeliest[:, 0]\n"
        "p = predictions.probabilities[:, 0]  # [step pos top]; the margin is p[..., 0] - p[..., 1]\n"
        "committed = commitment(predictions).committed_at[0]  # [pos]\n\n"
        "index = predictions.steps.index({step})\n"
        "top = [predictions.words.get(token) for token in predictions.tokens[index, 0, {position}].tolist()]\n"
        'print(list(zip(top, p[index, {position}].tolist())), entropy[index, {position}].item(), "nats")',
        "attention": f"{cached(PATTERN)}\npattern = cache[{{step}}][{PATTERN}][0, {{head}}]  # [query key]",
        "experts": f"{cached(EXPERTS)}\nexperts = cache[{{step}}][{EXPERTS}][0, {{position}}]  # best first",
        "conditioning": f"{run}\n\n# what the step reads of the prediction before it, at the positions of its block\n"
        "handed = trajectory.handed[{step} - trajectory.first_step]\n"
        "tokens, streak, finished = handed.likeliest[0], handed.streak[0], handed.finished[0]",
    }


def lens_statements(trajectory: Trajectory, lens: Any, row: int) -> str:
    """Statements that read `trajectory` at a step as a `LogitLens` did."""
    record, n_pos = lens.record, trajectory.tokens.shape[1]
    keywords = {
        "layers": None if lens.layers == list(range(record["architecture"]["n_layers"] + 1)) else lens.layers,
        "positions": None if lens.positions == list(range(trajectory.blank < 0, n_pos)) else lens.positions,
        "top_k": lens.top_tokens.shape[-1],
    }
    more, fitted = _targets(trajectory, lens, row), ""
    if record["translators"] is not None:
        more.append("translators=translators")
        fitted = "# translators: the maps of the tuned lens, fit_translators(...) or Translators.load(...)\n"
    return fitted + lens_call(more, **keywords)


def lens_call(more: Sequence[str] = (), **keywords: Any) -> str:
    """Statements that read `trajectory` at a step with a lens, and print what each layer predicts at a position.

    Args:
        more: Further arguments, as code.
    """
    arguments = ", ".join(["model", "trajectory", "steps=[{step}]", *more, *_keywords(keywords)])
    return (
        f"from diffusion_lens.analysis import logit_lens\n\nlens = logit_lens({arguments}).at_step({{step}})\n"
        "index = lens.positions.index({position})\n"
        "for layer, label in enumerate(lens.labels):\n"
        "    tokens = [lens.words[token] for token in lens.top_tokens[layer, 0, index].tolist() if token >= 0]\n"
        "    print(label, tokens, lens.top_probabilities[layer, 0, index].tolist())"
    )


def _targets(trajectory: Trajectory, lens: Any, row: int) -> list[str]:
    """The argument with the targets of a lens; none for the default."""
    if lens.record["targets"] != "at each position":
        return [f"targets={lens.record['targets']!r}"]
    ids, final = lens.targets[row, :, 0].tolist(), trajectory.tokens[0, lens.positions].tolist()
    is_default = all(token in (known, -1) for token, known in zip(ids, final, strict=True))
    return [] if is_default else [f"targets=torch.tensor([{ids}])"]


def trace_statements(traces: Mapping[str, Any]) -> str:
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


def saved_code(view: str, result: Any) -> str:
    """Statements that read a result, whose metric or facts are objects of the program that made it, from its file."""
    kind, record = type(result), result.record
    chosen = ".at_step({step})" if record.get("steps") and hasattr(result, "at_step") else ""
    return (
        f"from diffusion_lens.analysis import {kind.__name__}\n\n"
        "# The program that made the result writes this file by its method save.\n"
        f"result = {kind.__name__}.load({view + '.safetensors'!r}){chosen}\nprint(result.to_dataframe())"
    )


def query_statement(
    tokens: Sequence[int], subject: Sequence[int], answer_positions: Sequence[int], answer_tokens: Sequence[int]
) -> str:
    """The statement that makes `query`."""
    return (
        f"query = Query(\n    torch.tensor({list(tokens)}),\n    subject={tuple(subject)},\n"
        f"    answer_positions={tuple(answer_positions)},\n    answer_tokens={tuple(answer_tokens)},\n)\n"
    )


def _trace_settings(trace: Any) -> str:
    """The keywords of a trace that differ from the defaults, as code."""
    record = trace.record
    keywords = {name: record.get(name) for name in _TRACE_SETTINGS}
    keywords["canvas"] = None if keywords["canvas"] == "forced" else keywords["canvas"]
    n_pos, n_layers = len(record["query"]["tokens"]), record["architecture"]["n_layers"]
    keywords["layers"] = None if trace.layers == list(range(n_layers)) else trace.layers
    keywords["positions"] = None if len(trace.positions) >= n_pos else trace.positions
    return ", ".join(_keywords(keywords))
