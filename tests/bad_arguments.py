"""Bad arguments of public functions: one argument of a good call after the other is replaced, and the end is judged.

    python tests/bad_arguments.py [calls, or 0 for all] [seed] [word in the names of the functions]

prints the faults and, as the last line, a table of JSON: the number of calls, of refusals by the package, of values
that were taken, and of each fault. A refusal is the package's own if one of its `raise` statements ended the call, and
"unnamed" if it contains neither the argument's name nor the value.
"""

import contextlib
import dis
import importlib
import inspect
import json
import math
import os
import pkgutil
import random
import re
import resource
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interrupted import Law
from random_dictionaries import Identity

import diffusion_lens
from diffusion_lens import HookedDiffusionTransformer, analysis, interventions
from diffusion_lens.analysis import rome
from diffusion_lens.data import EditRequest, toy_facts
from diffusion_lens.evaluation import RecallSettings
from diffusion_lens.training import TrainingConfig

ROOT = Path(diffusion_lens.__file__).parents[1]
OURS = tuple(str(ROOT / name) for name in ("diffusion_lens", "weight_conversion"))
REFUSALS = (TypeError, ValueError, LookupError, FloatingPointError, MemoryError, OSError)
SECONDS = 10  # after which a call hangs; the slowest good one takes one
BYTES = 3 * 2**30  # that a call may take beside what the process has


def fails(*_: object) -> object:
    raise ArithmeticError("a function of the user failed")


# Clipping is off, and one text has no spread.
DOCUMENTED = {
    ("TrainingConfig", "clip", "inf"),
    ("dictionary_loss", "texts", "no"),
    ("dictionary_loss", "texts", "'x'"),
}
CHANGE_THE_MODEL = {"train", "finetune", "model.enable_compatibility_mode"}


class Failing:
    def __init__(self, *_: object) -> None:
        fails()


VALUES: dict[str, Callable[[], Any]] = {
    **{repr(value): lambda value=value: value for value in (None, "x", "", b"", 3, -1, 10**9, True, 0.5, 1e308, 1j)},
    **{str(value): lambda value=value: value for value in (math.nan, math.inf, -math.inf)},
    **{repr(value): lambda value=value: type(value)(value) for value in ([], ["x"], [0.5], {}, {"a": 1}, {1: 2})},
    "no": lambda: "no",
    "[nan]": lambda: [math.nan],
    "(2, 3)": lambda: (2, 3),
    "10**400": lambda: 10**400,
    "object": object,
    "a class": lambda: Failing,
    "lambda": lambda: lambda *_: None,
    "failing function": lambda: fails,
    "generator": lambda: (each for each in (object(),)),
    "array of floats": lambda: np.ones(3),
    "array of texts": lambda: np.array(["a", "b"]),
    "complex scalar": lambda: np.complex128(1j),
    "float tensor": lambda: torch.ones(2, 3),
    "empty tensor": lambda: torch.empty(0),
    "deep tensor": lambda: torch.zeros(1, 1, 1, 1, dtype=torch.int64),
    "huge tokens": lambda: torch.full((1, 3), 10**9),
    "bool tensor": lambda: torch.tensor(True),
    "path": lambda: Path("missing"),
    "surrogate": lambda: "\ud800",
    "the model": lambda: WORLD["model"],
    "a fact": lambda: WORLD["fact"],
    "[a fact]": lambda: [WORLD["fact"]],
}


