"""A result is one line in a notebook, not its tensors."""

import dataclasses
import importlib
import inspect
import pkgutil
from typing import Any

import torch

import diffusion_lens
from diffusion_lens.analysis import average_indirect_effect, causal_trace, compute_key
from diffusion_lens.data import toy_facts
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.records.results import one_line

FACTS = toy_facts.load().facts("p2d", "p2d")[:10:5]
# Not results of a computation on a model: a phase of a training, a folder, a study before it runs, a
# report of text, and what commands print.
OTHERS = {"Trained", "FactFolder", "Study", "CheckReport", "Report", "FolderReport", "PictureReport", "StudyReport"}


def test_results_show_one_line(tiny: Any) -> None:
    name, query = tiny.cfg.model_name, FACTS[0].to_query(tiny, first_tokens=1)
    n_pos = len(query.tokens)
    trace = causal_trace(tiny, query, noise=0.1, samples=1)
    scores = f"scores [pos {n_pos}, layer 4], token_scores [pos {n_pos}, layer 4, selected 1]"
    assert repr(trace) == f"CausalTrace({name}, {scores}, ...)"
    assert repr(compute_key(tiny, query, 1)) == f"KeyResult({name}, keys [prompt 1, d_mlp 352])"
    average = average_indirect_effect(tiny, FACTS, samples=1, layers=[0], first_tokens=1, length=14)
    assert repr(average).startswith(f"AverageEffect({name}, ")
    for result in (average, recall_by_steps(tiny, FACTS, (1,), length=14, cfg_scale=0.0)):
        assert "\n" not in repr(result)
        assert len(repr(result)) < 250


def test_every_result_has_a_line_of_its_own() -> None:
    """The line that `dataclass` writes shows all tensors."""
    flooding = []
    for module in pkgutil.walk_packages(diffusion_lens.__path__, "diffusion_lens."):
        if module.name.endswith("__main__"):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            is_result = inspect.isclass(value) and dataclasses.is_dataclass(value) and value.__module__ == module.name
            if not is_result or name in OTHERS:
                continue
            if "record" in {field.name for field in dataclasses.fields(value)} or hasattr(value, "save"):
                generated = inspect.unwrap(value.__repr__).__code__.co_filename == "<string>"
                flooding += [name] if generated else []
    assert flooding == []


def test_axes_without_names_show_their_sizes() -> None:
    @dataclasses.dataclass
    class Plain:
        values: torch.Tensor
        record: dict[str, Any]

    assert one_line(Plain(torch.zeros(2, 3), {})) == "Plain(values [2, 3])"
