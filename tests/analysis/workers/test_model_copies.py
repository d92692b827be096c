"""The copies of a model in worker processes: where their weights are, and that they are those of the study."""

from pathlib import Path
from typing import Any

import pytest
from executors import Here

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import average_indirect_effect
from diffusion_lens.analysis.over_facts import executor
from diffusion_lens.analysis.over_facts.executor import ModelCopy
from diffusion_lens.data import toy_facts
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.records.identity import weights_sha256

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


@pytest.mark.parametrize("offset", [0, 8])
def test_a_worker_loads_the_model_once_and_maps_its_weights(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    monkeypatch.setattr(executor, "_LOADED", {})
    tiny.save_pretrained(tmp_path / "model")
    move_data(offset, tmp_path / "model" / "model.safetensors")
    model = HookedDiffusionTransformer.from_pretrained(tmp_path / "model", device="cpu")
    # Products with a single row are those whose last bits depend on the alignment of the weights.
    settings = {"samples": 1, "length": 14, "known": "all", "first_tokens": 1}
    serial, spread = (average_indirect_effect(model, FACTS, **settings, executor=each) for each in (None, Here()))
    assert_same(spread, serial)
    (copy,) = executor._LOADED.values()
    recall(model, executor=Here())
    assert [*executor._LOADED.values()] == [copy]
    of_file = inside(copy, mapped_spans(str(tmp_path / "model")))
    assert (all(of_file), any(of_file)) == (not offset, not offset)
    assert not any(inside(model, mapped_spans(str(tmp_path))))
    del copy
    recall(tiny, executor=Here())  # another model
    assert mapped_spans(str(tmp_path)) == []


@pytest.mark.parametrize("folded", ["fold_ln", "time"])
def test_a_model_with_folded_weights_is_loaded_once(monkeypatch: pytest.MonkeyPatch, folded: str) -> None:
    monkeypatch.setattr(executor, "_LOADED", {})
    source = "tiny-mdm" if folded == "fold_ln" else GOLDEN / "bd3lm"
    model = HookedDiffusionTransformer.from_pretrained(source, device="cpu", fold_ln=folded == "fold_ln")
    n_loads = 0
    load = executor.load_source

    def count(*args: Any, **settings: Any) -> Any:
        nonlocal n_loads
        n_loads += 1
        return load(*args, **settings)

    monkeypatch.setattr(executor, "load_source", count)
    with ModelCopy.of(model, None).ready() as copy:
        assert weights_sha256(copy) == weights_sha256(model)
    assert n_loads == 1


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_a_copy_that_has_changed_between_two_tasks_is_refused(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_LOADED", {})
    serial = recall(tiny)
    assert_same(recall(tiny, executor=Here()), serial)
    (copy,) = executor._LOADED.values()
    kept = copy.blocks[0].mlp.down.weight
    kept.data[0, 0] += 1
    for _ in range(2):
        with pytest.raises(ValueError, match=r"gets another network .*weights_sha256"):
            recall(tiny, executor=Here())
    kept.data[0, 0] = tiny.blocks[0].mlp.down.weight[0, 0]
    assert_same(recall(tiny, executor=Here()), serial)
