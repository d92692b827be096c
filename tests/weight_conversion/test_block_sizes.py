"""Models trained by blocks: the number of positions in a block is read, named or passed, and never guessed."""

import json
import shutil
import warnings

import pytest

from diffusion_lens import HookedDiffusionTransformer
from weight_conversion import export, open_checkpoint
from weight_conversion.families.kinds import with_block_size

BLOCKS = "a block-diffusion model"
SDAR = {"model_type": "sdar", "architectures": ["SDARForCausalLM"], "mask_token_id": 151}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("JetLM/SDAR-4B-Chat-b16", 16),
        ("models--JetLM--SDAR-1.7B-Chat-b64/snapshots/0123", 64),
        ("JetLM/SDAR-8B-Chat", 4),
        ("JetLM/SDAR-30B-A3B-Sci", 4),
        ("divelab/OPDLM-MATH-4B", 4),
        ("ByteDance-Seed/Stable-DiffCoder-8B-Base", 4),
        ("inclusionAI/LLaDA2.0-mini", 32),
        ("models--inclusionAI--LLaDA2.1-flash/snapshots/0123", 32),
    ],
)
def test_a_published_name_says_the_block_size_that_its_config_does_not(name, size):
    source = f"huggingface.co/{name}" if "/snap" not in name else name.split("/")[0]
    assert with_block_size(SDAR, source)["block_size"] == size
    assert with_block_size({**SDAR, "block_size": 8}, source)["block_size"] == 8


@pytest.mark.parametrize("name", ["SDAR-4B-Chat-base", "my-sdar", "my-LLaDA2", "Qwen3-0.6B-diffusion-bd3lm-v0.1"])
def test_an_unknown_block_size_is_refused(name, refused):
    config = {"model_type": "a2d-qwen3"} if "Qwen3" in name else {"model_type": "llada2_moe"} if "2" in name else SDAR
    words = (f"huggingface.co/owner/{name} is {BLOCKS}", "does not say how many positions", "Pass block_size=")
    refused(ValueError, *words, do=lambda: with_block_size(config, f"huggingface.co/owner/{name}"))


def test_a_model_made_from_a_causal_one_may_see_its_canvas_by_blocks(a2d, tmp_path, refused):
    """dllm's block-diffusion models hold the config and the tensors of those that see the whole canvas."""
    folder = a2d(tmp_path / "Qwen3-0.6B-diffusion-bd3lm-v0.1")
    for path in (folder, folder / "model.safetensors"):
        refused(ValueError, BLOCKS, "its name is", "block_size=", "another name", '"block_size": null', path=path)
    config = json.loads((folder / "config.json").read_text())
    denied = open_checkpoint(folder, {**config, "block_size": None}).architecture
    assert (denied.attention_dir, denied.causal_block) == ("bidirectional", None)
    for wrong in (0, True, 2.5, "4"):
        words = (f"block_size is {wrong!r}", "a block has at least one position")
        refused(ValueError, *words, path=folder, config={**config, "block_size": wrong})

    model = HookedDiffusionTransformer.from_pretrained(folder, block_size=8, device="cpu")
    assert (model.cfg.attention_dir, model.cfg.block_size, model.cfg.has_mask) == ("block_causal", 8, True)
    again = export(model.state_dict(), model.cfg.architecture, tmp_path / "again" / "model.safetensors")
    assert open_checkpoint(again).architecture == model.cfg.architecture
    causal = {**config, "model_type": "qwen3", "mask_token_id": None, "block_size": 4}
    refused(ValueError, "names a causal model", "block_size 4", path=folder, config=causal)


def test_a_family_without_models_trained_by_blocks_refuses_a_block_size(configs, refused):
    from weight_conversion.registry import FAMILIES

    config = {**configs["dream"], "block_size": 4}
    refused(ValueError, "block_size=4", "dream", do=lambda: FAMILIES["dream"].read_architecture(config, {}))


def test_names_further_up_the_path_are_ignored(a2d, tmp_path):
    folder = a2d(tmp_path / "bd3lm" / "my-mdlm")
    assert open_checkpoint(folder).architecture.family == "qwen3"


