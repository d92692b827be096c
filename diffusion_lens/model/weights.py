"""The weights under TransformerLens's names and shapes. Those of one block are views: writing into them edits it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens import FactoredMatrix
from transformer_lens.utilities.matrix import composition_scores

from diffusion_lens.config import DiffusionConfig
from diffusion_lens.model.block import Block
from diffusion_lens.model.embed import Embed, PosEmbed, Unembed
from diffusion_lens.model.experts import MixtureOfExperts
from diffusion_lens.model.linear import beside
from diffusion_lens.model.norm import Norm
from diffusion_lens.model.positions import Positions
from diffusion_lens.settings import Whole, pick_layer, whole_number

if TYPE_CHECKING:
    from transformer_lens.model_bridge.composition_scores import CompositionScores


class WeightViews(ABC):
    """`model.W_Q` and the like are copies that stack the blocks; `model.blocks[i].attn.W_Q` is a view to edit."""

    cfg: DiffusionConfig
    main_device: torch.device
    embed: Embed
    pos_embed: PosEmbed
    positions: Positions
    unembed: Unembed
    blocks: Sequence[Block]
    ln_final: Norm

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        return self.embed.W_E

    @property
    def W_pos(self) -> Float[Tensor, "pos d_model"]:
        """The learned vector of each position; an `AttributeError` for a model without them, as in TransformerLens."""
        return self.pos_embed.W_pos

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab_out"]:
        return self.unembed.W_U

    @property
    def b_U(self) -> Float[Tensor, "d_vocab_out"]:
        return self.unembed.b_U

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        return self._stack(lambda block: block.attn.W_Q)

    @property
    def W_K(self) -> Float[Tensor, "layer kv_head d_model d_head"]:
        return self._stack(lambda block: block.attn.W_K)

    @property
    def W_V(self) -> Float[Tensor, "layer kv_head d_model d_head"]:
        return self._stack(lambda block: block.attn.W_V)

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        return self._stack(lambda block: block.attn.W_O)

    @property
    def b_Q(self) -> Float[Tensor, "layer head d_head"]:
        return self._stack(lambda block: block.attn.b_Q)

    @property
    def b_K(self) -> Float[Tensor, "layer kv_head d_head"]:
        return self._stack(lambda block: block.attn.b_K)

    @property
    def b_V(self) -> Float[Tensor, "layer kv_head d_head"]:
        return self._stack(lambda block: block.attn.b_V)

    @property
    def b_O(self) -> Float[Tensor, "layer d_model"]:
        return self._stack(lambda block: block.attn.b_O)

    @property
    def W_in(self) -> Float[Tensor, "layer d_model d_mlp"]:
        return self._stack_mlps("W_in")

    @property
    def W_gate(self) -> Float[Tensor, "layer d_model d_mlp"]:
        return self._stack_mlps("W_gate")

    @property
    def W_out(self) -> Float[Tensor, "layer d_mlp d_model"]:
        return self._stack_mlps("W_out")

    @property
    def b_gate(self) -> Float[Tensor, "layer d_mlp"]:
        return self._stack_mlps("b_gate")

    @property
    def b_in(self) -> Float[Tensor, "layer d_mlp"]:
        return self._stack_mlps("b_in")

    @property
    def b_out(self) -> Float[Tensor, "layer d_model"]:
        return self._stack_mlps("b_out")

    def tl_parameters(self) -> dict[str, Tensor]:
        """The matrices and norm weights under TransformerLens's names, for its `SVDInterpreter`.

        Key and value heads are repeated for each query head, because tools index them by query head. `W_in` reads the
        stream after the product with `ln2.w`, which is 1 in a model with folded norms. Those of an expert are named
        "mlp.experts.3.W_in" and so on.
        """
        named = {"embed.W_E": self.W_E, "unembed.W_U": self.W_U, "ln_final.w": self.ln_final.w}
        if self.positions.learned:
            named["pos_embed.W_pos"] = self.W_pos
        queries_per_key = self.cfg.n_heads // (self.cfg.n_key_value_heads or self.cfg.n_heads)
        for i, block in enumerate(self.blocks):
            attn, mlp = block.attn, block.mlp
            weights = {
                "ln1.w": block.ln1.w,
                "attn.W_Q": attn.W_Q,
                "attn.W_K": attn.W_K.repeat_interleave(queries_per_key, dim=0),
                "attn.W_V": attn.W_V.repeat_interleave(queries_per_key, dim=0),
                "attn.W_O": attn.W_O,
                "ln2.w": block.ln2.w,
                **{f"mlp.{name}": weight for name, weight in mlp.tl_parameters().items()},
            }
            named |= {f"blocks.{i}.{name}": weight for name, weight in weights.items()}
        return named

    def tl_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The items of `tl_parameters`."""
        yield from self.tl_parameters().items()

    def blocks_with(self, submodule: str) -> list[tuple[int, Block]]:
        """Index and block of each block that has a submodule of this name: here all blocks or none."""
        return [(i, block) for i, block in enumerate(self.blocks) if submodule in block._modules]

    @property
    def all_head_labels(self) -> list[str]:
        """The names of all query heads, in order: "L0H0", "L0H1" and so on."""
        return [f"L{layer}H{head}" for layer in range(self.cfg.n_layers) for head in range(self.cfg.n_heads)]

    def all_composition_scores(self, mode: str) -> "CompositionScores":
        """How much each head reads of what each head of an earlier layer writes, by weights alone.

        ‖W_OV W_QK‖ / (‖W_OV‖ ‖W_QK‖) in Frobenius norms (Elhage et al. 2021, A Mathematical Framework for Transformer
        Circuits), as in TransformerLens. The weights of the norms count only in a model with folded norms. In a network
        that is told the time, what the time multiplies counts too: what a head reads by the scale of its norm, and what
        it writes by the gate, at the time of `model.at_time(t)`.

        Args:
            mode: What the later head composes: "Q", "K" or "V".

        Returns:
            `scores` Float[layer head layer head], earlier head first, 0 unless its layer is earlier.
        """
        # It imports all of TransformerLens's bridges, which would take a third of the time of importing this library.
        from transformer_lens.model_bridge.composition_scores import CompositionScores

        layers = list(range(self.cfg.n_layers))
        scales, gates = (torch.stack(x)[:, None] for x in zip(*map(self.attention_factors_at, layers), strict=True))
        W_Q, W_K, W_V = (scales[..., None] * self._for_each_head(weights) for weights in (self.W_Q, self.W_K, self.W_V))
        QK, OV = FactoredMatrix(W_Q, W_K.transpose(-2, -1)), FactoredMatrix(W_V, self.W_O * gates[..., None, :])
        later = {"Q": QK, "K": QK.T, "V": OV}
        if mode not in later:
            raise ValueError(f"mode={mode!r}; it must be 'Q', 'K' or 'V'")
        scores = composition_scores(OV, later[mode], broadcast_dims=True)
        index = torch.tensor(layers, device=scores.device)
        earlier = index[:, None, None, None] < index[None, None, :, None]
        return CompositionScores(scores * earlier, layers, self.all_head_labels)

    @property
    def QK(self) -> FactoredMatrix:
        """The query-key circuit of each head; grouped keys are repeated for their query heads."""
        return FactoredMatrix(self.W_Q, self._for_each_head(self.W_K).transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """The output-value circuit of each head; grouped values are repeated for their query heads."""
        return FactoredMatrix(self._for_each_head(self.W_V), self.W_O)

    def accumulated_bias(
        self, layer: Whole, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, "d_model"]:
        """Sum of the biases added to the residual stream before `layer`, after the gates of a network that is told the
        time.

        Args:
            layer: Index of the block, negative from the end; `n_layers` for the stream after the last block.
            mlp_input: Whether the bias of the attention of `layer` is included.
            include_mlp_biases: Whether biases of MLPs are included.
        """
        after_all = not mlp_input and whole_number("layer", layer) == self.cfg.n_layers
        layer = self.cfg.n_layers if after_all else pick_layer(layer, self.cfg.n_layers)
        total = self.W_E.new_zeros(self.cfg.d_model, device=self.main_device)
        for i in range(layer):
            of_attention, of_mlp = self.gates_at(i)
            total = total + beside(self.blocks[i].attn.b_O, total) * of_attention
            if include_mlp_biases:
                total = total + beside(self.blocks[i].mlp.b_out, total) * of_mlp
        if not mlp_input:
            return total
        return total + beside(self.blocks[layer].attn.b_O, total) * self.gates_at(layer)[0]

    def tokens_to_residual_directions(self, tokens: str | int | Int[Tensor, "*rest"]) -> Float[Tensor, "... d_model"]:
        """The directions whose product with the normalised stream (before ln_final's weight) are the tokens' logits.

        They include the weight of ln_final, as TransformerLens's attribution tools assume, and in a network that is
        told the time the scale of ln_final at that of `model.at_time(t)`. The biases of ln_final and of the head add a
        constant to each logit.

        Args:
            tokens: Token ids, or the text of a single token; a single id gives [d_model].
        """
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        ids = torch.as_tensor(tokens, device=self.W_U.device)
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= self.cfg.d_vocab_out):
            raise ValueError(f"the head has columns for tokens 0 to {self.cfg.d_vocab_out - 1}; got {tokens}")
        if ids.numel() == 1:
            ids = ids.reshape(())
        return self.W_U.T[ids] * self.final_weight()

    @abstractmethod
    def final_weight(self) -> Float[Tensor, "d_model"]:
        """The weight of the last norm as the network applies it."""

    @abstractmethod
    def gates_at(self, layer: int) -> tuple[Float[Tensor, "d_model"], Float[Tensor, "d_model"]]:
        """By what the outputs of a block's attention and MLP are multiplied."""

    @abstractmethod
    def attention_factors_at(self, layer: int) -> tuple[Float[Tensor, "d_model"], Float[Tensor, "d_model"]]:
        """By what a block's time multiplies what its attention reads and what it writes."""

    @abstractmethod
    def to_single_token(self, string: str) -> int:
        """The id of a string that is exactly one token."""

    def _stack(self, weight: Callable[[Block], Tensor]) -> Tensor:
        # Blocks may be on several devices.
        return torch.stack([weight(block).to(self.main_device) for block in self.blocks])

    def _stack_mlps(self, name: str) -> Tensor:
        with_experts = [i for i, block in enumerate(self.blocks) if isinstance(block.mlp, MixtureOfExperts)]
        if with_experts:
            raise ValueError(
                f"model.{name} stacks one MLP of each block, and the blocks {with_experts} have experts: use "
                f"model.blocks[{with_experts[0]}].mlp.experts[0].{name}, and likewise for other blocks and experts"
            )
        return self._stack(lambda block: getattr(block.mlp, name))

    def _for_each_head(self, weights: Tensor) -> Tensor:
        return weights.repeat_interleave(self.cfg.n_heads // weights.shape[1], dim=1)
