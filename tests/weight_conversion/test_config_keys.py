"""Keys of real configs: those that change nothing are ignored, others are refused unless the caller names them."""

import json

import pytest
from typer.testing import CliRunner

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.hooked_diffusion_transformer import load_source
from diffusion_lens.loading.source import given_options
from weight_conversion import export, open_checkpoint

# As nanotron, transformers.js, unsloth, axolotl, the hub's client and old versions of transformers write them.
INERT = {
    "_model_name_or_path": "someone/base",
    "_attn_implementation_autoset": True,
    "base_model_name_or_path": "someone/base",
    "base_model_tp_plan": {"layers.*.mlp": "colwise"},
    "do_sample": True,
    "hidden_dropout": 0.1,
    "is_llama_config": True,
    "max_length": 20,
    "model_max_length": 4096,
    "pruned_heads": {},
    "rope_interleaved": False,
    "temperature": 0.6,
    "tokenizer_class": "LlamaTokenizer",
    "transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16"}},
    "unsloth_fixed": True,
    "unsloth_version": "2026.7.1",
}
MATTERING = {"qk_scale": 2.0, "logit_softcap": 30.0, "partial_rotary": 0.5}


@pytest.fixture
def small_checkpoint(configs, specimen, tmp_path):
    """A function that writes a family's random checkpoint, with more keys in its config."""

    def write(name="llama", **more):
        model = specimen(configs[name]).model
        path = export(model.state_dict(), model.cfg.architecture, tmp_path / name / "model.safetensors")
        config = json.loads((path.parent / "config.json").read_text())
        (path.parent / "config.json").write_text(json.dumps({**config, **more}))
        return path.parent

    return write


def test_a_quantised_checkpoint_is_refused(small_checkpoint, refused):
    folder = small_checkpoint(quantization_config={"bits": 4})
    refused(ValueError, "convert it back to floating point", path=folder)
    open_checkpoint(folder, options={"ignore_config_keys": ["quantization_config"]})


@pytest.mark.parametrize("name", ["llama", "qwen3", "llada", "dream", "llada2", "mdlm"])
def test_keys_that_change_nothing_do_not_stop_a_load(small_checkpoint, name):
    plain = open_checkpoint(small_checkpoint(name)).architecture
    assert open_checkpoint(small_checkpoint(name, **INERT)).architecture == plain


@pytest.mark.parametrize(("key", "value"), [("rope_interleaved", True), ("add_cross_attention", True)])
def test_a_switch_that_is_on_is_refused_by_name(small_checkpoint, key, value, refused):
    folder = small_checkpoint(**{key: value})
    refused(ValueError, f"{key}=True is not supported in the llama family", "must be False", path=folder)


@pytest.mark.parametrize("key", MATTERING)
def test_an_unknown_key_is_refused_and_may_be_ignored(small_checkpoint, key, refused):
    folder = small_checkpoint(**{key: MATTERING[key]})
    refused(ValueError, f"not understood: [{key!r}]", f"pass ignore_config_keys=[{key!r}]", path=folder)
    named = open_checkpoint(folder, options=given_options(ignore_config_keys=[key])).architecture
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k != key})
    )
    assert named == open_checkpoint(folder).architecture


def test_only_unknown_keys_of_the_config_may_be_ignored(small_checkpoint, refused, tmp_path):
    folder = small_checkpoint(qk_scale=2.0, rope_interleaved=True)
    for keys, words in (
        (["qk_scal"], ["names 'qk_scal', and the config has no such key (nearest: 'qk_scale')"]),
        (["qk_scale", "hidden_size"], ["names 'hidden_size', and the llama family reads it"]),
        (["qk_scale", "rope_interleaved"], ["names 'rope_interleaved', and the llama family reads it"]),
    ):
        options = given_options(ignore_config_keys=keys)
        refused(ValueError, *words, path=folder, options=options)
    assert given_options(ignore_config_keys="qk_scale") == {"ignore_config_keys": ["qk_scale"]}
    ours = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu").save_pretrained(tmp_path / "ours")
    refused(ValueError, "does not apply to a checkpoint of the family 'diffusion_lens'", path=ours, options=options)


def test_a_config_does_not_say_which_of_its_keys_are_ignored(small_checkpoint, refused):
    folder = small_checkpoint(qk_scale=2.0, ignore_config_keys=["qk_scale"])
    refused(ValueError, "ignore_config_keys is in the config itself", str(folder), "remove it there", path=folder)


@pytest.mark.parametrize("keys", [3, [3], {"qk_scale": 1}, 2.5])
def test_keys_to_ignore_are_names(keys):
    with pytest.raises(TypeError, match="it must be a list of names of the config's keys"):
        given_options(ignore_config_keys=keys)


def test_workers_and_other_modes_ignore_the_same_keys(small_checkpoint):
    folder = small_checkpoint("nemotron-block", my_note="trained on a Tuesday", mine=1)
    keys = ["my_note", "mine"]
    model = HookedDiffusionTransformer.from_pretrained(folder, ignore_config_keys=keys, mode="block", device="cpu")
    again = load_source(model.source.anywhere(), "cpu")
    assert again.cfg.architecture == model.cfg.architecture
    causal = load_source(model.source.in_mode("ar"), "cpu", weights_of=model)
    assert causal.cfg.is_autoregressive
    assert causal.source.options == {"ignore_config_keys": keys, "mode": "ar"}


def test_the_command_line_takes_the_keys(small_checkpoint, tmp_path):
    from diffusion_lens.cli.app import app

    folder = small_checkpoint(my_note=1, mine={"a": 2})
    convert = ["convert", str(folder), str(tmp_path / "ours.safetensors"), "--to", "diffusion_lens"]
    refused = CliRunner().invoke(app, convert)
    assert refused.exit_code == 2
    assert "--ignore-config-keys" in refused.output
    given = [part for key in ("my_note", "mine") for part in ("--ignore-config-keys", key)]
    assert CliRunner().invoke(app, [*convert, *given]).exit_code == 0
    assert open_checkpoint(tmp_path / "ours.safetensors").architecture.family == "llama"
    assert CliRunner().invoke(app, ["info", str(folder), *given]).exit_code == 0
