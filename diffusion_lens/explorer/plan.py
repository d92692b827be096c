"""A spec on a model: the hooks of its interventions, and the code of the run and of its views."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from diffusion_lens.config import reached
from diffusion_lens.denoising.as_python import WEIGHTS, load_statement
from diffusion_lens.denoising.cache import TrajectoryCache
from diffusion_lens.denoising.explored_code import (
    PATTERN,
    alternatives_statements,
    attention_statements,
    canvas_statements,
)
from diffusion_lens.explorer.edits import changed, forced, point_of, token_of
from diffusion_lens.explorer.spec import FORCE, Intervention, Spec
from diffusion_lens.explorer.written import Imports, Written, import_lines
from diffusion_lens.hook_names import Hook, loop_hook
from diffusion_lens.model.transformer import DiffusionTransformer

Edit = tuple[str, Written]
_LONGEST = 72  # characters of arguments on the line of their call
# The cache of a run at a hook point, by the run's spec.
Caches = Callable[[Spec, str], TrajectoryCache]


def settings_of(spec: Spec) -> dict[str, Any]:
    """The keyword arguments of `denoise` that a spec sets."""
    names = ("length", "steps", "sampler", "cfg_scale", "temperature", "seed")
    defaults = {"cfg_scale": 0.0, "temperature": 0.0, "length": None, "sampler": None}
    values = {name: getattr(spec, name) for name in names}
    return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}


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
    imports: Imports
    n_bytes: int
    weights: str = ""

    @classmethod
    def of(
        cls, model: DiffusionTransformer, spec: Spec, source_of: Callable[[Intervention], Spec], caches: Caches
    ) -> "Plan":
        """The plan of a spec.

        Args:
            source_of: Spec of the run from which an intervention takes activations.
            caches: Function that runs a spec and gives the activations at a hook point.
        """
        writes, changes = list[Edit](), list[Edit]()
        statements, imports, n_bytes = dict[str, None](), frozenset[tuple[str, str]](), 0
        for one in spec.interventions:
            if one.what == FORCE:
                writes.append(forced(model, one))
                continue
            source = None
            if one.what != "zero":
                other = source_of(one)
                inner, source = _source(model, other, one, source_of, caches)
                statements |= dict.fromkeys(inner.statements)
                statements[_cache_statement(inner, one, source.text)] = None
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
        loaded = load_statement({**described, "dtype": dtype, "weights_sha256": self.weights})
        needed = {("torch", ""), ("diffusion_lens", "HookedDiffusionTransformer"), *self.imports}
        needed |= {WEIGHTS} if self.weights else set()
        lines = [import_lines(needed), loaded, *self.statements]
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
        return f"{self.prelude}\n\ntrajectory = model.denoise({arguments}){self._forced_canvases}"

    def cached(self, names: str) -> str:
        """Code that makes `trajectory`, and `cache` of some hook points at one step; `names` is an expression."""
        return (
            f"{self.prelude}\n\ntrajectory, cache = model.denoise_with_cache(\n"
            f"    {arguments_text(self.spec)}{self.hooks_argument},\n"
            f"    names_filter={names}, steps_filter={{step}},\n){self._forced_canvases}"
        )

    @property
    def _forced_canvases(self) -> str:
        """Statements that record the canvases which the steps of forced tokens read, in the trajectory."""
        lines = [
            f"\ntrajectory.canvases[{one.step}, 0, {one.position}] = {token}  # the canvas that step {one.step} reads"
            for one, token in self.forced_tokens
        ]
        return "".join(lines)

    @property
    def forced_tokens(self) -> list[tuple[Intervention, int]]:
        """The interventions on the canvas, with the id of the token that each writes."""
        return [(one, token_of(self.model, one)) for one in self.spec.interventions if one.what == FORCE]

    def views(self) -> dict[str, str]:
        """The code of the views that need no other result: run, canvas, alternatives, attention."""
        return {
            "run": self.run,
            "canvas": f"{self.run}\n\n{canvas_statements()}",
            "alternatives": f"{self.cached(repr(loop_hook('hook_logits')))}\n"
            + alternatives_statements(unwritten(self.model)),
            "attention": f"{self.cached(PATTERN)}\n{attention_statements()}",
        }


def unwritten(model: DiffusionTransformer) -> int:
    """The id of the logits that the loop never writes, that of [MASK]; -1 if the head has no column for it."""
    mask = model.cfg.mask_token_id
    return mask if mask is not None and mask < model.cfg.d_vocab_out else -1


def _source(
    model: DiffusionTransformer,
    spec: Spec,
    one: Intervention,
    source_of: Callable[[Intervention], Spec],
    caches: Caches,
) -> tuple[Plan, Written]:
    """The plan of the run from which an intervention takes activations, and its cache."""
    inner = Plan.of(model, spec, source_of, caches)
    return inner, Written(caches(spec, point_of(model, one)), f"{_variable(spec)}_{one.layer}_{one.site}")


def _cache_statement(inner: Plan, one: Intervention, variable: str) -> str:
    point = point_of(inner.model, one)
    hooks = [edits for edits in (inner.forced, inner.changed) if edits]
    given = f", fwd_hooks=[\n{''.join(map(_listed, hooks))}]" if hooks else ""
    return (
        f"_, {variable} = model.denoise_with_cache(\n    {arguments_text(inner.spec)}, names_filter={point!r}{given}\n)"
    )


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


def _variable(spec: Spec) -> str:
    return f"source_{spec.id[1:7]}"


def _listed(edits: Sequence[Edit]) -> str:
    return "".join(f"    ({point!r}, {written.text}),\n" for point, written in edits)
