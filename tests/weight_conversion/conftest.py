"""What every refusal has to state."""

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
