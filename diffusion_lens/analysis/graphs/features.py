"""The features of a transcoder as nodes: what an MLP changed between two runs, divided among its features.

Let f_i be the features of a block's transcoder in the clean run, f'_i in the corrupted one, and d_i the rows of its
decoder. At each position

    mlp_out - mlp_out' = Σ_i c_i d_i + error,    c_i = s_i e_i · (x - x'),    s_i = (f_i - f'_i) / (a_i - a'_i)

where x is the normalised stream, e_i the columns of the encoder, and a_i = e_i · x + bias the pre-activations. So c_i
is f_i - f'_i, which a feature that depends on a_i alone passes on to it by the slope s_i (the rescale rule of DeepLIFT,
exact for every elementwise function, jumps included), and a_i is linear in x. Only the norm is integrated over the path
of the stream. The error is a source, as in circuit-tracer (Ameisen et al. 2025): its effect is passed on to nothing.
Left in it, beside what the transcoder does not reconstruct, are

- changes of a feature at a slope above 100, which are jumps at almost equal pre-activations;
- for a transcoder that is conditioned on the share of masked positions, what this share alone changes where the two
  canvases have another one. Each run is read with its own share.

In each pass the features with the largest absolute effects are nodes of their own. The others are summed up in the node
of their MLP, and pass on what they have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffusion_lens.analysis.dictionaries.sparse import SparseDictionary
from diffusion_lens.analysis.engine.kept_run import NetworkInput
from diffusion_lens.hooks.names import mlp_out, own_name
from diffusion_lens.model.transformer import DiffusionTransformer
from diffusion_lens.records.identity import value_in_words

STEEPEST = 100.0  # slope s_i above which a change is passed on to no pre-activation


def transcoders_of(model: DiffusionTransformer, features: Sequence[SparseDictionary]) -> dict[int, SparseDictionary]:
    """The transcoders by block; a `ValueError` if one is of no MLP of this model, or a block has two."""
    found: dict[int, SparseDictionary] = {}
    d_model, n_layers = model.cfg.d_model, model.cfg.n_layers
    for one in features:
        layer = next((layer for layer in range(n_layers) if own_name(one.writes) == mlp_out(layer)), None)
        if layer is None or own_name(one.reads) != read_point(layer):
            raise ValueError(
                f"features: a dictionary reads {one.reads!r} and writes {one.writes!r}, but nodes are features of "
                f"transcoders of MLPs: that of block 1 reads {read_point(1)!r} and writes {mlp_out(1)!r}. The model "
                f"has {n_layers} blocks"
            )
        if one.W_enc.shape[0] != d_model or one.W_dec.shape[1] != d_model:
            raise ValueError(f"features: {one} has another width than the model's stream, {d_model}")
        if layer in found:
            raise ValueError(f"features: block {layer} has two transcoders; give one")
        found[layer] = one
    return found


def read_point(layer: int) -> str:
    """The hook point that a transcoder of the MLP of a block reads."""
    return f"blocks.{layer}.ln2.hook_normalized"


def share_masked(given: NetworkInput) -> float:
    """The share of the positions that the network reads which have [MASK]."""
    mask = given.model.cfg.mask_token_id
    return 0.0 if mask is None else float((given.tokens == mask).float().mean())


def digests(transcoders: Mapping[int, SparseDictionary]) -> dict[str, str]:
    """A hash of each transcoder, by block."""
    return {str(layer): value_in_words(one) for layer, one in transcoders.items()}


def transcoders_of_graph(
    record: Mapping[str, Any], model: DiffusionTransformer, features: Sequence[SparseDictionary]
) -> dict[int, SparseDictionary]:
    """The transcoders by block; a `ValueError` unless the graph with this record has the same."""
    found = transcoders_of(model, features)
    if (given := digests(found)) != record["features"]:
        raise ValueError(f"features: the graph has {record['features']}, by block, and these are {given}")
    return found


class Parts(NamedTuple):
    """The change of an MLP, by position and part: its other features, features that are nodes, and the error.

    A part of the second kind is another feature at each position, and at some none.
    """

    written: Float[Tensor, "pos writer d_model"]
    toward: Float[Tensor, "pos reader d"]  # directions at what the transcoder reads, of all parts but the error
    numbers: Int[Tensor, "pos writer"]  # of the feature, -1 where there is none


@dataclass(frozen=True, eq=False)
class MLPChange:
    """What a transcoder reads, and its MLP writes, in the clean and the corrupted run of a step."""

    transcoder: SparseDictionary
    read: tuple[Float[Tensor, "pos d"], Float[Tensor, "pos d"]]
    shares: tuple[float, float]
    written: Float[Tensor, "pos d_model"]  # clean less corrupted

    def features(self) -> tuple[Float[Tensor, "pos feature"], Float[Tensor, "pos feature"]]:
        """The change c_i and the slope s_i of every feature."""
        weights = self.transcoder
        x, other = (each.to(weights.W_enc) for each in self.read)
        pre, other_pre = (weights.pre(each, share) for each, share in zip((x, other), self.shares, strict=True))
        slope = (weights.activate(pre) - weights.activate(other_pre)) / (pre - other_pre)
        slope = slope.where((pre != other_pre) & (slope.abs() <= STEEPEST), 0)
        return slope * ((x - other) @ weights.W_enc), slope

    def parts(self, direction: Float[Tensor, "pos d_model"], most: int) -> Parts:
        """Its parts, for a direction at its output; at most so many features are parts of their own."""
        # 1. Change and slope of every feature.
        weights, x = self.transcoder, self.read[0].to(self.transcoder.W_enc)
        change, slope = self.features()
        gain = direction.to(weights.W_dec) @ weights.W_dec.T
        toward = gain * slope
        error = self.written.to(weights.W_dec) - change @ weights.W_dec

        # 2. The largest effects, and the part that each is at its position.
        sizes = (gain * change).abs().flatten()
        best = sizes.topk(min(most, len(sizes))).indices
        best = best[sizes[best] > 0]
        at = best // change.shape[1], best % change.shape[1]
        place = (at[0][:, None] == at[0]).tril().sum(dim=1)
        n_parts = 2 + max(place.tolist(), default=0)

        # 3. What the parts write, and the directions at what they read.
        of_nodes, toward_nodes = change[at], toward[at]
        change[at] = toward[at] = 0
        written = error.new_zeros(len(x), n_parts, error.shape[1])
        written[:, 0], written[:, -1] = change @ weights.W_dec, error
        written[at[0], place] = of_nodes[:, None] * weights.W_dec[at[1]]
        read = x.new_zeros(len(x), n_parts - 1, x.shape[1])
        read[:, 0] = toward @ weights.W_enc.T
        read[at[0], place] = toward_nodes[:, None] * weights.W_enc.T[at[1]]
        numbers = torch.full((len(x), n_parts), -1)
        numbers[at[0].cpu(), place.cpu()] = at[1].cpu()
        return Parts(written.to(direction), read.to(direction), numbers)


@dataclass(frozen=True, eq=False)
class MLPInGraph:
    """An MLP in copies of a clean pass, of which each graph keeps some features, and keeps the error or replaces it."""

    transcoder: SparseDictionary
    share: float
    clean: tuple[Float[Tensor, "pos d"], Float[Tensor, "pos d_model"]]  # read, and written
    other: tuple[Float[Tensor, "pos feature"], Float[Tensor, "pos d_model"]]  # in place of features, and of the output
    nodes: tuple[Int[Tensor, "entry"], Int[Tensor, "entry"]]  # position and number of features that are parts
    parts: list[int]  # places among the parts, of the error and then of these features

    def output(
        self,
        x: Float[Tensor, "member pos d"],
        members: Float[Tensor, "member pos writer"],
        others: Float[Tensor, "member pos"],
    ) -> Float[Tensor, "member pos d_model"]:
        """What the MLP writes in each graph, which reads `x`; `others` of the features are no parts. 1 keeps a part, 0
        replaces it."""
        weights, (features, written) = self.transcoder, self.other
        members, others, written = (each.to(weights.W_dec) for each in (members, others, written))
        error = self.clean[1].to(weights.W_dec) - written
        error = error - (weights.encode(self.clean[0].to(weights.W_enc), self.share) - features) @ weights.W_dec
        kept = others[:, :, None].expand(-1, -1, features.shape[1]).clone()
        error_part, *parts = self.parts
        kept[:, self.nodes[0], self.nodes[1]] = members[:, self.nodes[0], parts]
        n_pos = x.shape[1]
        change = (weights.encode(x.to(weights.W_enc), self.share) - features[:n_pos]) * kept
        return written[:n_pos] + change @ weights.W_dec + members[:, :, error_part, None] * error[:n_pos]
