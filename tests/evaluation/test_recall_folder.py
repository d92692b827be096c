"""Recall in folders: stopped and resumed, split and merged, refused where runs would mix."""

import signal
import sys
from dataclasses import replace

import pytest
import torch
from processes import Stuck, forked

from diffusion_lens.analysis.over_facts.folder import FactFolder, work_through_batches
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising.denoise import denoise
from diffusion_lens.evaluation import Recall, Reply, recall_by_steps
from diffusion_lens.records.results import PART, RECORD, load_result, mark_of, save_result
from weight_conversion import to_json, write_safetensors

TOY = toy_facts.load()
FACTS = [*TOY.facts("p2d", "d2p")[:24:3], *TOY.facts("d2p", "p2d")[:9:3]]
# Guided and too long, so that texts differ and some are wrong.
RUN = dict(steps=(1, 3), length=20, cfg_scale=3.0, temperature=0.5, batch_size=4)

# Longer canvases than the model was trained on are meant.
pytestmark = pytest.mark.filterwarnings("ignore:the canvas has 20 positions")

on_mdm = pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)


def assert_same(a, b):
    """Two results, bit for bit."""
    for name, value in vars(a).items():
        other = getattr(b, name)
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype
            assert torch.equal(value, other), name
        else:
            assert value == other, name
    assert list(a.record["facts"]) == list(b.record["facts"])


@pytest.fixture(scope="module")
def whole(tiny):
    """All facts in one run, in memory."""
    return recall_by_steps(tiny, FACTS, **RUN)


def times(folder):
    return {file: file.stat().st_mtime_ns for file in folder.glob("*.safetensors")}


def test_it_comes_back_from_its_file(whole, tmp_path):
    again = Recall.load(whole.save(tmp_path / "recall.safetensors"))
    assert_same(again, whole)
    assert again.to_text() == whole.to_text()
    assert {"seed", "steps", "sampler", "length", "cfg_scale", "model", "weights_sha256", "versions"} <= set(
        again.record
    )
    assert again.facts == FACTS


@on_mdm
def test_each_fact_has_a_file(tiny, whole, tmp_path):
    assert_same(recall_by_steps(tiny, FACTS, out=tmp_path, **RUN), whole)
    replies = {reply.fact: reply for reply in map(Reply.load, tmp_path.glob("*.safetensors"))}
    assert {fact_id: reply.written for fact_id, reply in replies.items()} == dict(
        zip(whole.ids, whole.written, strict=True)
    )


