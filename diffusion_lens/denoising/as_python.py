"""Python code that repeats a run and its analyses, from the records of results.

`{step}`, `{layer}`, `{head}`, `{position}` and `{name}` stand for the selection on a page, which fills them in.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diffusion_lens.denoising.recording import Recording
from diffusion_lens.denoising.sampler import Sampler
from diffusion_lens.denoising.samplers import SAMPLERS, describe_sampler, sampler_from
from diffusion_lens.loading import shape_of

WEIGHTS = ("diffusion_lens.weights_digest", "weights_sha256")  # module and name of the function that digests weights
_OF_SAMPLERS = "diffusion_lens.denoising.samplers"
_SHOWN = 16  # characters of the digest


def call(function: str, *arguments: str, **keywords: Any) -> str:
    """A call with each argument as code; keywords that are `None` are left out, others written by `repr`."""
    given = [f"{name}={value!r}" for name, value in keywords.items() if value is not None]
    return f"{function}({', '.join([*arguments, *given])})"


def load_code(record: Mapping[str, Any]) -> str:
    """The statements that load the model of a record."""
    digest = f"from {WEIGHTS[0]} import {WEIGHTS[1]}\n" if record.get("weights_sha256") else ""
    return f"from diffusion_lens import HookedDiffusionTransformer\n{digest}\n{load_statement(record)}"


def load_statement(record: Mapping[str, Any]) -> str:
    """The statements that load the model of a record, and stop if its weights are others than the recorded ones.

    A checkpoint of one's own and edited weights have the name of the published model, which is the one that is loaded.
    """
    dtype, mode = record.get("dtype", "float32"), record.get("mode")
    loaded = call(
        "HookedDiffusionTransformer.from_pretrained",
        repr(record["model"]),
        dtype=None if dtype == "float32" else dtype,
        mode=mode,
        **_options(record["model"], mode, record["architecture"]),
    )
    weights = record.get("weights_sha256")
    check = f"{WEIGHTS[1]}(model).startswith({str(weights)[:_SHOWN]!r}), 'the run was made with other weights'"
    return f"model = {loaded}" + (f"\nassert {check}" if weights else "")


def _options(name: str, mode: str | None, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The block size and the id of [MASK] of a recorded network, where its name alone would give others."""
    given = {"block_size": recorded.get("causal_block"), "mask_token_id": recorded.get("mask_token_id")}
    if mode == "ar":
        return {}
    try:
        by_name = shape_of(name, options={} if mode is None else {"mode": mode}).to_dict()
    except (ValueError, FileNotFoundError):  # a checkpoint of one's own, or one whose block size has to be given
        return {"block_size": given["block_size"]} if mode == "block" else {}
    named = {"block_size": by_name.get("causal_block"), "mask_token_id": by_name.get("mask_token_id")}
    return {option: value for option, value in given.items() if value != named[option]}


def sampler_code(sampler: Sampler) -> tuple[str, str]:
    """A sampler as an expression, and the import that it needs: its name, or an object if its settings differ."""
    if describe_sampler(SAMPLERS[sampler.name]) == describe_sampler(sampler):
        return repr(sampler.name), ""
    return repr(sampler), f"from {_OF_SAMPLERS} import Proposal, {type(sampler).__name__}\n"


def tokens_code(tokens: Sequence[int], blank: int) -> str:
    """A prompt as an expression: the ids, with the masked positions at its end by their number."""
    n_given = len(tokens)
    while n_given and tokens[n_given - 1] == blank:
        n_given -= 1
    rest = f", *[{blank}] * {len(tokens) - n_given}" if n_given < len(tokens) else ""
    return f"torch.tensor([[{', '.join(map(str, tokens[:n_given]))}{rest}]])"


class RunCode:
    """The code of one row of a recorded run.

    Args:
        trajectory: The run.
        row: Row of the batch.
    """

    def __init__(self, trajectory: Recording, row: int) -> None:
        self._row = f".row({row})" if len(trajectory) > 1 else ""
        self.trajectory = trajectory.row(row)
        record = self.record = trajectory.record
        # Hooks, and samplers of one's own, are objects of the program that made the run, so no code repeats it.
        known = record["sampler"]["name"] in SAMPLERS
        self.is_repeatable = known and not record.get("hooks") and "replay" not in record
        self.imports = ""
        self.arguments = self._arguments(record) if self.is_repeatable else ""

    def _arguments(self, record: Mapping[str, Any]) -> str:
        run = self.trajectory
        prompt = run.tokens.masked_fill(run.real & ~run.given, run.blank)
        tokens, given, real = (x[0].tolist() for x in (prompt, run.given, run.real))
        length = None
        if run.blank < 0:  # The text grows: the prompt ends where the text begins.
            n_given = max(i for i, is_given in enumerate(given) if is_given) + 1
            # Padding follows the text of a shorter row, which alone needs none.
            tokens, length = tokens[:n_given], max(i for i, is_real in enumerate(real) if is_real) + 1
        mask = None
        if not all(real[: len(tokens)]):
            mask = f"torch.tensor([{[int(x) for x in real[: len(tokens)]]}])"
        sampler, self.imports = sampler_code(sampler_from(record["sampler"]))
        keywords = {
            "length": length,
            "steps": None if record["sampler"]["name"] == "left_to_right" else record["steps"],
            "cfg_scale": record["cfg_scale"] or None,
            "temperature": record["temperature"] or None,
            "seed": [int(seed) for seed in run.record["seeds"]],
        }
        written = [f"{name}={value!r}" for name, value in keywords.items() if value is not None]
        settings = [tokens_code(tokens, run.blank), *written, f"sampler={sampler}"]
        return ", ".join([*settings, *([f"attention_mask={mask}"] if mask else [])])

    @property
    def run(self) -> str:
        """Loads the model and makes `trajectory`."""
        if not self.is_repeatable:
            return (
                f"{load_code(self.record)}\n\n"
                "# The run had hooks or a sampler of its own, or replays another run. This file is the one that\n"
                '# trajectory.save("trajectory.safetensors") writes in the program that made the run.\n'
                "from diffusion_lens.denoising import Trajectory\n\n"
                f'trajectory = Trajectory.load("trajectory.safetensors"){self._row}'
            )
        return (
            f"import torch\n{self.imports}{load_code(self.record)}\n\n"
            f"trajectory = model.denoise({self.arguments}){self._branch}"
        )

    def cached(self, names: str) -> str:
        """Makes `cache`, the activations of some hook points at one step; `names` is an expression."""
        if not self.is_repeatable:
            return f"{self.run}\n\n# Hooks are not part of a record: denoise_with_cache under them gives\n# {names}"
        return (
            f"import torch\n{self.imports}{load_code(self.record)}\n\n"
            f"trajectory, cache = model.denoise_with_cache(\n    {self.arguments},\n"
            f"    names_filter={names}, steps_filter={{step}},\n)"
        )

    @property
    def _branch(self) -> str:
        first = self.trajectory.first_step
        return f".from_step({first})" if first else ""
