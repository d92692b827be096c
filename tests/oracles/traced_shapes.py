"""Random models of chosen sizes, with the query on which a trace of them is measured."""

from dataclasses import dataclass
from typing import Any

import torch

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer, Query
from diffusion_lens.analysis import CausalTrace, causal_trace
from weight_conversion import Architecture

SUBJECT, NOISE, SEED, WINDOW = (2, 5), 0.2, 1, 10


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and its query. The answer is read in the last row, in place or as the next token."""

    variant: str
    n_layers: int = 8
    d_model: int = 256
    d_mlp: int = 1024
    n_heads: int = 4
    d_vocab: int = 8000
    n_pos: int = 16
    samples: int = 10

    @property
    def masked(self) -> bool:
        """Whether the model is a masked diffusion model."""
        return self.variant == "masked"

    def build(self) -> HookedDiffusionTransformer:
        """A model with random weights, scaled so that its predictions are confident."""
        architecture = Architecture(
            family="lit_gpt",
            name="benchmark",
            n_layers=self.n_layers,
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_key_value_heads=self.n_heads,
            d_head=self.d_model // self.n_heads,
            d_mlp=self.d_mlp,
            d_vocab=self.d_vocab,
            d_vocab_out=self.d_vocab,
            n_ctx=2048,
            attention_dir="bidirectional" if self.masked else "causal",
            readout="in_place" if self.masked else "shifted",
            mask_token_id=self.d_vocab - 1 if self.masked else None,
        )
        model = HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu"))
        for weight in model.blocks.parameters():
            if weight.dim() == 2:
                weight *= 2
        model.unembed.weight *= 16
        return model

    def query(self, model: HookedDiffusionTransformer) -> Query:
        """A query of random tokens. The answer is the most likely token of the clean run."""
        tokens = torch.randint(self.d_vocab - 1, (self.n_pos,), generator=torch.Generator().manual_seed(0))
        if self.masked:
            tokens[-1] = self.d_vocab - 1
        answer = model(tokens[None], logits_at=[-1])[0, -1].argmax()
        return Query(tokens, SUBJECT, (self.n_pos - self.masked,), (int(answer),))

    def trace(self, model: HookedDiffusionTransformer, query: Query, **options: Any) -> CausalTrace:
        """The trace to measure."""
        return causal_trace(model, query, noise=NOISE, samples=self.samples, seed=SEED, window=WINDOW, **options)