# Not doors of users: parts of figures and pages, which results draw with their own numbers, and parts of loading.
INSIDE = re.compile(
    r"\.(plots|pages|loading|cli|step_hooks)\.|fitting_samplers|pair_bytes|explorer\.explore|Direction|Dictionary$"
)
# Methods of the model and of what it returns, beside the functions and classes that `__all__` lists.
METHODS = {
    "model": "canvas denoise denoise_with_cache generate run_with_hooks run_with_cache add_hook hooks loss_fn hide "
    "enable_compatibility_mode save_pretrained to_tokens to_string to_str_tokens to_single_token at_time",
    "fact": "to_query",
    "trajectory": "replay row repeat from_step state_at diff plot to_html str_canvases save explore",
    "cache": "stack save",
    "trace": "plot save",
    "lens": "plot at_step first_layer",
    "average": "plot ate_interval aie_interval",
    "comparison": "interval chance table plot",
    "predictions": "read to_jsonl plot",
    "mind": "early_commit plot",
}
_FACT = toy_facts.load().facts("p2d", "p2d")[0]
_REQUESTS = [EditRequest(_FACT, replace(_FACT, answer=" the"), (), ())]
# Arguments of good calls beside those of `WORLD`, so that the calls are quick.
QUICK: dict[str, dict[str, Any]] = {
    "causal_trace": dict(noise=0.5, samples=2),
    "temporal_effect": dict(noise=0.5, samples=2, steps=[0]),
    "trace_trajectory": dict(noise=0.5, samples=2, steps=[0]),
    "average_indirect_effect": dict(noise=0.5, samples=2, known="all"),
    "average_run_graph": dict(
        facts=toy_facts.load().facts("p2d", "p2d")[:10:5], points=2, loop=analysis.LoopSettings(steps=2)
    ),
    "average_trajectory_effect": dict(noise=0.5, samples=2, known="all", loop=analysis.LoopSettings(steps=2)),
    "recalled_facts": dict(loop=analysis.LoopSettings(steps=2)),
    "compare": dict(resamples=5),
    "compare_along": dict(resamples=5),
    "optimize_value": dict(steps=1),
    "optimize_values": dict(requests=[], settings=analysis.ValueSettings(steps=1)),
    "key_value_study": dict(layers=[1], search=analysis.ValueSettings(steps=1)),
    "study_keys_and_values": dict(settings=analysis.KeyValueSettings(layers=[1])),
    "memit": dict(settings=analysis.ValueSettings(steps=1)),
    "edit_study": dict(requests=_REQUESTS, settings=analysis.EditSettings(1, search=analysis.ValueSettings(steps=1))),
    "memit_study": dict(
        requests=_REQUESTS, settings=analysis.MemitSettings([1], search=analysis.ValueSettings(steps=1))
    ),
    "check_model": dict(only=["padding"]),
    "sample_prefixes": dict(lengths=[1]),
    "Fact": dict(subject="Gustav Geisser"),
    "recall_facts": dict(settings=RecallSettings(steps=[1])),
    "recall_by_steps": dict(steps=[1]),
    "replace": dict(value=torch.zeros(64)),
    "restore": dict(value=torch.zeros(1, 1, 64), positions=torch.tensor([1])),
    "Query": dict(tokens=torch.tensor([5, 6, 7])),
    "StateBank": dict(queries=(diffusion_lens.Query(torch.tensor([5, 6, 7]), (0, 1), (2,), (5,)),)),
    "TrainingConfig": dict(steps=1),
    "while_predicting": dict(readout="shifted"),
    "run_with_hooks": dict(input="the"),
    "run_with_cache": dict(input="the"),
    "to_tokens": dict(input="the"),
    **{
        name: dict(path="missing.json")
        for name in ("bake", "counterfact", "known_1000", "parent_child", "poem_pairs", "read_facts")
    },
    "save": dict(path="saved.safetensors"),
    "calibration": dict(right=lambda predictions: torch.arange(predictions.written.shape[1])[None] % 2 == 0),
    "reveal_order": dict(permutations=10),
    "read": dict(source={"written": [1, 2], "steps": [{"pos": [1], "tokens": [[2]]}]}),
    "monte_carlo_nll": dict(samples=2),
    "nll_by_order": dict(n_orders=2),
    "fit_translators": dict(iterations=2),
    "denoise": dict(max_new_tokens=2, steps=2),
    "denoise_with_cache": dict(max_new_tokens=2, steps=2),
    "generate": dict(prompt="the", max_new_tokens=2, steps=2),
    "adapt": dict(rank=0, n_texts=2, length=4, longest_prompt=1, crop=1, steps=1, batch_size=2),
}


