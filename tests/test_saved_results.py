"""What is read back: any result by its own header, and files that were changed."""

import json
import os
import resource
import signal
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mutations import HEADER, Mutator
from results import every_result
from safetensors import safe_open

import diffusion_lens
from diffusion_lens import Fact
from diffusion_lens.analysis import CausalTrace, Circuit, EditStudy
from diffusion_lens.analysis.over_facts.folder import FactFolder, content
from diffusion_lens.checks.report import CheckReport, Finding
from diffusion_lens.evaluation import Recall, Reply
from diffusion_lens.records.results import Saved, load_result, mark_of
from weight_conversion import write_json
from weight_conversion.files import write_safetensors

# For each file; `make results` sets more.
MUTATIONS = int(os.environ.get("MUTATIONS", "4"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> dict[Path, Any]:
    """A result of every class in its file, and the parts of studies."""
    folder, files = tmp_path_factory.mktemp("saved"), {}
    for result in every_result(folder / "store"):
        parts = list(result.by_fact().values())[:1] if hasattr(result, "by_fact") else []
        for each in (result, *(part for part in parts if isinstance(part, Saved))):
            if hasattr(each, "save"):
                files[each.save(folder / f"{type(each).__name__}.safetensors")] = each
    return files


def use(result: Any) -> None:
    """What a notebook does."""
    repr(result)
    if hasattr(result, "to_dataframe"):
        result.to_dataframe()
        result._repr_html_() if MUTATIONS > 100 else result._page("")
    if hasattr(result, "by_fact"):
        result.by_fact()


def took_too_long(*_: Any) -> None:
    raise TimeoutError("20 seconds")


def test_load_opens_every_result_by_its_header(saved: dict[Path, Any], tmp_path: Path) -> None:
    for path, result in saved.items():
        assert type(diffusion_lens.load(path)) is type(result)
        assert repr(diffusion_lens.load(str(path))) == repr(result)
    report = CheckReport("toy", None, (Finding("page loss", "ok", "fits", numbers={"loss": 1.5}),), {"device": "cpu"})
    assert diffusion_lens.load(report.save(tmp_path / "report.json")) == report


def test_files_that_are_no_results_say_what_reads_them(tmp_path: Path) -> None:
    write_safetensors({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    write_safetensors({}, tmp_path / "other.safetensors", {HEADER: json.dumps({"kind": "dream"})})
    write_json([1], tmp_path / "list.json")
    os.mkfifo(tmp_path / "pipe")
    for name, said in {
        "model.safetensors": "from_pretrained",
        "other.safetensors": "contains a dream, which is none of the results .*causal trace",
        "list.json": "contains no saved result",
        "pipe": "is no regular file",
        ".": "is a folder without run.json",
    }.items():
        with pytest.raises(ValueError, match=said):
            diffusion_lens.load(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="there is no saved"):
        diffusion_lens.load(tmp_path / "none.safetensors")


def test_a_circuit_of_a_huge_graph_is_refused_at_once(tmp_path: Path) -> None:
    """Its file has 216 bytes, and the names of its parts would fill the memory."""
    record = {"kind": "circuit", "edges": [], "graph": {"n_layers": 1, "n_heads": 10**9, "n_key_value_heads": 1}}
    write_safetensors({}, tmp_path / "circuit.safetensors", {HEADER: json.dumps(record)})
    with pytest.raises(ValueError, match=r"circuit\.safetensors: .* no graph that fits in memory"):
        Circuit.load(tmp_path / "circuit.safetensors")


def test_parts_of_a_study_with_a_flipped_byte_are_refused(tmp_path: Path) -> None:
    facts = {"a": content(Fact("A is", "A", " b", person="A")), "b": content(Fact("B is", "B", " c", person="B"))}
    record = {"facts": facts, "set_aside": {}, "too_long": [], "seed": 1, "model": "toy", "steps": [1, 2]}
    folder = FactFolder.start(tmp_path, record)
    for fact_id in facts:
        folder.save(fact_id, Reply.to(Fact(**facts[fact_id], id=fact_id), ["b", "c"]))
    recall = diffusion_lens.load(tmp_path)
    assert (type(recall), recall.ids) == (Recall, ["a", "b"])
    changed = bytearray(folder.file("b").read_bytes())
    changed[-1] ^= 64  # in the last tensor
    folder.file("b").write_bytes(changed)
    with pytest.raises(ValueError, match="the content is not what was saved"):
        diffusion_lens.load(tmp_path)


def test_the_folder_of_a_study_may_have_other_files(tmp_path: Path, saved: dict[Path, Any]) -> None:
    fact = Fact("A is", "A", " b", person="A")
    record = {
        "facts": {"z": content(fact)},
        "set_aside": {},
        "too_long": [],
        "seed": 1,
        "model": "toy",
        "steps": [1, 2],
    }
    FactFolder.start(tmp_path, record).save("z", Reply.to(replace(fact, id="z"), ["b", "c"]))
    write_safetensors({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    trace = next(path for path, result in saved.items() if isinstance(result, CausalTrace))
    (tmp_path / "b.safetensors").write_bytes(trace.read_bytes())
    assert diffusion_lens.load(tmp_path).ids == ["z"]


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    fact = Fact("A is", "A", " b", person="A")
    record = {"facts": {"z": content(fact)}, "set_aside": {}, "too_long": [], "seed": 1, "model": "toy", "steps": [1]}
    folder = FactFolder.start(tmp_path, record)
    folder.save("z", Reply.to(replace(fact, id="z"), ["b", "c"]))
    folder.file("z").write_bytes(folder.file("z").read_bytes()[:-3])
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        diffusion_lens.load(tmp_path)


def test_a_part_cannot_be_given_the_mark_of_another_study(tmp_path: Path) -> None:
    fact = Fact("A is", "A", " b", person="A")
    record = {"facts": {"z": content(fact)}, "set_aside": {}, "too_long": [], "seed": 1, "model": "toy", "steps": [1]}
    folders = [FactFolder.start(tmp_path / name, {**record, "model": name}) for name in ("one", "two")]
    for folder in folders:
        folder.save("z", Reply.to(replace(fact, id="z"), ["b", "c"]))
    one, two = (folder.file("z") for folder in folders)
    with safe_open(two, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    write_safetensors(tensors, one, {**metadata, "diffusion_lens.part": mark_of(one)})
    with pytest.raises(ValueError, match="belongs to another study"):
        diffusion_lens.load(tmp_path / "one")


def test_the_description_of_a_study_is_checked(tmp_path: Path) -> None:
    write_json({"facts": {}}, tmp_path / "run.json")
    with pytest.raises(ValueError, match=r"run\.json: the saved recall lacks the field 'record.model'"):
        Recall.load(tmp_path)


def test_probes_belong_to_requests(saved: dict[Path, Any], tmp_path: Path) -> None:
    study = next(each for each in saved.values() if isinstance(each, EditStudy))
    for row in (len(study.ids), -1):
        path = replace(study, owner=torch.full_like(study.owner, row)).save(tmp_path / "study.safetensors")
        with pytest.raises(ValueError, match=f"owner has {row}, where there are {len(study.ids)} entries"):
            EditStudy.load(path)
    path = replace(study, owner=study.owner.flip(0)).save(tmp_path / "study.safetensors")
    with pytest.raises(ValueError, match="the probes are not in the order of their requests"):
        EditStudy.load(path)


def test_a_subclass_with_fields_of_its_own_needs_a_kind(saved: dict[Path, Any], tmp_path: Path) -> None:
    @dataclass(frozen=True, eq=False)
    class Noted(Circuit):
        note: str = ""

    circuit = next(each for each in saved.values() if isinstance(each, Circuit))
    noted = Noted(**{field.name: getattr(circuit, field.name) for field in fields(circuit)}, note="mine")
    with pytest.raises(TypeError, match="Noted has note besides the fields of Circuit, as which it would be read"):
        noted.save(tmp_path / "noted.safetensors")
    Noted.KIND = "noted circuit"
    assert diffusion_lens.load(noted.save(tmp_path / "noted.safetensors")).note == "mine"


def test_text_that_could_not_be_read_back_is_not_saved(saved: dict[Path, Any], tmp_path: Path) -> None:
    trace = next(each for each in saved.values() if isinstance(each, CausalTrace))
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        replace(trace, record={**trace.record, "note": "\ud800"}).save(tmp_path / "trace.safetensors")
    assert not list(tmp_path.iterdir())
    replace(trace, record={**trace.record, "note": "\U0001f600"}).save(tmp_path / "trace.safetensors")


def test_a_checksum_under_a_flipped_name_is_noticed(saved: dict[Path, Any], tmp_path: Path) -> None:
    path, result = next(iter(saved.items()))
    changed = path.read_bytes().replace(b"diffusion_lens.checksum", b"diffusion_lens.chucksum")
    (tmp_path / "changed.safetensors").write_bytes(changed)
    with pytest.raises(ValueError, match=r"chucksum.* beside its record"):
        load_result(tmp_path / "changed.safetensors", type(result).KIND)


def test_an_error_names_file_field_and_what_fits(saved: dict[Path, Any], tmp_path: Path) -> None:
    path = next(path for path, result in saved.items() if isinstance(result, CausalTrace))
    mutator, target = Mutator(path, 0), tmp_path / "trace.safetensors"
    record, tensors = mutator.record, mutator.tensors

    def said(record: dict[str, Any] = record, **changed: Any) -> str:
        write_safetensors({**tensors, **changed}, target, {HEADER: json.dumps(record)})
        with pytest.raises(ValueError, match=r"trace\.safetensors: the saved causal trace") as error:
            CausalTrace.load(target)
        return str(error.value)

    assert "int64 [24, 6] in the field 'scores', which should be Float[Tensor" in said(scores=torch.ones(24, 6).long())
    wrong = said(token_scores=torch.ones(24, 5, 2))
    assert "float32 [24, 5, 2] in the field 'token_scores'" in wrong
    assert "with pos 24, layer 6 as in other fields" in wrong
    assert "'x' in the field 'layers[2]', where layers should be list[int]" in said(
        {**record, "layers": [0, 1, "x", 3, 4, 5]}
    )
    assert "[5] entries for the axes 'layer' with layer 6" in said({**record, "layers": [0, 1, 2, 3, 4]})
    assert "positions has 99, where there are 24 entries" in said({**record, "positions": [*range(23), 99]})
    without = {name: value for name, value in record.items() if name != "subject"}
    assert "lacks the field 'subject'" in said(without)
    assert CausalTrace.load(path).record == next(r for p, r in saved.items() if p == path).record


def test_mutated_results_are_refused_by_name_or_work(saved: dict[Path, Any], tmp_path: Path) -> None:
    signal.signal(signal.SIGALRM, took_too_long)
    before, raw, accepted, n = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, [], 0, 0
    for seed, (path, result) in enumerate(saved.items()):
        mutator = Mutator(path, seed)
        for _ in range(MUTATIONS):
            target, n = tmp_path / "mutated.safetensors", n + 1
            done, step = mutator.write(target), "load"
            signal.alarm(20)
            try:
                again = type(result).load(target)
                accepted, step = accepted + 1, "use"
                use(again)
            except Exception as error:
                taught = isinstance(error, ValueError) and (str(target) in str(error) if step == "load" else True)
                raw += [] if taught else [f"{path.stem}: {step} after {done}: {type(error).__name__}: {error}"]
            finally:
                signal.alarm(0)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    said = f"{n} mutations, {accepted} accepted, {len(raw)} raw errors, {grown / 2**20:.2f} GiB"
    if MUTATIONS > 100:
        sys.stderr.write(f"{said}\n")
    assert len(raw) <= n // 100, "\n".join([said, *raw])
    assert grown < 2**20, said


def test_flipped_bytes_are_never_taken_over(saved: dict[Path, Any], tmp_path: Path) -> None:
    """A file with a flipped byte is refused, unless nothing of its content differs."""
    for seed, (path, result) in enumerate(saved.items()):
        mutator, (tensors, record) = Mutator(path, seed), load_result(path, type(result).KIND)
        for _ in range(MUTATIONS):
            done = mutator.flip(tmp_path / "flipped.safetensors")
            try:
                again, same = load_result(tmp_path / "flipped.safetensors", type(result).KIND)
            except ValueError:
                continue
            assert repr(same) == repr(record), done
            assert again.keys() == tensors.keys(), done
            assert all(each.equal(again[name]) or each.isnan().any() for name, each in tensors.items()), done
