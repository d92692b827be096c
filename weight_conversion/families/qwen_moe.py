"""Diffusion models made from Qwen3-MoE: RND1, which sees the whole canvas, and SDAR-MoE, which writes by blocks.

Qwen3's layers with experts in place of every MLP. The experts' scores are a softmax over all of them, and the weights
of the chosen are divided by their sum if the config says `norm_topk_prob`.

- RND1 (Radical Numerics 2025) is read in the row before, as the causal model from which it was trained. Every layer has
  experts, and its class takes its sizes from the code, not from the config. Source: RadicalNumerics/RND1
  `rnd/modeling_rnd.py`, `configuration_rnd.py`.
- SDAR-MoE (Cheng et al. 2025, arXiv 2510.06303) is read in place. As with the dense SDAR, the published configs say
  neither the number of positions in a block nor the id of [MASK]. Source: JetLM/SDAR-30B-A3B-Chat
  `modeling_sdar_moe.py`, in the copy of PKU-SEC-Lab/TEAM-MoE-dLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weight_conversion.architecture import MOST_LAYERS, Architecture, Experts, check_count
from weight_conversion.families.family import Config, ConfigKeys, Family, by_model_type
from weight_conversion.families.llada_moe import RULES
from weight_conversion.families.llama import read_decoder, write_decoder
from weight_conversion.families.qwen import QWEN3_KEYS

EXPERTS = {"num_experts": "n_experts", "num_experts_per_tok": "n_chosen", "moe_intermediate_size": "d_expert"}
RND1_KEYS = replace(
    QWEN3_KEYS,
    family="rnd1",
    counts={**QWEN3_KEYS.counts, **dict.fromkeys(EXPERTS)},
    flags={**QWEN3_KEYS.flags, "norm_topk_prob": None},
    read=tuple(key for key in QWEN3_KEYS.read if key != "block_size"),
    fixed={**QWEN3_KEYS.fixed, "decoder_sparse_step": (1,), "is_causal": (False,), "mlp_only_layers": ([], None)},
    ignored=(*QWEN3_KEYS.ignored, "moe_backend", "num_diffusion_steps", "output_router_logits"),
)
SDAR_MOE_KEYS = replace(
    RND1_KEYS,
    family="sdar_moe",
    read=QWEN3_KEYS.read,
    fixed={key: allowed for key, allowed in RND1_KEYS.fixed.items() if key != "is_causal"},
    ignored=(*RND1_KEYS.ignored, "block_causal_prompt", "debug", "ep_size", "fuse_cross_entropy", "micro_forward"),
)


def _family(keys: ConfigKeys, classes: Mapping[str, str], options: tuple[str, ...], **how: Any) -> Family:
    """A family of one model type; `how` are arguments of `read_decoder`."""

    def read(config: Config) -> Architecture:
        check_count("num_hidden_layers", config["num_hidden_layers"], MOST_LAYERS)
        experts = Experts(
            **{field: config[key] for key, field in EXPERTS.items()},
            layers=(True,) * config["num_hidden_layers"],
            normalised=bool(config.get("norm_topk_prob", False)),
        )
        return read_decoder(keys, config, masked=True, qk_norm=True, experts=experts, **how)

    def write(a: Architecture) -> dict[str, Any]:
        if (experts := a.experts) is None:
            raise ValueError(f"the {keys.family} format describes mixtures of experts, and this model has none")
        numbers = {key: getattr(experts, field) for key, field in EXPERTS.items()}
        written = {**write_decoder(keys, a), **numbers, "norm_topk_prob": experts.normalised, **keys.written}
        return {"model_type": next(iter(classes)), **written}

    return by_model_type(keys, RULES, read, write, classes, options=options)


FAMILIES = (
    _family(RND1_KEYS, {"rnd1": "RND1(Model|LM)"}, ("mask_token_id",), readout="shifted"),
    _family(SDAR_MOE_KEYS, {"sdar_moe": "SDARMoe(Model|ForCausalLM)"}, ("block_size", "mask_token_id"), by_blocks=True),
)