def test_a_model_made_from_a_causal_one_warns_if_nothing_shows_its_kind(a2d, tmp_path):
    folder = a2d(tmp_path / "mine")
    with pytest.warns(UserWarning, match=r"mine is read as a model that sees its whole canvas.*\"block_size\": null"):
        model = HookedDiffusionTransformer.from_pretrained(folder, device="cpu")
    again = export(model.state_dict(), model.cfg.architecture, tmp_path / "again" / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in (again, shutil.copytree(folder, tmp_path / "some-mdlm-v0.1")):
            assert HookedDiffusionTransformer.from_pretrained(path, device="cpu").cfg.family == "qwen3"


@pytest.mark.parametrize("passed", ["path", "mapping named in it"])
def test_a_passed_config_shows_the_kind_by_its_own_path(passed, a2d, tmp_path, refused):
    folder = a2d(tmp_path / "Qwen3-bd3lm")
    (weights := folder / "weights").mkdir()
    (folder / "model.safetensors").rename(weights / "model.safetensors")
    config = folder / "config.json"
    if passed != "path":
        config = {**json.loads(config.read_text()), "_name_or_path": "dllm/Qwen3-bd3lm"}
    load = HookedDiffusionTransformer.from_pretrained
    path = weights / "model.safetensors"
    refused(ValueError, BLOCKS, "its name is", "bd3lm", do=lambda: load(path, config=config, device="cpu"))


@pytest.mark.parametrize("as_mapping", [False, True])
@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"auto_map": {"AutoModel": "modeling_sdar.SDARForCausalLM"}}, "auto_map="),
        ({"architectures": "OPDLMModel"}, "architectures='OPDLMModel'"),
    ],
)
def test_a_passed_config_shows_the_kind_as_one_beside_the_checkpoint_does(
    as_mapping, settings, shown, a2d, tmp_path, refused
):
    folder = a2d(tmp_path / "mine")
    config = {**json.loads((folder / "config.json").read_text()), **settings}
    (path := tmp_path / "passed.json").write_text(json.dumps(config))
    load = HookedDiffusionTransformer.from_pretrained
    passed = config if as_mapping else path
    refused(ValueError, BLOCKS, shown, do=lambda: load(folder, config=passed, device="cpu"))
    shutil.copy(path, folder / "config.json")
    refused(ValueError, BLOCKS, shown, do=lambda: load(folder, device="cpu"))


@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_passed_config_does_not_hide_the_kind_that_the_one_beside_shows(as_mapping, a2d, tmp_path, refused):
    folder = a2d(tmp_path / "mine")
    silent = json.loads((folder / "config.json").read_text())
    (path := tmp_path / "passed.json").write_text(json.dumps(silent))
    (folder / "config.json").write_text(json.dumps({**silent, "block_size": 4}))
    words = (BLOCKS, "config.json beside it says block_size=4", 'the config that you pass say "block_size": null')
    load = HookedDiffusionTransformer.from_pretrained
    passed = silent if as_mapping else path
    refused(ValueError, *words, do=lambda: load(folder, config=passed, device="cpu"))
    denied = {**silent, "block_size": None}
    assert load(folder, config=denied, device="cpu").cfg.attention_dir == "bidirectional"
    (folder / "config.json").write_text("{")  # one that cannot be read is why another is passed
    assert load(folder, config=denied, device="cpu").cfg.attention_dir == "bidirectional"


@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_passed_config_that_shows_no_kind_warns(as_mapping, a2d, tmp_path):
    folder = a2d(tmp_path / "mine")
    config = folder / "config.json"
    with pytest.warns(UserWarning, match="mine is read as a model that sees its whole canvas"):
        HookedDiffusionTransformer.from_pretrained(
            folder, config=json.loads(config.read_text()) if as_mapping else config, device="cpu"
        )


def test_only_the_name_of_the_folder_itself_counts(a2d, tmp_path, refused, monkeypatch):
    """From inside a folder, and through a link, a checkpoint is the same one."""
    folder = a2d(tmp_path / "Qwen3-bd3lm")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "mine").mkdir()
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "mine" / name).symlink_to(folder / name)
    monkeypatch.chdir(folder)
    for path in (".", "model.safetensors", "./", tmp_path / "link", "../link/model.safetensors"):
        load = lambda path=path: HookedDiffusionTransformer.from_pretrained(path, device="cpu")  # noqa: E731
        refused(ValueError, BLOCKS, "its name is 'Qwen3-bd3lm'", do=load)
    refused(ValueError, BLOCKS, path=tmp_path / "mine" / "model.safetensors")