@on_mdm
def test_an_interrupted_study_is_resumed(tiny, whole, tmp_path, monkeypatch):
    calls = []

    def interrupted(model, canvas, settings):
        calls.append(settings.steps)
        if len(calls) == 2 * len(whole.steps):
            raise KeyboardInterrupt
        return denoise(model, canvas, settings)

    monkeypatch.setattr(sys.modules[recall_by_steps.__module__], "denoise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recall_by_steps(tiny, FACTS, out=tmp_path, **RUN)
    kept = times(tmp_path)
    assert 1 <= len(kept) <= 4
    assert_same(recall_by_steps(tiny, FACTS, out=tmp_path, **RUN), whole)
    assert {file: times(tmp_path)[file] for file in kept} == kept
    n_calls = len(calls)
    assert_same(recall_by_steps(tiny, FACTS[::-1], out=tmp_path, **RUN), in_order(whole, FACTS[::-1]))
    assert len(calls) == n_calls


def in_order(recall, facts):
    rows = [recall.ids.index(fact.id) for fact in facts]
    contents = {fact.id: recall.record["facts"][fact.id] for fact in facts}
    return Recall(
        [recall.ids[row] for row in rows],
        recall.steps,
        [recall.written[row] for row in rows],
        recall.contained[rows],
        recall.exact[rows],
        recall.character_bleu[rows],
        {**recall.record, "facts": contents},
    )


@on_mdm
def test_two_processes_fill_one_folder_and_one_is_killed_inside_a_batch(tiny, whole, tmp_path, monkeypatch):
    stuck, saved, save = Stuck(), [], Reply.save

    def stuck_at_the_third(self, path):
        if len(saved) == 2:
            stuck.wait_forever()
        saved.append(save(self, path))

    def other_half():
        monkeypatch.setattr(Reply, "save", stuck_at_the_third)
        recall_by_steps(tiny, FACTS, shard=(1, 2), out=tmp_path, **RUN)

    with forked(other_half) as child:
        mine = recall_by_steps(tiny, FACTS, shard=(0, 2), out=tmp_path, **RUN)
        assert stuck.reached()
    assert child.exitcode == -signal.SIGKILL
    kept = times(tmp_path)
    assert len(kept) == len(mine.ids) + 2
    with pytest.raises(ValueError, match=rf"{len(FACTS) - len(kept)} of {len(FACTS)} facts are missing"):
        Recall.merge(tmp_path)
    recall_by_steps(tiny, FACTS, shard=(1, 2), out=tmp_path, **RUN)
    assert_same(Recall.merge(tmp_path), whole)
    assert {file: times(tmp_path)[file] for file in kept} == kept


@on_mdm
def test_shards_merge_to_one_run(tiny, whole, tmp_path):
    parts = [recall_by_steps(tiny, FACTS, shard=(i, 3), **RUN) for i in range(3)]
    assert sorted(fact_id for part in parts for fact_id in part.ids) == sorted(whole.ids)
    assert_same(Recall.merge(parts), whole)
    nothing = recall_by_steps(tiny, FACTS, shard="90/100", **RUN)
    assert not nothing.ids
    assert nothing.table() == {}
    saved = [part.save(tmp_path / f"{i}.safetensors") for i, part in enumerate([nothing, *parts])]
    assert_same(Recall.merge([saved[2], parts[0], saved[0], saved[3]]), whole)
    for i in range(2):
        recall_by_steps(tiny, FACTS, shard=f"{i}/2", out=tmp_path / str(i), **RUN)
    assert_same(Recall.merge([tmp_path / "0", str(tmp_path / "1")]), whole)


@on_mdm
def test_what_does_not_merge(tiny, whole, tmp_path):
    part = recall_by_steps(tiny, FACTS, shard=(0, 2), **RUN)
    with pytest.raises(ValueError, match=f"of {len(FACTS)} facts are missing"):
        Recall.merge(part)
    with pytest.raises(ValueError, match="nothing to merge"):
        Recall.merge([])
    with pytest.raises(
        ValueError, match=r"one of the results was made with other settings.* .*seed: 1234 there, 7 here"
    ):
        Recall.merge([part, recall_by_steps(tiny, FACTS, shard=(1, 2), seed=7, **RUN)])
    with pytest.raises(ValueError, match=f"'{whole.ids[0]}' has another result in one of the results"):
        Recall.merge([whole, replace(whole, written=[["other"] * len(whole.steps), *whole.written[1:]])])
    with pytest.raises(FileNotFoundError, match="contains no study"):
        Recall.merge(tmp_path / "absent")


@on_mdm
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(temperature=0.0), "temperature: 0.5 there, 0.0 here"),
        (dict(length=12), "length: 20 there, 12 here"),
        (dict(batch_size=3), "batch_size: 4 there, 3 here"),
        (dict(facts=FACTS[:-1]), rf"facts: 1 differ \('{FACTS[-1].id}'\)"),
    ],
)
def test_a_folder_of_another_run_is_refused(tiny, tmp_path, change, message):
    settings = {**RUN, "facts": FACTS, "shard": (0, 4)}
    recall_by_steps(tiny, settings.pop("facts"), out=tmp_path, **settings)
    before = times(tmp_path)
    other = {**settings, "facts": FACTS, **change}
    with pytest.raises(ValueError, match=message):
        recall_by_steps(tiny, other.pop("facts"), out=tmp_path, **other)
    assert times(tmp_path) == before


class Note:
    """The plainest result: a text."""

    def __init__(self, text):
        self.text = text

    def save(self, path):
        return save_result(path, "note", {}, {"text": self.text})

    @classmethod
    def load(cls, path):
        return cls(**load_result(path, "note")[1])


def test_a_batch_saved_in_part_is_computed_whole(tmp_path):
    folder = FactFolder.start(tmp_path, {"facts": dict.fromkeys("abcde")})
    for fact_id in "ab":
        folder.save(fact_id, Note("before"))
    batches = []

    def work(batch):
        batches.append("".join(batch))
        return [Note(f"{fact_id} of {batches[-1]}") for fact_id in batch]

    texts = {key: note.text for key, note in work_through_batches(["a", "bc", "de"], work, Note.load, folder)}
    assert batches == ["bc", "de"]
    assert texts == {"a": "before", "b": "b of bc", "c": "c of bc", "d": "d of de", "e": "e of de"}
    saved = {key: note.text for key, note in folder.results(Note.load)}
    assert saved == {**texts, "b": "before"}
    list(work_through_batches(["a", "bc", "de"], work, Note.load, folder))
    assert len(batches) == 2


def test_files_of_a_study_are_the_same_bytes_each_time(tmp_path):
    folder, contents = FactFolder.start(tmp_path, {"facts": {"a": None}}), set()
    for _ in range(12):
        folder.save("a", Note("again"))
        contents.add(folder.file("a").read_bytes())
    assert len(contents) == 1
    assert Note.load(folder.file("a")).text == "again"


def test_a_mark_that_an_earlier_version_wrote_is_read(tmp_path):
    """It was an entry of the metadata of its own."""
    folder = FactFolder.start(tmp_path, {"facts": {"a": None}})
    folder.save("a", Note("before"))
    metadata = {RECORD: to_json({"kind": "note", "text": "before"}), PART: mark_of(folder.file("a"))}
    write_safetensors({}, folder.file("a"), metadata)
    assert folder.has("a")
    write_safetensors({}, folder.file("a"), {**metadata, PART: "another"})
    with pytest.raises(ValueError, match="belongs to another study or another fact"):
        folder.has("a")