def build() -> dict[str, Any]:
    """Good values by the name of an argument."""
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    data = toy_facts.load()
    facts = data.facts("p2d", "p2d")[:3]
    alike = [each for each in data.facts("p2d", "p2d") if len(model.to_str_tokens(each.prompt)) == 5][:2]
    fact, query, corrupted = facts[0], *(each.to_query(model) for each in alike)
    trajectory, cache = model.denoise_with_cache(
        fact.prompt, names_filter="ln_final.hook_normalized", max_new_tokens=2, steps=2
    )
    predictions = trajectory.predictions(model, 2)
    tokens, metric = model.to_tokens(fact.prompt), analysis.answer_probability(model, query)
    noisy, p_mask = model.hide(tokens)
    rows = torch.randn(2, 24, 6)
    key, value = rome.compute_key(model, query, 1), rome.optimize_value(model, query, 1, steps=1)

    def hook(activation: Any, hook: Any) -> None:
        return None

    return dict(
        **dict(model=model, fact=fact, facts=facts, query=query, queries=query, fact_or_query=fact, inputs=facts),
        **dict(runs=predictions, predictions=predictions, mind=analysis.commitment(predictions)),
        **dict(
            trajectory=trajectory, cache=cache, metric=metric, clean=query, corrupted=corrupted, layer=1, layers=[1]
        ),
        **dict(
            sites="resid_pre", names_filter="ln_final.hook_normalized", positive=fact.prompt, negative=facts[1].prompt
        ),
        **dict(
            pairs=data.taught_pairs(model)[:2],
            texts=[fact.prompt],
            names=["ln_final.hook_normalized"],
            name="ln_final.hook_normalized",
        ),
        **dict(dictionary=Identity(), forward=rows[0], reverse=rows[1], axis="layer", sets={0: (rows[0], rows[1])}),
        **dict(
            labels=[0.0, 1.0, 2.0], requests=[fact], corpus=[fact.prompt], subjects=[fact.subject], prompt=fact.prompt
        ),
        **dict(answer=fact.answer, reference="a b", generation="a c", references=["a b"], generations=["a c"]),
        **dict(key=key, value=value, edit=rome.RankOneEdit(model, 1, key, value), probes={"efficacy": [query]}),
        **dict(prefixes=[""], layout=analysis.CanvasLayout(), tokens=tokens, logits=model(noisy), noisy=noisy),
        **dict(p_mask=p_mask, d_head=16, forward_offset=1, reverse_offset=-1, base=1e4, frequencies=rows[0, 0]),
        **dict(hook_fn=hook, hook=hook, hooks={0: hook}, n_steps=2, steps=[0], branch="conditional", step=0),
        **dict(direction=torch.ones(model.cfg.d_model), noise=torch.zeros(model.cfg.d_model), input=tokens),
        **dict(config=TrainingConfig(steps=1, batch_size=1), data=facts, index=0, n=2, other=trajectory, text="the"),
        **dict(prompts=[fact.prompt], row=0, t=0.5, folder="folder"),
        **dict(out="out", path="file", readout="resid", subject=(1, 2), answer_positions=(3,), answer_tokens=(4,)),
        **dict(settings=None, name_or_path="tiny-mdm", circuits=[1], activations=cache, cfg=model.cfg, string="the"),
        **dict(trace=analysis.causal_trace(model, query, noise=0.5, samples=2), lens=analysis.logit_lens(model, query)),
        **dict(average=analysis.average_indirect_effect(model, facts, noise=0.5, samples=2, known="all")),
        **dict(comparison=analysis.compare(*rows, resamples=5), parts=[], positions=[1], covariance=torch.eye(4)),
        edge_scores=analysis.edge_attribution(model, query, corrupted, metric, ig_steps=1),
        pupil=HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu"),
        causal=HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu"),
    )


