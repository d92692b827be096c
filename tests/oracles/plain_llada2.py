"""LLaDA2 in plain torch, slow, from its tensors under the published names and its config; no part of the library."""

import math
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def logits(tensors: Tensors, config: dict[str, Any], tokens: Tensor, block: int) -> Tensor:
    """Float64[pos d_vocab] for Int[pos] tokens, where position i sees position j if j // block <= i // block."""
    t = {name: tensor.double() for name, tensor in tensors.items()}
    stream = t["model.word_embeddings.weight"][tokens]
    eps = config["rms_norm_eps"]
    for i in range(config["num_hidden_layers"]):
        layer = {
            name.removeprefix(f"model.layers.{i}."): tensor for name, tensor in t.items() if f"layers.{i}." in name
        }
        stream = stream + attention(layer, config, norm(stream, layer["input_layernorm.weight"], eps), block)
        read = norm(stream, layer["post_attention_layernorm.weight"], eps)
        if i < config["first_k_dense_replace"]:
            stream = stream + swiglu(layer, "mlp", read)
        else:
            stream = stream + torch.stack([mixture(layer, config, x) for x in read])
    return norm(stream, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / ((x**2).mean(-1, keepdim=True) + eps).sqrt() * weight


def swiglu(layer: Tensors, name: str, x: Tensor) -> Tensor:
    gate, up, down = (layer[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    hidden = x @ gate.T
    return (hidden / (1 + (-hidden).exp()) * (x @ up.T)) @ down.T


def attention(layer: Tensors, config: dict[str, Any], x: Tensor, block: int) -> Tensor:
    n_heads, n_kv, d = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    rows = layer["attention.query_key_value.weight"].split(d)  # one for each query head, then each key, each value head
    out = []
    for head in range(n_heads):
        pair = head // (n_heads // n_kv)
        q = norm(x @ rows[head].T, layer["attention.query_layernorm.weight"], config["rms_norm_eps"])
        k = norm(x @ rows[n_heads + pair].T, layer["attention.key_layernorm.weight"], config["rms_norm_eps"])
        v = x @ rows[n_heads + n_kv + pair].T
        q, k = turned(q, config), turned(k, config)
        heads = []
        for i in range(len(x)):
            seen = min(len(x), (i // block + 1) * block)
            weights = (k[:seen] @ q[i] / d**0.5).softmax(0)
            heads.append(weights @ v[:seen])
        out.append(torch.stack(heads))
    return torch.cat(out, dim=-1) @ layer["attention.dense.weight"].T


def turned(x: Tensor, config: dict[str, Any]) -> Tensor:
    """The first dimensions of a head, turned in pairs (i, i + half) by the position."""
    n = int(config["head_dim"] * config["partial_rotary_factor"])
    half, result = n // 2, x.clone()
    for position in range(len(x)):
        for i in range(half):
            angle = position * config["rope_theta"] ** (-2 * i / n)
            a, b = x[position, i], x[position, i + half]
            result[position, i] = a * math.cos(angle) - b * math.sin(angle)
            result[position, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return result


def mixture(layer: Tensors, config: dict[str, Any], x: Tensor) -> Tensor:
    """The chosen experts and the shared ones, at one position."""
    scores = 1 / (1 + (-(layer["mlp.gate.weight"] @ x)).exp())
    ranked = (scores + layer["mlp.gate.expert_bias"]).tolist()
    size = config["num_experts"] // config["n_group"]
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config["n_group"])]
    groups.sort(key=lambda group: -sum(sorted(ranked[e] for e in group)[-2:]))
    candidates = [e for group in groups[: config["topk_group"]] for e in group]
    chosen = sorted(candidates, key=lambda e: -ranked[e])[: config["num_experts_per_tok"]]
    total = sum(scores[e] for e in chosen)
    shared = swiglu(layer, "mlp.shared_experts", x)
    return shared + sum(
        config["routed_scaling_factor"] * scores[e] / total * swiglu(layer, f"mlp.experts.{e}", x) for e in chosen
    )


def generate(
    tensors: Tensors,
    config: dict[str, Any],
    prompt: list[int],
    length: int,
    block: int,
    steps: int,
    threshold: float,
) -> list[list[int]]:
    """Every canvas of a greedy run, from the prompt with [MASK] behind it on."""
    mask = config["mask_token_id"]
    canvas = prompt + [mask] * (length - len(prompt))
    canvases = [list(canvas)]
    for start in range(len(prompt) // block * block, length, block):
        end = min(start + block, length)
        for step in range(steps):
            masked = [i for i in range(start, end) if canvas[i] == mask]
            if not masked:
                break
            p = logits(tensors, config, torch.tensor(canvas[:end]), block).softmax(-1)
            p_best, best = p.clone().index_fill(-1, torch.tensor([mask]), 0).max(-1)
            due = block // steps + (step < block % steps)
            sure = [i for i in masked if p_best[i] > threshold]
            revealed = sure if len(sure) >= due else sorted(masked, key=lambda i: -p_best[i])[:due]
            for i in revealed:
                canvas[i] = int(best[i])
            canvases.append(list(canvas))
    return canvases
