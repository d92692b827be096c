"""Second moments and stored activations on an executor: the same bits as in one process, whatever fails."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from executors import Here, Interrupted

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import SecondMoment, Workers, activations, second_moment
from diffusion_lens.analysis.dictionaries.store import ShardTask
from diffusion_lens.analysis.over_facts.folder import SharedFolder
from diffusion_lens.data import toy_facts
from diffusion_lens.interventions import named

SENTENCES = toy_facts.load().sentences()[::61][:9]
RESID = "blocks.1.hook_resid_post"


def moment(model: Any, **more: Any) -> SecondMoment:
    return second_moment(model, SENTENCES, 1, batch_size=2, seed=3, **{"save_every": 2, **more})


def stored(model: Any, out: Path, **more: Any) -> dict[str, bytes]:
    """The files of the folder."""
    settings = {"t": [0.3, 0.8] if model.cfg.has_mask else None, "batch_size": 3, "shard_bytes": 10_000}
    activations(model, SENTENCES, [RESID, "blocks.0.attn.hook_z"], out=out, **settings, **more)
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.safetensors"))}


def assert_same(one: SecondMoment, other: SecondMoment) -> None:
    ours, theirs = vars(one).copy(), vars(other).copy()
    for name in ("total", "by_length"):
        assert torch.equal(ours.pop(name), theirs.pop(name))
    assert ours == theirs


@pytest.fixture
def hooked(tiny: Any) -> Any:
    with tiny.hooks(
        fwd_hooks=[("blocks.0.hook_resid_pre", named("times 1.5", lambda activation, hook: activation * 1.5))]
    ):
        yield tiny


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_sums_are_those_of_one_process(hooked: Any, tmp_path: Path) -> None:
    for save_every, pool, n_tasks in ((1, Here(deaths=1), 6), (2, Here(), 3)):
        serial = moment(hooked, save_every=save_every)
        assert_same(moment(hooked, save_every=save_every, executor=Workers(pool, ahead=save_every)), serial)
        assert pool.n_tasks == n_tasks
    with pytest.raises(KeyboardInterrupt):
        moment(hooked, executor=Workers(Interrupted(), ahead=1), folder=tmp_path)
    (file,) = tmp_path.iterdir()
    assert SecondMoment.load(file).texts == 4
    shutil.copytree(tmp_path, begun := tmp_path / "begun")
    for folder, executor in ((tmp_path, Here()), (begun, None)):
        assert_same(moment(hooked, executor=executor, folder=folder), serial)
    assert_same(moment(hooked, executor=Here(deaths=99), folder=tmp_path), serial)


@pytest.mark.parametrize("tiny", ["tiny-ar"], indirect=True)
def test_the_total_is_that_of_panels_that_are_corpora_of_their_own(tiny: Any) -> None:
    """Without noise, which depends on the place of a text in its corpus."""
    parts = [second_moment(tiny, SENTENCES[start : start + 4], 1, batch_size=2) for start in (0, 4, 8)]
    whole = moment(tiny)
    assert torch.equal(whole.total, parts[0].total + parts[1].total + parts[2].total)
    assert whole.count == sum(part.count for part in parts)


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_files_are_those_of_one_process(hooked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serial = stored(hooked, tmp_path / "serial")
    assert len(serial) > 2
    pool = Here(deaths=1)
    assert stored(hooked, tmp_path / "shared", executor=pool) == serial
    assert pool.n_tasks == 1 + len(serial)
    with pytest.raises(KeyboardInterrupt):
        stored(hooked, tmp_path / "a", executor=Interrupted())
    assert [path.name for path in (tmp_path / "a").glob("*.safetensors")] == [next(iter(serial))]
    # Workers leave gaps.
    shutil.copytree(tmp_path / "shared", gapped := tmp_path / "gapped")
    for name in list(serial)[::2]:
        (gapped / name).unlink()
    for folder, executor in ((tmp_path / "a", None), (gapped, pool)):
        assert stored(hooked, folder, executor=executor) == serial
    assert pool.n_tasks == 1 + len(serial) + len(list(serial)[::2])
    monkeypatch.setattr(SharedFolder, "is_here", False)
    assert stored(hooked, tmp_path / "unseen", executor=Here()) == serial
    monkeypatch.setattr(ShardTask, "rows", lambda *args: pytest.fail("everything is stored"))
    assert stored(hooked, tmp_path / "unseen", executor=Here()) == serial


def test_files_that_stay_unseen_are_told(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardTask, "write", lambda *args: None)
    with pytest.raises(RuntimeError, match=r"written files to .* that this process does not see"):
        stored(tiny, tmp_path, executor=Here())


def test_errors_and_other_networks_end_the_call(tmp_path: Path) -> None:
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    with (
        model.hooks(fwd_hooks=[(RESID, named("times 1e6", lambda activation, hook: activation * 1e6))]),
        pytest.raises(ValueError, match=r"too large for dtype=torch.float16; use 'bfloat16' or 'float32'"),
    ):
        stored(model, tmp_path / "a", dtype="float16", executor=Here())
    with torch.no_grad():
        model.blocks[0].mlp.W_out.mul_(1.5)
    for call in (lambda: moment(model, executor=Here()), lambda: stored(model, tmp_path / "b", executor=Here())):
        with pytest.raises(ValueError, match=r"gets another network .*weights_sha256.*save_pretrained"):
            call()
