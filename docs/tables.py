"""Tables that are generated from the code: the axis glossary, the hook points of a model, the pictures of results.

Pages include them with `{axis-table}`, `{hook-table}` (followed by "network" or "loop") and `{picture-table}`.
"""

import re
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from inspect import isabstract
from pkgutil import walk_packages
from typing import Any

import torch
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from diffusion_lens.model import shapes
from diffusion_lens.model.hooking import why_silent
from diffusion_lens.records.results import Result
from weight_conversion import Architecture, Experts

# The activation at each hook point; {i} is a block. The table must be complete: a hook point without a line here, and a
# line without a hook point, are errors.
MEANING = {
    "hook_embed": "embeddings of the canvas",
    "hook_pos_embed": "vectors of the positions, which are added to the embeddings",
    "blocks.{i}.hook_resid_pre": "residual stream entering the block",
    "blocks.{i}.ln1.hook_scale": "√(mean(x²) + eps) of the norm before attention",
    "blocks.{i}.ln1.hook_normalized": "x / scale, before the norm's weight",
    "blocks.{i}.attn.hook_attn_in": "copy of the residual stream for each head; not with grouped heads",
    "blocks.{i}.attn.hook_q_input": "copy of the residual stream for the queries of each head",
    "blocks.{i}.attn.hook_k_input": "copy of the residual stream for the keys of each head",
    "blocks.{i}.attn.hook_v_input": "copy of the residual stream for the values of each head",
    "blocks.{i}.attn.hook_q": "queries, before their rotation",
    "blocks.{i}.attn.hook_k": "keys, before their rotation",
    "blocks.{i}.attn.hook_v": "values",
    "blocks.{i}.attn.hook_rot_q": "queries, rotated by their position, and scaled by it where the network does so",
    "blocks.{i}.attn.hook_rot_k": "keys, rotated by their position",
    "blocks.{i}.attn.hook_attn_scores": "q·k / √d_head, plus the bias of the positions if any, −∞ where a query may "
    "not see a key; computed only while hooked",
    "blocks.{i}.attn.hook_pattern": "softmax of the scores; computed only while hooked",
    "blocks.{i}.attn.hook_z": "average of the values by the pattern, for each head",
    "blocks.{i}.attn.hook_result": "output of each head, which is added to the residual stream",
    "blocks.{i}.hook_attn_out": "output of the attention, which is added to the residual stream",
    "blocks.{i}.hook_resid_mid": "residual stream between attention and MLP",
    "blocks.{i}.hook_mlp_in": "copy of the residual stream for the MLP",
    "blocks.{i}.ln2.hook_scale": "scale of the norm before the MLP",
    "blocks.{i}.ln2.hook_normalized": "x / scale, before the norm's weight",
    "blocks.{i}.mlp.hook_pre": "the gate, before silu",
    "blocks.{i}.mlp.hook_pre_linear": "the up-projection",
    "blocks.{i}.mlp.hook_post": "silu(gate) · up, the input of the down-projection: ROME's key",
    "blocks.{i}.mlp.hook_router_logits": "the router's logit of each expert",
    "blocks.{i}.mlp.hook_experts": "the chosen experts, best first; others may be returned",
    "blocks.{i}.mlp.hook_router_weights": "what multiplies the output of each expert, 0 where it is not chosen",
    "blocks.{i}.mlp.experts.{e}.hook_pre": "the gate of expert {e}, before silu; 0 where it is not chosen",
    "blocks.{i}.mlp.experts.{e}.hook_pre_linear": "its up-projection",
    "blocks.{i}.mlp.experts.{e}.hook_post": "silu(gate) · up of expert {e}",
    "blocks.{i}.mlp.hook_expert_out": "output of each chosen expert, before its weight",
    "blocks.{i}.hook_mlp_out": "output of the MLP, or sum of the weighted experts, which is added to the stream",
    "blocks.{i}.hook_shared_out": "output of the shared expert, which is added to the residual stream too",
    "blocks.{i}.hook_resid_post": "residual stream after the block",
    "ln_final.hook_scale": "scale of the last norm",
    "ln_final.hook_normalized": "x / scale, before the norm's weight",
    "denoise.hook_tokens": "the canvas before the step; −1 at positions that the text has not reached",
    "denoise.hook_logits": "logits after guidance, by position; zeros where no token is proposed",
    "denoise.hook_candidates": "the proposed tokens; elsewhere the tokens of the canvas",
    "denoise.hook_confidence": "probabilities of the proposed tokens, by which positions are ranked; zero elsewhere",
    "denoise.hook_reveal": "the positions that this step reveals",
    "denoise.hook_noise": "random tokens, for the positions that become noise again",
}