WORLD: dict[str, Any] = {}


@cache
def doors() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """The public functions, classes and methods by name, each with the arguments of a good call."""
    WORLD.update(WORLD or build())
    found: dict[str, Callable[..., Any]] = {}
    for module in pkgutil.walk_packages(diffusion_lens.__path__, "diffusion_lens."):
        if "__main__" in module.name or INSIDE.search(f"{module.name}."):
            continue
        public = importlib.import_module(module.name)
        for name in getattr(public, "__all__", ()):
            door = getattr(public, name)
            if callable(door) and not inspect.isabstract(door) and not INSIDE.search(f"{module.name}.{name}"):
                found.setdefault(name, door)
    for name, door in inspect.getmembers(interventions, inspect.isfunction):
        if door.__module__ == interventions.__name__ and not name.startswith("_"):
            found[name] = door
    for owner, names in METHODS.items():
        found |= {f"{owner}.{name}": getattr(WORLD[owner], name) for name in names.split()}
    return {name: (door, good) for name, door in found.items() if (good := good_arguments(name, door)) is not None}


def good_arguments(name: str, door: Callable[..., Any]) -> dict[str, Any] | None:
    """Arguments with which a door can be called; `None` for a class that only the package makes, such as a result."""
    quick = QUICK.get(name.rpartition(".")[2], {})
    if name == "model.loss_fn":
        quick = {each: WORLD[each] for each in ("noisy", "p_mask")}
    if name == "TaughtPair":
        quick = vars(WORLD["pairs"][0])
    if "pupil" in WORLD and name in ("train", "finetune"):
        quick = {"model": WORLD["pupil"]}
    if "causal" in WORLD and name == "adapt":
        quick = {**quick, "model": WORLD["causal"]}
    good = {}
    for parameter in inspect.signature(door).parameters.values():
        if parameter.name in quick:
            good[parameter.name] = quick[parameter.name]
        elif parameter.default is parameter.empty and parameter.kind not in _VARIADIC:
            if parameter.name not in WORLD:
                return None
            good[parameter.name] = WORLD[parameter.name]
    return {**good, **quick}


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def bad_calls(draw: random.Random, n_calls: int, n_doors: int, word: str) -> list[tuple[str, str, str]]:
    """Door, argument and value of bad calls; `n_calls` of them and `n_doors` doors, or all if 0."""
    names = [name for name in doors() if word in name]
    cells = [
        (name, argument, value)
        for name in (draw.sample(names, n_doors) if n_doors else names)
        for door, good in [doors()[name]]
        for argument in {**inspect.signature(door).parameters, **good}
        if argument not in ("args", "kwargs", "model_args", "more", "others", "settings_", "hub")
        for value in VALUES
    ]
    draw.shuffle(cells)
    return cells[: n_calls or None]


def called(door: Callable[..., Any], given: dict[str, Any]) -> Any:
    """The result of a call; what has to be given by position is."""
    parameters = inspect.signature(door).parameters.values()
    first = [given.pop(each.name) for each in parameters if each.kind is each.POSITIONAL_ONLY and each.name in given]
    result = door(*first, **given)
    if isinstance(result, contextlib.AbstractContextManager):
        with result:  # some contexts check when they begin
            pass
    return result


@cache
def good_result(name: str) -> Any:
    """The result of the good call, which may have NaN of its own."""
    with _alone():
        return called(doors()[name][0], dict(doors()[name][1]))


def judged(call: Callable[[], Any], annotation: Any, value: Any, shown: tuple[str, ...]) -> tuple[str, str]:
    """What a call did ("refused", "taken" or a fault), and the text of it."""
    try:
        with _time_limit():
            result = call()
    except _Hung:  # a job of 10**9 passes is long, and ends when it is interrupted
        return ("taken" if type(value) is int and value == 10**9 else "hang"), ""
    except ArithmeticError as error:  # of the function that was given, or FloatingPointError
        return ("refused", "") if "of the user" in str(error) or _own(error) else ("raw", repr(error))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and any(each in text for each in shown):  # the file system's own, with the path
            return "refused", text
        if not isinstance(error, REFUSALS) or not _own(error):
            return "raw", text
        return ("refused" if any(each in text for each in shown) else "unnamed"), text
    if callable(value) and "Callable" in str(annotation):
        return "taken", ""
    if misfit := _misread(annotation, value):
        return misfit, ""
    return ("nan" if _has_nan(result) else "taken"), ""


