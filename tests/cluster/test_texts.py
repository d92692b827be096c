"""Second moments and stored activations on processes of this machine, one of which is killed."""

from pathlib import Path
from typing import Any

import torch
from engines import accident

from diffusion_lens.analysis import LocalWorkers, Workers, activations, second_moment
from diffusion_lens.data import toy_facts

SENTENCES = toy_facts.load().sentences()[::20]
PANELS = {"batch_size": 4, "save_every": 2}
FILES = {"batch_size": 4, "shard_bytes": 50_000}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_sums_and_a_killed_process(model: Any, pool: LocalWorkers, tmp_path: Path) -> None:
    serial = second_moment(model, SENTENCES, 1, **PANELS)
    moment = second_moment(model, SENTENCES, 1, **PANELS, executor=Workers(pool, ahead=3), folder=tmp_path)
    assert torch.equal(moment.total, serial.total)
    with accident(model, tmp_path):
        killed = second_moment(model, SENTENCES, 1, **PANELS, executor=pool)
    assert torch.equal(killed.total, serial.total)


def test_files_and_a_killed_process(model: Any, pool: LocalWorkers, tmp_path: Path) -> None:
    activations(model, SENTENCES, "hook_embed", out=tmp_path / "serial", **FILES)
    activations(model, SENTENCES, "hook_embed", out=tmp_path / "workers", **FILES, executor=pool)
    assert files(tmp_path / "workers") == files(tmp_path / "serial")
    with accident(model, tmp_path):
        store = activations(model, SENTENCES, "blocks.1.hook_out", out=tmp_path / "k", **FILES, executor=pool)
    assert store.is_complete
    assert len(store.shards) > 2
