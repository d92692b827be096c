"""A spec on a model: its interventions as hooks of `diffusion_lens.interventions`, and the code of the run.

    what    function      source of the new value
    force   replace       the token, at `denoise.hook_tokens` of its step
    zero    zero_ablate   zeros
    mean    mean_ablate   the mean over the positions of another run at the same step
    patch   swap          another run at the same step

    site    hook point
    resid   blocks.{layer}.hook_resid_post
    attn    blocks.{layer}.hook_attn_out
    mlp     blocks.{layer}.hook_mlp_out
    head    blocks.{layer}.attn.hook_z, one head

Under guidance, a cache contains the conditional branch, so "mean" and "patch" act in that branch only.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_lens.denoising.cache import TrajectoryCache
from diffusion_lens.explorer.as_python import TOP_K, Written, call, load_code, views_code
from diffusion_lens.explorer.spec import FORCE, RUN_SETTINGS, Intervention, Spec
from diffusion_lens.hooks.names import Hook, attn_out, loop_hook, mlp_out, resid_post
from diffusion_lens.interventions import at_steps, mean_ablate, on_branch, replace, swap, zero_ablate
from diffusion_lens.model.config import reached
from diffusion_lens.model.shapes import Tokens
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.results import loading_options
from diffusion_lens.settings import pick_layer

POINTS: dict[str, Callable[[int], str]] = {
    "resid": resid_post,
    "attn": attn_out,
    "mlp": mlp_out,
    "head": lambda layer: f"blocks.{layer}.attn.hook_z",
}
FROM_ANOTHER_RUN = {"mean": mean_ablate, "patch": swap}
_LONGEST = 72  # characters of arguments on the line of their call
Edit = tuple[str, Written]
# The spec of the run from which an intervention of a spec takes activations, and the cache of a plan at a hook point.
Sources = Callable[[Spec, Intervention], Spec]
Caches = Callable[["Plan", str], TrajectoryCache]


def settings_of(spec: Spec) -> dict[str, Any]:
    """The keyword arguments of `denoise` that a spec sets."""
    values = {name: getattr(spec, name) for name in RUN_SETTINGS}
    return {name: x for name, x in values.items() if name in ("steps", "seed") or x not in (None, 0.0)}


def arguments_text(spec: Spec) -> str:
    """The arguments of `denoise`, without hooks."""
    # A brace that begins the name of a selection, such as {step}, is a part of the prompt here.
    prompt = re.sub(r"\{(?=(?:step|layer|head|position|name)\})", r"\\x7b", repr(spec.prompt))
    return ", ".join([prompt, *(f"{name}={value!r}" for name, value in settings_of(spec).items())])


@dataclass(frozen=True, eq=False)
class Plan:
    """The hooks of a spec, and its code.

    Attributes:
        model: Model of the spec.
        spec: Run, settings and interventions.
        forced: Hook points and hooks that write tokens into the canvas.
        changed: Hook points and hooks inside the network.
        statements: Statements that make the caches of other runs, which the hooks take.
        imports: What the hooks need, as module and name.
        n_bytes: Size of these caches.
        weights: SHA-256 of the weights that computed the run, which the code demands.
    """

    model: DiffusionTransformer
    spec: Spec
    forced: tuple[Edit, ...]
    changed: tuple[Edit, ...]
    statements: tuple[str, ...]
    imports: frozenset[tuple[str, str]]
    n_bytes: int
    weights: str = ""

    @classmethod
    def of(
        cls,
        model: DiffusionTransformer,
        spec: Spec,
        source_of: Sources,
        cache_of: Caches,
        known: "dict[str, Plan] | None" = None,
    ) -> "Plan":
        """The plan of a spec.

        Args:
            known: Plans of the runs from which others take activations, by id; each is made once.
        """
        known = {} if known is None else known
        writes, changes = list[Edit](), list[Edit]()
        statements, imports, n_bytes = dict[str, None](), frozenset[tuple[str, str]](), 0
        for one in spec.interventions:
            if one.what == FORCE:
                writes.append(forced(model, one))
                continue
            source = None
            if one.what != "zero":
                taken, point = source_of(spec, one), point_of(model, one)
                if taken.id not in known:
                    known[taken.id] = cls.of(model, taken, source_of, cache_of, known)
                inner = known[taken.id]
                variable = f"source_{inner.spec.id[1:7]}_{one.layer}_{one.site}"
                source = Written(cache_of(inner, point), variable)
                statements |= dict.fromkeys((*inner.statements, inner.cache_statement(point, variable)))
                imports |= inner.imports
                n_bytes += source.value.n_bytes
                if one.what == "mean" and model.cfg.opens_blocks:
                    source, line = _reached(source)
                    statements[line] = None
            changes.append(changed(model, spec, one, source))
        used = imports.union(*(written.imports for _, written in (*writes, *changes)))
        return cls(model, spec, tuple(writes), tuple(changes), tuple(statements), used, n_bytes)

    @property
    def network_hooks(self) -> list[tuple[str, Hook]]:
        """The hooks inside the network."""
        return [(point, written.value) for point, written in self.changed]

    @property
    def fwd_hooks(self) -> list[tuple[str, Hook]]:
        """All hooks of the run."""
        return [(point, written.value) for point, written in self.forced] + self.network_hooks

    @property
    def prelude(self) -> str:
        """Imports, the model, the caches of other runs, and the hooks."""
        cfg = self.model.cfg
        dtype = str(cfg.dtype).removeprefix("torch.")
        described = {"model": cfg.model_name, "mode": cfg.mode, "architecture": cfg.architecture.to_dict()}
        described |= {"dtype": dtype, "weights_sha256": self.weights, **loading_options(self.model)}
        lines = [load_code(described, {("torch", ""), *self.imports}), *self.statements]
        if self.forced:
            lines.append(f"forced = [\n{_listed(self.forced)}]")
        if self.changed:
            lines.append(f"hooks = [\n{_listed(self.changed)}]")
        return "\n\n".join(lines)

    @property
    def hooks_argument(self) -> str:
        """The argument that passes the hooks to `denoise`; empty without interventions."""
        named = [name for name, edits in (("forced", self.forced), ("hooks", self.changed)) if edits]
        return f", fwd_hooks={' + '.join(named)}" if named else ""

    @property
    def run(self) -> str:
        """Code that makes `model` and `trajectory`."""
        arguments = f"{arguments_text(self.spec)}{self.hooks_argument}"
        if len(arguments) > _LONGEST:
            arguments = f"\n    {arguments}\n"
        return f"{self.prelude}\n\ntrajectory = model.denoise({arguments})"

    def cached(self, names: str) -> str:
        """Code that makes `trajectory`, and `cache` of some hook points at one step; `names` is an expression."""
        return (
            f"{self.prelude}\n\ntrajectory, cache = model.denoise_with_cache(\n"
            f"    {arguments_text(self.spec)}{self.hooks_argument},\n"
            f"    names_filter={names}, steps_filter={{step}},\n)"
        )

    def cache_statement(self, point: str, variable: str) -> str:
        """The statement that makes the cache of a hook point, for the hooks of another run."""
        edits = [*self.forced, *self.changed]
        given = f", fwd_hooks=[\n{_listed(edits)}]" if edits else ""
        arguments = f"{arguments_text(self.spec)}, names_filter={point!r}{given}"
        return f"_, {variable} = model.denoise_with_cache(\n    {arguments}\n)"

    def views(self) -> dict[str, str]:
        """The code of the views that need no other result: run, canvas, predictions, attention."""
        # The canvases of the run contain the tokens that are forced.
        hooks = ", fwd_hooks=hooks" if self.changed else ""
        return views_code(self.run, self.cached, f"trajectory.predictions(model, top_k={TOP_K}{hooks})")


def _reached(source: Written) -> tuple[Written, str]:
    """A cache without the positions that a text has not reached, and the statement that makes it."""
    variable, cache = f"reached_{source.text}", source.value
    kept = {
        step: {name: x[:, reached(cache.canvases[step, 0])] for name, x in at.items()} for step, at in cache.items()
    }
    statement = (
        f"# The mean is over the positions that the text has reached.\n{variable} = {{\n"
        f"    step: {{name: x[:, {source.text}.canvases[step, 0] >= 0] for name, x in at.items()}}\n"
        f"    for step, at in {source.text}.items()\n}}"
    )
    return Written(kept, variable), statement


def _listed(edits: Sequence[Edit]) -> str:
    return "".join(f"    ({point!r}, {written.text}),\n" for point, written in edits)


def point_of(model: DiffusionTransformer, one: Intervention) -> str:
    """The hook point of an intervention on an activation; a `ValueError` if the model has no such layer or head."""
    assert one.site is not None
    assert one.layer is not None
    layer = pick_layer(one.layer, model.cfg.n_layers)
    if one.head is not None and one.head >= model.cfg.n_heads:
        raise ValueError(f"head={one.head} is not one of the heads 0 to {model.cfg.n_heads - 1} of this model")
    return POINTS[one.site](layer)


def token_of(model: DiffusionTransformer, one: Intervention) -> int:
    """The id that a forced position gets; a `ValueError` where it should be masked again and cannot."""
    if one.token is not None:
        return int(model.to_single_token(one.token))
    if model.cfg.is_autoregressive:
        raise ValueError(
            f"the text of {model.cfg.model_name!r} grows at its end, so no position is masked again: force another "
            "token"
        )
    if model.cfg.uniform_noise:
        raise ValueError(f"the noise of {model.cfg.model_name!r} is uniform, so nothing is masked: force another token")
    return model.cfg.blank


def forced(model: DiffusionTransformer, one: Intervention) -> tuple[str, Written]:
    """Hook point and hook that write a token into the canvas which a step reads."""
    assert one.position is not None
    token = torch.tensor(token_of(model, one))
    value = Written(token, f"torch.tensor({token.item()})", frozenset({("torch", "")}))
    return loop_hook("hook_tokens"), call(at_steps, call(replace, value, [one.position]), one.step)


def changed(model: DiffusionTransformer, spec: Spec, one: Intervention, source: Written | None) -> tuple[str, Written]:
    """Hook point and hook that change an activation; `source` is the cache of another run by step, or `None`."""
    positions = None if one.positions is None else list(one.positions)
    heads = None if one.head is None else [one.head]
    if source is None:
        hook = call(zero_ablate, positions=positions, heads=heads)
    else:
        hook = call(FROM_ANOTHER_RUN[one.what], source, positions=positions, heads=heads)
        hook = call(on_branch, hook, "conditional") if spec.cfg_scale else hook
    if one.steps is not None:
        hook = call(at_steps, hook, list(one.steps))
    return point_of(model, one), hook


def check_position(model: DiffusionTransformer, one: Intervention, n_given: int, n_pos: int, n_steps: int) -> None:
    """Raise a `ValueError` unless a forced position is on the canvas which its step reads."""
    if one.what != FORCE:
        return
    assert one.position is not None
    assert one.step is not None
    if one.step >= n_steps or one.position >= n_pos:
        raise ValueError(
            f"step={one.step} and position={one.position}; the run has the steps 0 to {n_steps - 1} and the positions "
            f"0 to {n_pos - 1}"
        )
    if model.cfg.is_autoregressive and one.position >= n_given + one.step:
        raise ValueError(
            f"position {one.position} is not yet written at step {one.step}: the text grows at its end, and has "
            f"{n_given + one.step} tokens there"
        )


def require_reached(spec: Spec, tokens: Tokens, step: int) -> None:
    """Raise a `ValueError` if a position is masked again in a block that this step, on these tokens, has not opened."""
    for one in spec.interventions:
        if one.what != FORCE or one.step != step or one.token is not None or reached(tokens[0, one.position]):
            continue
        raise ValueError(
            f"position {one.position} is in a block that is not open at step {one.step}, so there is nothing to mask: "
            "choose a later step, or force a token"
        )
