"""Repositories of block-diffusion models: SDAR, OPDLM, LLaDA2, Nemotron-Labs-Diffusion."""

from typing import Any

from diffusion_lens.catalogue.entries import Evidence, Repository

SDAR_4B: dict[str, Any] = {
    "model_type": "sdar",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}


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


NEMOTRON_LABS_3B: dict[str, Any] = {
    "model_type": "nemotron_labs_diffusion",
    "dlm_paradigm": "bidirectional",
    "num_hidden_layers": 26,
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9216,
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_parameters": _yarn(16.0, 1e6),
    "tie_word_embeddings": False,
    "mask_token_id": 100,
    "block_size": 32,
}
# Its config gives a shorter context, and with it a factor below 1.
NEMOTRON_LABS_3B_BASE = {
    **NEMOTRON_LABS_3B,
    "max_position_embeddings": 4096,
    "rope_parameters": _yarn(0.25, 1e6),
}
NEMOTRON_LABS_14B = {
    **NEMOTRON_LABS_3B,
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "intermediate_size": 16384,
    "rope_parameters": _yarn(16.0, 1e9),
}

LLADA2_MINI: dict[str, Any] = {
    "model_type": "llada2_moe",
    "num_hidden_layers": 20,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 5120,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "vocab_size": 157184,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 600000.0,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
}
LLADA21_MINI = {**LLADA2_MINI, "max_position_embeddings": 32768}
LLADA2_FLASH = {
    **LLADA2_MINI,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
}
# What the configs of LLaDA2 leave out.
LLADA2 = {"block_size": 32, "mask_token_id": 156895}


def _sdar() -> list[Repository]:
    """The sizes of SDAR, each with blocks of 4 positions, and of the number in its name.

    The configs give neither that number nor the id of [MASK].
    """
    entries = []
    for size, config in (("1.7B", {}), ("4B", SDAR_4B), ("8B", {})):
        for block_size in (4, 8, 16, 32, 64):
            stem = f"SDAR-{size}-Chat" + ("" if block_size == 4 else f"-b{block_size}")
            evidence: Evidence = "config seen" if stem == "SDAR-4B-Chat" else "name seen"
            options = {"block_size": block_size, "mask_token_id": 151669}
            entries.append(Repository(stem.lower(), f"JetLM/{stem}", evidence, config, options=options))
    return entries


BY_BLOCKS = (
    *_sdar(),
    Repository("opdlm-0.6b", "divelab/OPDLM-0.6B", "name seen", options={"block_size": 4}),
    Repository("opdlm-4b", "divelab/OPDLM-4B", "name seen", options={"block_size": 4}),
    Repository("opdlm-math-4b", "divelab/OPDLM-MATH-4B", "name seen", options={"block_size": 4}),
    # The numbers of LLaDA2.0 are those of the copies with which its authors train (inclusionAI/dFactory).
    Repository("llada2.0-mini", "inclusionAI/LLaDA2.0-mini", "config seen", LLADA2_MINI, options=LLADA2),
    Repository("llada2.0-mini-preview", "inclusionAI/LLaDA2.0-mini-preview", "name seen", options=LLADA2),
    Repository("llada2.0-flash", "inclusionAI/LLaDA2.0-flash", "config seen", LLADA2_FLASH, options=LLADA2),
    Repository("llada2.1-mini", "inclusionAI/LLaDA2.1-mini", "config seen", LLADA21_MINI, options=LLADA2),
    Repository("llada2.1-flash", "inclusionAI/LLaDA2.1-flash", "name seen", options=LLADA2),
    # Masked diffusion models and causal models in one: the mode chooses.
    Repository("nemotron-labs-diffusion-3b", "nvidia/Nemotron-Labs-Diffusion-3B", "config seen", NEMOTRON_LABS_3B),
    Repository(
        "nemotron-labs-diffusion-3b-base",
        "nvidia/Nemotron-Labs-Diffusion-3B-Base",
        "config seen",
        NEMOTRON_LABS_3B_BASE,
    ),
    Repository("nemotron-labs-diffusion-8b", "nvidia/Nemotron-Labs-Diffusion-8B", "name seen"),
    Repository("nemotron-labs-diffusion-8b-base", "nvidia/Nemotron-Labs-Diffusion-8B-Base", "name seen"),
    Repository("nemotron-labs-diffusion-14b", "nvidia/Nemotron-Labs-Diffusion-14B", "config seen", NEMOTRON_LABS_14B),
    Repository("nemotron-labs-diffusion-14b-base", "nvidia/Nemotron-Labs-Diffusion-14B-Base", "name seen"),
)
