"""The length that a model was trained on: where it is kept, and what the loop makes of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.cli import app
from diffusion_lens.data import toy_facts
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.loading import trained_length_of, write_trained_length
from diffusion_lens.loading.catalogue import BUNDLED, PUBLISHED
from diffusion_lens.training import TrainingConfig, finetune
from weight_conversion import export, open_checkpoint

PROMPT = "Gustav Geisser is the"


def test_the_pairs_length_is_that_of_its_sentences(tiny: Any) -> None:
    assert tiny.cfg.trained_length == BUNDLED[tiny.cfg.model_name].trained_length == toy_facts.SENTENCE_LENGTH
    assert PUBLISHED["smdm-1028m-reverse"].trained_length == 52
    assert PUBLISHED["smdm-1028m"].trained_length is None


def test_text_without_a_length_takes_it(tiny: Any) -> None:
    without_length = tiny.denoise(PROMPT, steps=2)
    with_length = tiny.denoise(PROMPT, length=14, steps=2)
    assert torch.equal(without_length.canvases, with_length.canvases)


def test_a_prompt_as_long_as_the_training_texts_needs_a_length(tiny: Any) -> None:
    with pytest.raises(ValueError, match=r"14 tokens, and 'tiny-\w+' was trained on texts of 14.*max_new_tokens="):
        tiny.denoise(torch.full((1, 14), 5))


def test_a_longer_canvas_is_warned_of(tiny: Any) -> None:
    with pytest.warns(UserWarning, match=r"the canvas has 15 positions, and 'tiny-\w+' was trained on texts of 14"):
        tiny.denoise(PROMPT, length=15, steps=1)


def test_masks_in_the_prompt_are_all_that_is_filled() -> None:
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    canvas = torch.cat([model.to_tokens(PROMPT), torch.full((1, 3), model.cfg.mask_token_id)], dim=1)
    assert model.denoise(canvas, steps=2).tokens.shape == (1, 7)


def test_recall_without_a_length_has_that_length(tiny: Any) -> None:
    facts = toy_facts.load().facts(trained="p2d", asked="p2d")[:2]
    assert recall_by_steps(tiny, facts, (1,), cfg_scale=0.0).record["length"] == 14


def test_our_own_folders_keep_it_and_other_formats_do_not(tiny: Any, tmp_path: Path) -> None:
    saved = tiny.save_pretrained(tmp_path / "ours")
    assert json.loads((saved / "config.json").read_text())["trained_length"] == 14
    assert trained_length_of(saved) == 14
    assert HookedDiffusionTransformer.from_pretrained(saved, device="cpu").cfg.trained_length == 14
    assert "trained_length" not in tiny.cfg.architecture.to_dict()
    elsewhere = export(tiny.state_dict(), tiny.cfg.architecture, tmp_path / "theirs" / "model.safetensors")
    assert "trained_length" not in "".join(path.read_text() for path in elsewhere.parent.glob("*.json"))
    assert trained_length_of(elsewhere) is None


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_a_fine_tuned_folder_keeps_it_whatever_its_format(tiny: Any, tmp_path: Path) -> None:
    model = HookedDiffusionTransformer.from_pretrained(tiny.cfg.model_name, device="cpu")
    facts = toy_facts.load().facts(trained="p2d", asked="p2d")[:4]
    finetune(model, facts, TrainingConfig(steps=1, batch_size=2, warmup=0), tmp_path, progress=False)
    assert open_checkpoint(tmp_path).architecture.family == "lit_gpt"
    taught = HookedDiffusionTransformer.from_pretrained(tmp_path, device="cpu")
    assert taught.cfg.trained_length == trained_length_of(tmp_path) == 14
    assert trained_length_of(tmp_path / "model.safetensors", tmp_path / "lit_config.json") == 14
    assert torch.equal(taught.denoise(PROMPT, steps=4).canvases, model.denoise(PROMPT, steps=4).canvases)
    ours = taught.save_pretrained(tmp_path / "ours")
    assert trained_length_of(ours) == 14
    assert not (ours / "trained_length.json").exists()


def test_a_conversion_keeps_it(tmp_path: Path) -> None:
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    model.save_pretrained(tmp_path / "ours")
    source, target = str(tmp_path / "ours"), tmp_path / "theirs" / "model.safetensors"
    assert CliRunner().invoke(app, ["convert", source, str(target), "--to", "lit_gpt"]).exit_code == 0
    assert trained_length_of(target.parent) == 14
    (target.parent / "trained_length.json").unlink()
    beside = target.with_name("second.safetensors")
    assert CliRunner().invoke(app, ["convert", source, str(beside), "--to", "lit_gpt"]).exit_code == 0
    assert trained_length_of(beside) is None, "nothing is said of the weights that were there"


def test_weights_that_overwrite_others_have_their_own_trained_length(tmp_path: Path) -> None:
    write_trained_length(20, tmp_path)
    assert trained_length_of(tmp_path) == 20
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    model.cfg.trained_length = None
    assert trained_length_of(model.save_pretrained(tmp_path)) is None, "its own config.json says so"


def test_a_model_of_which_nothing_is_known_has_no_default(tiny: Any) -> None:
    model = HookedDiffusionTransformer(replace(tiny.cfg, trained_length=None), tiny.tokenizer)
    with pytest.raises(ValueError, match="nothing to fill"):
        model.denoise(PROMPT)


def test_a_length_that_is_none_is_refused(tiny: Any, tmp_path: Path) -> None:
    config = tiny.save_pretrained(tmp_path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "trained_length": "14"}))
    with pytest.raises(ValueError, match=r"trained_length is '14' in .*at least 1"):
        HookedDiffusionTransformer.from_pretrained(tmp_path, device="cpu")