# Only models with learned positions have the first, and only those with self-conditioning the second.
_LEARNED, _NOISE = "hook_pos_embed", "denoise.hook_noise"
_EXPERTS = {name for name in MEANING if "expert" in name or "router" in name or "shared" in name}
# What the bundled models do not have, and which models do.
_ELSEWHERE = {
    _LEARNED: 'with `positional_embedding_type="standard"`',
    _NOISE: "with `self_conditioning`",
    **dict.fromkeys(_EXPERTS, "with `experts`"),
}

# Different sizes for all axes, so that a shape identifies them.
_SIZES = {
    "batch": 2,
    "pos": 5,
    "head": 6,
    "kv_head": 3,
    "d_head": 8,
    "d_model": 11,
    "d_mlp": 13,
    "d_vocab": 17,
    "d_vocab_out": 16,
    "expert": 7,
    "chosen": 4,
}
_KINDS = {torch.int64: "Int", torch.bool: "Bool", torch.float32: "Float", torch.float64: "Float"}


def axis_rows() -> list[tuple[str, str]]:
    """Word and meaning of every axis, from the docstring of `shapes`."""
    assert shapes.__doc__ is not None
    return re.findall(r"^(\w+(?:, \w+)*)  +(.+)$", shapes.__doc__, re.MULTILINE)


