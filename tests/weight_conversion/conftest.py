"""What every refusal has to state."""

import json

import pytest
from safetensors.torch import save_file


@pytest.fixture
def refused():
    """Opening (or `do`) raises exactly this error, and its message has all these words."""
    from weight_conversion import open_checkpoint

    def check(error, *words, do=open_checkpoint, **call):
        with pytest.raises(error) as caught:
            do(**call)
        assert type(caught.value) is error
        for word in words:
            assert str(word) in str(caught.value), f"{word!r} is not in: {caught.value}"
        return str(caught.value)

    return check


@pytest.fixture
def write():
    """Write tensors as the checkpoint of a folder."""

    def save(tensors, folder):
        save_file(tensors, folder / "model.safetensors")
        return folder / "model.safetensors"

    return save


@pytest.fixture
def a2d(configs, specimen):
    """Write a model made from Qwen3, as dllm publishes it: its config does not say who sees whom."""
    from weight_conversion.key_map import KeyMap
    from weight_conversion.registry import FAMILIES

    def publish(folder):
        model = specimen(configs["a2d-qwen3"]).model
        rules = KeyMap(FAMILIES["qwen3"].rules, model.cfg.architecture)
        folder.mkdir(parents=True)
        theirs = {name: tensor.detach().clone() for name, tensor in rules.to_theirs(model.state_dict())}
        save_file(theirs, folder / "model.safetensors")
        silent = {key: value for key, value in configs["a2d-qwen3"].items() if key != "block_size"}
        (folder / "config.json").write_text(json.dumps(silent))
        return folder

    return publish
