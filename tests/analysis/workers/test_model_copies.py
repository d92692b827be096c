"""The copies of a model in worker processes: where their weights are, and that they are those of the study."""

import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from executors import Here
from safetensors.torch import load_file

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import average_indirect_effect
from diffusion_lens.analysis.workers import machine_copy, model_copy
from diffusion_lens.data import toy_facts
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.weights_digest import weights_sha256

FACTS = toy_facts.load().facts()[:5]


def recall(model: Any, **more: Any) -> Any:
    return recall_by_steps(model, FACTS, [1, 3], temperature=0.7, batch_size=2, **more)


def assert_same(one: Any, other: Any) -> None:
    ours, theirs = one.by_fact(), other.by_fact()
    assert list(ours) == list(theirs)
    assert all(result.equals(theirs[fact_id]) for fact_id, result in ours.items())


def move_data(offset: int, file: Path) -> None:
    """Pad the header of a safetensors file with spaces, so that its data begin so much later."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes((end - 8 + offset).to_bytes(8, "little") + content[8:end] + b" " * offset + content[end:])


def mapped_spans(path: str) -> list[list[int]]:
    """The addresses to which this process maps files with this in their path."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if path in line]
    return [[int(end, 16) for end in line[0].split("-")] for line in lines]


def inside(model: Any, spans: list[list[int]]) -> list[bool]:
    """Of each weight, whether it begins in one of these spans."""
    return [any(low <= weight.data_ptr() < high for low, high in spans) for weight in model.parameters()]


@pytest.mark.parametrize(("offset", "smallest"), [(0, 1), (8, 1 << 26), (8, 1)])
def test_a_worker_loads_the_model_once_and_maps_its_weights(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, smallest: int
) -> None:
    for module in (model_copy, machine_copy):
        monkeypatch.setattr(module, "SMALLEST", smallest)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    tiny.save_pretrained(tmp_path / "model")
    move_data(offset, tmp_path / "model" / "model.safetensors")
    model = HookedDiffusionTransformer.from_pretrained(tmp_path / "model", device="cpu")
    # Products with a single row are those whose last bits depend on the alignment of the weights.
    settings = {"samples": 1, "length": 14, "known": "all", "first_tokens": 1}
    serial, spread = (average_indirect_effect(model, FACTS, **settings, executor=each) for each in (None, Here()))
    assert_same(spread, serial)
    (copy,) = model_copy._LOADED.values()
    recall(model, executor=Here())
    assert [*model_copy._LOADED.values()] == [copy]
    of_file, of_machine = (inside(copy, mapped_spans(str(tmp_path / folder))) for folder in ("model", "temporary"))
    assert (all(of_file), any(of_file)) == (not offset, not offset)
    assert (all(of_machine), any(of_machine)) == (bool(offset) and smallest == 1,) * 2
    assert not any(inside(model, mapped_spans(str(tmp_path))))
    left = [*(tmp_path / "temporary").iterdir()]
    assert len(left) == any(of_machine)
    assert all(file.stat().st_size < 100 for file in left)


def test_a_copy_of_the_machine_is_one_that_a_live_process_has_open_with_the_right_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(machine_copy, "SMALLEST", 1)
    loaded: list[bool] = []

    def load(file: Path | None) -> torch.nn.Module:
        loaded.append(file is not None)
        model = torch.nn.Linear(3, 2)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
        for name, weight in load_file(file).items() if file else ():
            model.get_parameter(name).data = weight
        return model

    def share(sha256: str) -> list[bool]:
        loaded.clear()
        assert weights_sha256(machine_copy.shared_on_machine(load, "ones", sha256)) == own
        held.extend(machine_copy._OPEN)
        machine_copy._OPEN.clear()
        return [*loaded]

    own, held = weights_sha256(load(None)), list[int]()
    assert share("another") == [False, True, False]
    for _ in range(2):
        assert share(own) == [False, True]
        assert share(own) == [True]  # the first, another process as it were, has it open
        while held:
            os.close(held.pop())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert share(own) == [False]
    (tmp_path / "no folder").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no folder"))
    assert share(own) == [False]


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_a_copy_that_has_changed_between_two_tasks_is_refused(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_copy, "_LOADED", {})
    serial = recall(tiny)
    assert_same(recall(tiny, executor=Here()), serial)
    (copy,) = model_copy._LOADED.values()
    kept = copy.blocks[0].mlp.down.weight
    kept.data[0, 0] += 1
    for _ in range(2):
        with pytest.raises(ValueError, match=r"gets another network .*weights_sha256"):
            recall(tiny, executor=Here())
    kept.data[0, 0] = tiny.blocks[0].mlp.down.weight[0, 0]
    assert_same(recall(tiny, executor=Here()), serial)
