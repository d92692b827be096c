"""Repositories with one checkpoint: LLaDA, Dream, the small diffusion models of dllm, and their causal counterparts.

`config` contains the numbers of the published config.json, so that shape and size are known before a download; without
it they are read from the downloaded file. Models that write block after block are in `by_blocks`, those of the
literature in `diffusion_transformers`.
"""

from typing import Any

from diffusion_lens.catalogue.by_blocks import BY_BLOCKS
from diffusion_lens.catalogue.diffusion_transformers import DIFFUSION_TRANSFORMERS
from diffusion_lens.catalogue.entries import Repository


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

QWEN25_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
# The configs of the instruction-tuned models and the coders give a shorter context than the base model's.
QWEN25_7B_32K = {**QWEN25_7B, "max_position_embeddings": 32768}
DREAM_7B = {**QWEN25_7B, "model_type": "Dream", "mask_token_id": 151666}

QWEN25_05B = {
    **QWEN25_7B_32K,
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_06B = {
    **QWEN25_05B,
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
}

LLAMA2_7B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LLAMA3_8B = {
    **LLAMA2_7B,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
LLAMA31_8B = {**LLAMA3_8B, "max_position_embeddings": 131072, "rope_scaling": _scaled_by(8.0)}
LLAMA32_1B = {
    **LLAMA31_8B,
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "head_dim": 64,
    "rope_scaling": _scaled_by(32.0),
    "tie_word_embeddings": True,
}
LLAMA32_3B = {**LLAMA32_1B, "num_hidden_layers": 28, "hidden_size": 3072, "num_attention_heads": 24, "head_dim": 128}
TINYLLAMA = {
    **LLAMA2_7B,
    "num_hidden_layers": 22,
    "hidden_size": 2048,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
}


def _a2d(config: dict[str, Any], mask_token_id: int) -> dict[str, Any]:
    """The config of a causal model without its causal mask; `mask_token_id` is the next free id of its tokenizer."""
    return {**config, "model_type": f"a2d-{config['model_type']}", "mask_token_id": mask_token_id}


REPOSITORIES: tuple[Repository, ...] = (
    # Masked diffusion models
    Repository("llada-8b-base", "GSAI-ML/LLaDA-8B-Base", "config seen", LLADA_8B),
    Repository("llada-8b-instruct", "GSAI-ML/LLaDA-8B-Instruct", "config seen", LLADA_8B),
    Repository("llada-1.5", "GSAI-ML/LLaDA-1.5", "name seen", LLADA_8B),
    Repository("illada-8b-base", "GSAI-ML/iLLaDA-8B-Base", "name seen"),
    Repository("illada-8b-instruct", "GSAI-ML/iLLaDA-8B-Instruct", "name seen"),
    Repository("dream-7b-base", "Dream-org/Dream-v0-Base-7B", "name seen", DREAM_7B),
    Repository("dream-7b-instruct", "Dream-org/Dream-v0-Instruct-7B", "name seen", DREAM_7B),
    Repository(
        "dream-coder-7b-instruct",
        "Dream-org/Dream-Coder-v0-Instruct-7B",
        "config seen",
        {**DREAM_7B, "max_position_embeddings": 32768},
    ),
    Repository("diffucoder-7b-base", "apple/DiffuCoder-7B-Base", "name seen", DREAM_7B),
    Repository("diffucoder-7b-instruct", "apple/DiffuCoder-7B-Instruct", "name seen", DREAM_7B),
    Repository("diffucoder-7b-cpgrpo", "apple/DiffuCoder-7B-cpGRPO", "name seen", DREAM_7B),
    Repository("qwen3-0.6b-mdlm", "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1", "name seen", _a2d(QWEN3_06B, 151669)),
    Repository(
        "qwen2.5-coder-0.5b-instruct-mdlm",
        "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1",
        "name seen",
        _a2d(QWEN25_05B, 151665),
    ),
    # dllm trains and samples by blocks of 32 unless told otherwise; neither config nor name says the size.
    Repository(
        "qwen3-0.6b-bd3lm",
        "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1",
        "name seen",
        _a2d(QWEN3_06B, 151669),
        options={"block_size": 32},
    ),
    Repository(
        "qwen2.5-coder-0.5b-instruct-bd3lm",
        "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-bd3lm-v0.1",
        "name seen",
        _a2d(QWEN25_05B, 151665),
        options={"block_size": 32},
    ),
    Repository(
        "llada-moe-7b-a1b-base",
        "inclusionAI/LLaDA-MoE-7B-A1B-Base",
        "name seen",
        options={"mask_token_id": 156895},
        family="llada_moe",
    ),
    Repository(
        "llada-moe-7b-a1b-instruct",
        "inclusionAI/LLaDA-MoE-7B-A1B-Instruct",
        "name seen",
        options={"mask_token_id": 156895},
        family="llada_moe",
    ),
    # Its config is Llama-2's; the id of [MASK] is that of the training code.
    Repository(
        "diffullama-7b",
        "diffusionfamily/diffullama",
        "config seen",
        LLAMA2_7B,
        options={"mode": "bidirectional", "mask_token_id": 811},
    ),
    *BY_BLOCKS,
    *DIFFUSION_TRANSFORMERS,
    # Causal models
    Repository("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", "config seen", QWEN25_05B),
    Repository("qwen2.5-7b", "Qwen/Qwen2.5-7B", "config seen", QWEN25_7B),
    Repository("qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B-Instruct", "config seen", QWEN25_7B_32K),
    Repository("qwen2.5-coder-0.5b-instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct", "name seen", QWEN25_05B),
    Repository("qwen2.5-coder-7b", "Qwen/Qwen2.5-Coder-7B", "name seen", QWEN25_7B_32K),
    Repository("qwen2.5-coder-7b-instruct", "Qwen/Qwen2.5-Coder-7B-Instruct", "name seen", QWEN25_7B_32K),
    Repository("qwen3-0.6b", "Qwen/Qwen3-0.6B", "config seen", QWEN3_06B),
    Repository(
        "tinyllama-1.1b",
        "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
        "config seen",
        TINYLLAMA,
        weight_bytes=4,
    ),
    Repository("llama-2-7b", "meta-llama/Llama-2-7b-hf", "config seen", LLAMA2_7B),
    Repository("llama-3-8b", "meta-llama/Meta-Llama-3-8B", "config seen", LLAMA3_8B),
    Repository("llama-3-8b-instruct", "meta-llama/Meta-Llama-3-8B-Instruct", "config seen", LLAMA3_8B),
    Repository("llama-3.1-8b", "meta-llama/Llama-3.1-8B", "config seen", LLAMA31_8B),
    Repository("llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct", "config seen", LLAMA31_8B),
    Repository("llama-3.2-1b", "meta-llama/Llama-3.2-1B", "config seen", LLAMA32_1B),
    Repository("llama-3.2-1b-instruct", "meta-llama/Llama-3.2-1B-Instruct", "config seen", LLAMA32_1B),
    Repository("llama-3.2-3b", "meta-llama/Llama-3.2-3B", "name seen", LLAMA32_3B),
    Repository("llama-3.2-3b-instruct", "meta-llama/Llama-3.2-3B-Instruct", "name seen", LLAMA32_3B),
)