def hook_rows(kind: str) -> list[tuple[str, str, str, str]]:
    """Name, shape, condition, and meaning of the hook points of the "network" or of the "loop".

    Raises:
        ValueError: `MEANING` does not list the hook points of the bundled models, or theirs differ from each other.
    """
    names = [_template(name) for name in HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu").hook_dict]
    causal = [_template(name) for name in HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu").hook_dict]
    if set(names) != set(causal) or {*names, *_ELSEWHERE} != set(MEANING):
        differing = {*names, *causal, *_ELSEWHERE} ^ set(MEANING)
        raise ValueError(f"hook points and their meanings differ: {sorted(differing)}")
    seen, model = _observed()
    rows = []
    for name, meaning in MEANING.items():
        silent = None if name in _ELSEWHERE else why_silent(model, name.format(i=0))
        if name.startswith("denoise.") == (kind == "loop"):
            condition = re.search(r"model\.set_use_\w+\(True\)", silent or "")
            when = f"after `{condition[0]}`" if condition else ""
            rows.append((name, seen[name], _ELSEWHERE.get(name, when), meaning))
    return rows


@cache
def _observed() -> tuple[dict[str, str], HookedDiffusionTransformer]:
    """The shape at each hook point of small random models, in axis words, and one of these models."""
    seen: dict[str, str] = {}

    def record(x: torch.Tensor, hook: Any) -> None:
        seen[_template(hook.name)] = f"{_KINDS[x.dtype]}[{' '.join(_words(x.shape))}]"

    prompt = torch.zeros(_SIZES["batch"], 1, dtype=torch.long)
    # `use_attn_in` excludes grouped heads and `use_split_qkv_input`.
    shared, grouped = _probe(kv_heads=_SIZES["head"]), _probe(kv_heads=_SIZES["kv_head"])
    with shared.optional_hooks(use_attn_in=True):
        shared.run_with_hooks(prompt.expand(-1, _SIZES["pos"]), fwd_hooks=[("blocks.0.hook_attn_in", record)])
    learned = _probe(kv_heads=_SIZES["head"], positional_embedding_type="standard")
    learned.run_with_hooks(prompt.expand(-1, _SIZES["pos"]), fwd_hooks=[(_LEARNED, record)])
    experts = Experts(_SIZES["expert"], _SIZES["chosen"], _SIZES["d_mlp"], layers=(True,), d_shared=_SIZES["d_mlp"])
    mixture = _probe(kv_heads=_SIZES["head"], experts=experts)
    routed = [name for name in mixture.hook_dict if _template(name) in _EXPERTS]
    mixture.run_with_hooks(prompt.expand(-1, _SIZES["pos"]), fwd_hooks=[(name, record) for name in routed])
    canvas = _SIZES["pos"] - prompt.shape[1]
    by_canvas = {"attention_dir": "block_causal", "block_context": "causal", "causal_block": canvas}
    renoising = _probe(
        kv_heads=_SIZES["head"], self_conditioning=True, mask_token_id=None, d_vocab_out=_SIZES["d_vocab"], **by_canvas
    )
    renoising.denoise(prompt, max_new_tokens=canvas, steps=1, fwd_hooks=[(_NOISE, record)])
    for flags in ({"use_attn_result": True, "use_hook_mlp_in": True, "use_split_qkv_input": True}, {}):
        with grouped.optional_hooks(**flags):
            grouped.denoise(prompt, length=_SIZES["pos"], steps=1, fwd_hooks=[(lambda name: True, record)])
    return seen, grouped


def _probe(kv_heads: int, **changes: Any) -> HookedDiffusionTransformer:
    fields: dict[str, Any] = {
        "family": "diffusion_lens",
        "name": "probe",
        "n_layers": 1,
        "d_model": _SIZES["d_model"],
        "n_heads": _SIZES["head"],
        "n_key_value_heads": kv_heads,
        "d_head": _SIZES["d_head"],
        "d_mlp": _SIZES["d_mlp"],
        "d_vocab": _SIZES["d_vocab"],
        "d_vocab_out": _SIZES["d_vocab_out"],
        "n_ctx": 32,
        "attention_dir": "bidirectional",
        "readout": "in_place",
        "mask_token_id": _SIZES["d_vocab"] - 1,
    }
    architecture = Architecture(**{**fields, **changes})
    return HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"))


def _words(shape: Sequence[int]) -> list[str]:
    by_size = {size: word for word, size in _SIZES.items()} | {1: "1"}
    words = [by_size[size] for size in shape]
    return [*words[:2], "query", "key"] if words[2:] == ["pos", "pos"] else words


def _template(name: str) -> str:
    return re.sub(r"\.experts\.\d+\.", ".experts.{e}.", re.sub(r"^blocks\.\d+\.", "blocks.{i}.", name))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


class AxisTable(SphinxDirective):
    """`{axis-table}`: the words for tensor axes."""

    def run(self) -> list[nodes.Node]:
        rows = [(", ".join(f"`{word}`" for word in words.split(", ")), meaning) for words, meaning in axis_rows()]
        return parsed(self, markdown(("axis", "meaning"), rows))


class PictureTable(SphinxDirective):
    """`{picture-table}`: what the picture of each result shows, or why it has none."""

    def run(self) -> list[nodes.Node]:
        return parsed(self, markdown(("result", "its picture"), picture_rows()))


def picture_rows() -> list[tuple[str, str]]:
    """Each class of results with what its picture shows, then those that have none with the reason."""
    classes = sorted(results_of(Result), key=lambda each: each.__name__)
    shown = [(each, each.SHOWS) for each in classes if hasattr(each, "SHOWS")]
    others = [
        (each, f"none: {each.NO_PICTURE[0].lower()}{each.NO_PICTURE[1:-1]}")
        for each in classes
        if not hasattr(each, "SHOWS")
    ]
    return [(f"{{py:class}}`~{each.__module__}.{each.__name__}`", said) for each, said in (*shown, *others)]


def results_of(base: type[Any]) -> set[type[Any]]:
    """The classes of results in the library that are no base of others."""
    for room in ("denoising", "training", "analysis", "evaluation"):
        package = import_module(f"diffusion_lens.{room}")
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            import_module(module.name)
    found, waiting = set(), [base]
    while waiting:
        each = waiting.pop()
        waiting += each.__subclasses__()
        if not isabstract(each) and each.__module__.startswith("diffusion_lens."):
            found.add(each)
    return found


class HookTable(SphinxDirective):
    """`{hook-table} network` or `{hook-table} loop`: name, shape and meaning of each hook point."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        rows = [
            (f"`{name}`", f"`{shape}`", f"{meaning}; only {when}" if when else meaning)
            for name, shape, when, meaning in hook_rows(self.arguments[0])
        ]
        return parsed(self, markdown(("hook point", "shape", "activation"), rows))


def parsed(directive: SphinxDirective, text: list[str]) -> list[nodes.Node]:
    """Lines of Markdown, which may include headings, as nodes of a directive."""
    box = nodes.container()
    source, line = directive.get_source_info()
    directive.state.nested_parse(StringList(text, f"{source}:{line}"), directive.content_offset, box, match_titles=True)
    return box.children


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("axis-table", AxisTable)
    app.add_directive("hook-table", HookTable)
    app.add_directive("picture-table", PictureTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
