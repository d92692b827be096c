"""The jobs of the table of `floor.py` at real size: a pretrained causal model, and the same weights read in both
directions, each beside transformers' Llama with the same weights and hooks of PyTorch.

The fact has 12 tokens, behind which the model that reads in both directions has a [MASK]. The straightforward trace and
the straightforward search are those of `causal_trace.py` and `rome.py`, with the whole network and all logits in every
pass. Every cell of that trace takes the same time, so that it is measured on the cells of one layer.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from causal_trace import Plain
from oracles import least_work
from oracles.hugging_face import everything_visible, hugging_face_llama, run_with_edited_mlp
from oracles.plain_rome import plain_search
from oracles.traced_shapes import NOISE, SEED, WINDOW, Shape
from table.jobs import Job, denoising
from torch import Tensor

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import causal_trace, optimize_value
from diffusion_lens.analysis.rome import ValueSettings, query_with_prefixes
from diffusion_lens.analysis.rome.canvases import default_essence
from diffusion_lens.data import known_1000
from diffusion_lens.settings.shared import AdaptSettings
from diffusion_lens.training import TrainingConfig
from diffusion_lens.training.corpus import Corpus
from diffusion_lens.training.distillation import TwinLoss, low_rank, trained_row
from diffusion_lens.training.trainer import _Run, _training_mode, accelerated

FACTS = Path(__file__).parents[2] / "tests" / "real" / "known_facts.json"
N_TOKENS, SAMPLES = 12, 10
BATCHES = ((1, 12), (4, 52))  # rows and positions of a forward pass
LENGTH, STEPS = 32, 8
PREFIXES = ("It was a cold day. ", "In the year before the war, nobody had heard of it. ")
SEARCH = ValueSettings(steps=10, stop_below=0.0)
MASK_TOKEN_ID = 3  # unused in SmolLM2's texts
ROWS = 24
OF_FLOOR, OF_MATMULS, OF_TRANSFORMERS = 0.85, 0.7, 1 / 1.02  # the targets


class RealSubject:
    """A pretrained model, read causally or in both directions."""

    def __init__(self, name: str, masked: bool) -> None:
        self.masked, self.kind = masked, "MDM" if masked else "AR"
        self.name, self.causal = f"{self.kind}, {Path(name).name}", name
        options: dict[str, Any] = {"mode": "bidirectional", "mask_token_id": MASK_TOKEN_ID} if masked else {}
        self.model = HookedDiffusionTransformer.from_pretrained(name, device="cpu", **options)
        self.llama = hugging_face_llama(self.model).requires_grad_(False)
        self.layers = self.model.cfg.n_layers
        facts = known_1000(FACTS)
        self.fact = min(facts, key=lambda fact: abs(len(self.model.encode(fact.prompt)) - N_TOKENS))

    def jobs(self) -> Iterator[Job]:
        """The jobs of this model; it can be used for others when the next one is taken."""
        for rows, n_pos in BATCHES:
            yield self.forward(rows, n_pos)
        yield self.tracing()
        for layer in (self.layers // 6, self.layers * 3 // 4):
            yield self.searching(layer)
        yield self.denoising(0.0)
        if self.masked:
            yield self.denoising(0.8)
            for rank in (0, 16):
                with self.training(rank) as update:
                    yield Job(f"update, {f'rank {rank}' if rank else 'all weights'}", update, rate=OF_MATMULS)

    def forward(self, rows: int, n_pos: int) -> Job:
        """A pass over canvases of random tokens that are all masked at the end, with the logits of all positions."""
        tokens = torch.randint(5, self.model.cfg.d_vocab, (rows, n_pos), generator=torch.Generator().manual_seed(0))
        if self.masked:
            tokens[:, -1] = MASK_TOKEN_ID
        mask = everything_visible(tokens) if self.masked else None
        return Job(
            f"forward, {rows} x {n_pos}",
            torch.no_grad()(lambda: self.model(tokens)),
            lambda: least_work.forward(self.layers, rows, n_pos),
            OF_FLOOR,
            torch.no_grad()(lambda: self.llama(tokens, attention_mask=mask).logits),
            difference=_largest,
            ratio=OF_TRANSFORMERS,
        )

    def tracing(self) -> Job:
        """A trace of the residual stream of all positions and layers."""
        query, layer = self.fact.to_query(self.model, first_tokens=1), self.layers // 2
        n_pos = len(query.tokens)
        kind = "masked" if self.masked else "causal"
        plain = Plain(self.model, Shape(kind, self.layers, self.model.cfg.d_model, n_pos=n_pos, samples=SAMPLES))
        settings = {"noise": NOISE, "samples": SAMPLES, "seed": SEED, "window": WINDOW}

        @torch.no_grad()
        def of_layer() -> Tensor:
            return torch.tensor([plain.cell(query, position, "resid", layer) for position in range(n_pos)])

        return Job(
            f"trace, {n_pos} positions",
            lambda: causal_trace(self.model, query, **settings),
            lambda: least_work.trace(self.layers, SAMPLES, n_pos, None if self.masked else query.subject[0]),
            OF_FLOOR,
            of_layer,
            times=self.layers,
            difference=lambda trace, scores: _largest(trace.scores[:, layer], scores),
        )

    def searching(self, layer: int) -> Job:
        """The search for v* of a fact with prefixes."""
        queries = query_with_prefixes(self.model, self.fact, PREFIXES)
        essence = default_essence(self.model, queries[0])
        canvases = [*queries, essence]
        prompts = [len(query.tokens) for query in canvases]
        # On the causal model, the vector reaches the positions from the subject's last token on.
        reached = prompts if self.masked else [len(query.tokens) - (query.subject[1] - 1) for query in canvases]
        run = partial(run_with_edited_mlp, self.llama, self.masked)
        return Job(
            f"v*, layer {layer}",
            lambda: optimize_value(self.model, queries, layer, essence=essence, **asdict(SEARCH)),
            lambda: least_work.search(self.layers, layer, SEARCH.steps, sum(reached), sum(prompts)),
            OF_FLOOR,
            lambda: plain_search(self.model, queries, essence, layer, SEARCH, run)[0],
            difference=lambda found, losses: _largest(found.losses, losses),
        )

    def denoising(self, cfg_scale: float) -> Job:
        """A run from the fact's prompt."""
        tokens = torch.tensor([self.model.encode(self.fact.prompt)])
        settings = {"steps": STEPS, "cfg_scale": cfg_scale} if self.masked else {}
        name = f"denoise{', guided' * bool(cfg_scale)}"
        return denoising(name, self.model, tokens, LENGTH, rate=OF_FLOOR, **settings)

    @contextmanager
    def training(self, rank: int) -> Iterator[Callable[[], None]]:
        """The updates of an adaptation, of all weights or of additions; their learning rate of 0 changes no weight."""
        settings = AdaptSettings(rank=rank, batch_size=ROWS)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(5, self.model.cfg.d_vocab, (ROWS, settings.length), generator=generator)
        causal = HookedDiffusionTransformer.from_pretrained(self.causal, device="cpu")
        rows = TwinLoss(causal, Corpus(tokens, torch.ones(ROWS, dtype=torch.long)), settings)
        config = TrainingConfig(steps=1, batch_size=ROWS, lr=0.0)
        with ExitStack() as inside:
            if rank:
                inside.enter_context(low_rank(self.model, rank, float(rank), generator))
                inside.enter_context(trained_row(self.model, MASK_TOKEN_ID))
            accelerator = inside.enter_context(accelerated(self.model))
            inside.enter_context(_training_mode(self.model))
            yield partial(_Run(self.model, rows, config, rows, accelerator).update, 0)


def _largest(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
