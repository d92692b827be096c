"""`{cost-table}`: memory and time of each job on LLaDA-8B and Dream-7B, computed as `--dry-run` computes them.

A job with a command is priced by the command itself. The others, which no command does alone, are priced by its cost
model.
"""

import json
import shlex
from dataclasses import dataclass

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tables import markdown, parsed
from typer.testing import CliRunner

from diffusion_lens.cli import app
from diffusion_lens.cli.cost import config_of, readable
from diffusion_lens.cli.load_model import ModelChoice
from diffusion_lens.cost import DEVICES, Cost, forward, second_moment

MODELS = ("llada-8b-instruct", "dream-7b-instruct")
ON = ("a100-80", "h100")
BLOCK = 8
FACT = '--prompt "The capital of France is" --answer " Paris" --length 24'
SUBJECT = f"{FACT} --subject France"
COMMANDS = {
    "denoise 64 new tokens after a prompt of 32, 64 steps": 'denoise {} "France" --length 96 --steps 64',
    "the same with guidance": 'denoise {} "France" --length 96 --steps 64 --cfg-scale 1',
    "logit lens of one canvas": f"lens {{}} {FACT}",
    "logit lens of 32 steps": f"lens {{}} {FACT} --steps 32",
    "causal trace, 10 samples": f"trace {{}} {SUBJECT}",
    "causal trace of each of 8 steps, 10 samples": f"trace {{}} {SUBJECT} --steps 8",
    "patch grid of `resid_pre`": f'patch {{}} {FACT} --corrupted "The capital of Italy is"',
    "patch grid of `z`, each head": f'patch {{}} {FACT} --corrupted "The capital of Italy is" --site z',
    f"v\\*, 20 iterations at block {BLOCK}": f"rome {{}} {SUBJECT} --layer {BLOCK}",
    "averages of 100 facts": "aie {} --data known-1000 --length 24 --limit 100",
    "signatures of 16 pairs, float32": "signatures {} --data parent-child --length 24 --limit 16 --batch-size 16 "
    "--max-bytes 16000000000 --dtype float32",
}


@dataclass(frozen=True)
class Price:
    """Memory in bytes, and time in seconds on each of `ON`, if any."""

    memory: int
    seconds: tuple[float, ...] = ()

    @property
    def cells(self) -> tuple[str, str]:
        """Memory and times in words."""
        memory = f"{self.memory / 1e9:.1f} GB"
        if not self.seconds:
            return memory, ""
        first, second = (readable(seconds) for seconds in self.seconds)
        if first.split()[1] == second.split()[1]:
            first = first.split()[0]
        return memory, f"{first} / {second}"


def price_of_command(command: str, model: str) -> Price:
    """The price of a command, from its own dry run; a `ValueError` if it fails."""
    arguments = shlex.split(command.format(model))
    dtype = "float32" if "float32" in arguments else "bfloat16"
    seconds = []
    for device in ON:
        options = ["--dtype", dtype, "--device", device, "--dry-run", "--json"]
        result = CliRunner().invoke(app, [*arguments, *options])
        if result.exit_code:
            raise ValueError(f"{shlex.join([*arguments, *options])} says {result.output}")
        results = json.loads(result.output)["results"]
        seconds.append(results["seconds"])
    return Price(results["memory_bytes"], tuple(seconds))


def price_of_work(work: Cost) -> Price:
    """The price of work that no command does alone."""
    return Price(work.process_bytes, tuple(work.seconds(DEVICES[name]) for name in ON))


def rows() -> list[tuple[str, ...]]:
    """A row for each job: memory and time for each model."""
    configs = [config_of(ModelChoice(name, device=ON[0], dtype="bfloat16")) for name in MODELS]
    passes = [forward(cfg, 16, 64) for cfg in configs]
    priced = {"load": [Price(each.weight_bytes) for each in passes]}
    priced["a forward pass of 16 rows of 64 positions"] = [price_of_work(each) for each in passes]
    for job, command in COMMANDS.items():
        priced[job] = [price_of_command(command, name) for name in MODELS]
    priced[f"second moment of keys at block {BLOCK}, 1,000 texts of 64 positions"] = [
        price_of_work(second_moment(cfg, [64] * 1000, BLOCK)) for cfg in configs
    ]
    return [(job, *(cell for price in prices for cell in price.cells)) for job, prices in priced.items()]


class CostTable(SphinxDirective):
    """`{cost-table}`."""

    def run(self) -> list[nodes.Node]:
        head = ("job", "LLaDA-8B, memory", "about, A100 / H100", "Dream-7B, memory", "about, A100 / H100")
        return parsed(self, markdown(head, rows()))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("cost-table", CostTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