def _own(error: BaseException) -> bool:
    """Whether a `raise` of the package ended the call."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    return code.co_filename.startswith(OURS) and code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _misread(annotation: Any, value: Any) -> str:
    """What is wrong with a value that was taken, such as a text for a bool, or a dictionary for a sequence."""
    said = str(annotation)
    optional = value is None and "None" in said
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool
    if re.fullmatch(r"(<class 'bool'>|bool( \| None)?)", said) and not is_bool and not optional:
        return "a value for a bool"
    if isinstance(value, dict) and re.search("Sequence|Iterable", said) and not re.search("Mapping|Any", said):
        return "a dictionary for a sequence"
    number = isinstance(value, float | complex | np.complexfloating) and not np.isfinite(value)
    if number and re.search("int|float|Supports", said):
        return "a number that is none"
    return ""


def _has_nan(result: Any) -> bool:
    parts = result if isinstance(result, tuple | list) else [result, *getattr(result, "__dict__", {}).values()]
    tensors = [part for part in parts if isinstance(part, torch.Tensor | float)]
    return any(torch.as_tensor(part).isnan().any() for part in tensors)


class _Hung(BaseException):
    pass


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def hung(*_: object) -> None:
        raise _Hung

    before = signal.signal(signal.SIGALRM, hung)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """An empty folder to write to, little memory to take, and no warnings or output."""
    limit, home = resource.getrlimit(resource.RLIMIT_AS), Path.cwd()
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (taken + BYTES, limit[1]))
        try:
            with (
                open(os.devnull, "w") as nowhere,
                contextlib.redirect_stdout(nowhere),
                contextlib.redirect_stderr(nowhere),
            ):
                yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limit)
            os.chdir(home)


def tried(
    n_calls: int, seed: int, word: str = "", n_doors: int = 0, report: Callable[[str], object] = print
) -> Mapping[str, int]:
    """How many bad calls had each outcome; `report` gets a line for each fault."""
    outcomes: Counter[str] = Counter()
    doors()
    law = Law(WORLD["model"])
    for name, argument, value in bad_calls(random.Random(seed), n_calls, n_doors, word):
        door, good = doors()[name]
        parameter = inspect.signature(door).parameters.get(argument)
        shown = (argument, argument.rstrip("s"), value.strip("'"))
        with _alone():
            given = VALUES[value]()
            call = partial(called, door, {**good, argument: given})
            outcome, text = judged(call, parameter and parameter.annotation, given, shown)
        if name == "model.add_hook":
            WORLD["model"].reset_hooks()
        if (outcome == "nan" and _has_nan(good_result(name))) or (name, argument, value) in DOCUMENTED:
            outcome = "taken"
        outcomes["calls"] += 1
        outcomes[outcome] += 1
        if outcome not in ("refused", "taken"):
            report(f"{outcome}: {name}({argument}={value}) {text[:200]!r}")
        if left := list(law.left()):
            if outcome != "taken" or name not in CHANGE_THE_MODEL:
                outcomes["wrong state"] += 1
                report(f"wrong state: {name}({argument}={value}) {left}")
            WORLD.update(build())
            law = Law(WORLD["model"])
            torch.set_grad_enabled(True)
    return outcomes


if __name__ == "__main__":
    torch.set_num_threads(1)
    n_calls, seed, word = (*sys.argv[1:], *("0", "0", "")[len(sys.argv) - 1 :])
    sys.stdout.write(json.dumps(tried(int(n_calls), int(seed), word)) + "\n")
