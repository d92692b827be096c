"""The copies of a model in worker processes: where their weights are, and that they are those of the study."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from executors import Here
from safetensors.torch import load_file, save_file

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import average_indirect_effect
from diffusion_lens.analysis.workers import machine_copy, model_copy
from diffusion_lens.analysis.workers.model_copy import ModelCopy
from diffusion_lens.data import toy_facts
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.weights_digest import weights_sha256
from weight_conversion.aligned_file import write_aligned

GOLDEN = Path(__file__).parents[2] / "golden"
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
    assert len(machine_copy._OPEN) == any(of_machine)
    del copy
    monkeypatch.setattr(model_copy, "SMALLEST", 1 << 26)
    recall(tiny, executor=Here())  # another model, which is not shared
    assert (machine_copy._OPEN, mapped_spans(str(tmp_path))) == ([], [])


@pytest.fixture
def ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["Ones"]:
    """Processes, as it were, that share the weights of a model in a folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(machine_copy, "SMALLEST", 1)
    processes = Ones()
    yield processes
    processes.end()


class Ones:
    """Processes that load a model of ones, each of which has its file open until `end`."""

    def __init__(self) -> None:
        self.loaded = list[tuple[bool, torch.nn.Module]]()
        self.held = list[int]()
        self.sha256 = weights_sha256(self.load(None))

    def load(self, file: Path | None) -> torch.nn.Module:
        model = torch.nn.Linear(3, 2)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
        for name, weight in load_file(file).items() if file else ():
            model.get_parameter(name).data = weight
        self.loaded.append((file is not None, model))
        return model

    def share(self, sha256: str | None = None) -> list[bool]:
        """Of each time that a new process loads the model, whether it is from the shared file."""
        self.loaded.clear()
        model = machine_copy.shared_on_machine(self.load, "ones", sha256 or self.sha256)
        assert weights_sha256(model) == self.sha256
        self.held.extend(machine_copy._OPEN)
        machine_copy._OPEN.clear()
        return [shared for shared, _ in self.loaded]

    def end(self) -> None:
        while self.held:
            os.close(self.held.pop())


def test_a_copy_of_the_machine_is_one_that_a_live_process_has_open_with_the_right_weights(
    ones: Ones, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ones.share("another") == [False, True, False]
    for _ in range(2):
        assert ones.share() == [False, True]
        assert [weight.numel() for weight in ones.loaded[0][1].parameters()] == [0, 0]
        assert ones.share() == [True]
        ones.end()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert ones.share() == [False]
    (tmp_path / "no folder").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no folder"))
    assert ones.share() == [False]


@pytest.mark.parametrize("fails", [False, True])
def test_a_copy_of_the_machine_never_has_a_name(
    ones: Ones, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    def write(tensors: Any, file: Any, **settings: Any) -> None:
        write_aligned(tensors, file, **settings)
        file.flush()
        assert os.fstat(file.fileno()).st_nlink == 0
        assert [path.suffix for path in tmp_path.iterdir()] == [".weights"]
        if fails:
            raise OSError("no space left on device")

    monkeypatch.setattr(machine_copy, "write_aligned", write)
    assert ones.share() == [False, not fails]
    assert len([*tmp_path.iterdir()]) == (not fails)


def test_a_file_that_has_taken_the_number_of_another_is_no_copy_of_the_machine(ones: Ones, tmp_path: Path) -> None:
    assert ones.share() == [False, True]
    (number,) = ones.held
    (listed,) = tmp_path.iterdir()
    process, _, device, inode = map(int, listed.read_text().split())
    listed.write_text(f"{process} {number} {device + 1} {inode}\n")  # the same inode of another file system
    assert ones.share() == [False, True]
    # Now the first process has another file with the right weights at its number, then one with other weights.
    for value, expected in ((1, [True]), (2, [True, False])):
        path = tmp_path / "another file"
        save_file({"weight": torch.full((2, 3), float(value)), "bias": torch.zeros(2)}, path)
        with path.open("rb") as file:
            os.dup2(file.fileno(), number)
        listed.write_text(f"{process} {number} {device} {inode}\n")
        assert ones.share() == [False, True]
        here = path.stat()
        listed.write_text(f"{process} {number} {here.st_dev} {here.st_ino}\n")
        assert ones.share() == expected


@pytest.mark.parametrize("folded", ["fold_ln", "time"])
def test_a_model_with_folded_weights_is_loaded_once_and_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folded: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for module in (model_copy, machine_copy):
        monkeypatch.setattr(module, "SMALLEST", 1)
    source = "tiny-mdm" if folded == "fold_ln" else GOLDEN / "bd3lm"
    model = HookedDiffusionTransformer.from_pretrained(source, device="cpu", fold_ln=folded == "fold_ln")
    n_loads = 0
    load = HookedDiffusionTransformer.from_source

    def count(*args: Any, **settings: Any) -> Any:
        nonlocal n_loads
        n_loads += 1
        return load(*args, **settings)

    monkeypatch.setattr(HookedDiffusionTransformer, "from_source", count)
    with ModelCopy.of(model, None).ready() as copy:
        assert weights_sha256(copy) == weights_sha256(model)
    assert (n_loads, [*tmp_path.iterdir()]) == (1, [])


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
