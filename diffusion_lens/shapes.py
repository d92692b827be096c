"""The words for tensor axes. Every annotation in the package uses these words, and no others.

batch        rows of a batch: independent prompts (or noise samples, or patched copies of one prompt)
pos          positions of the sequence, given and masked alike
query, key   `pos` again: the position that attends, and the position that is attended to
selected     positions selected from `pos`, in the order requested
step         denoising steps
layer        blocks, in order
head         attention heads
kv_head      key/value heads; fewer than `head` where heads are grouped
d_model      residual stream
d_head       one head
d_mlp        hidden units of the MLP
d_vocab      tokens that can be read (embedding rows)
d_vocab_out  tokens that can be written (head columns); [MASK] is not among them
sample       samples of noise
cell         cells of a grid: restored or patched runs
answer       tokens of an answer, in order
entry        rows of a grid or of a list of pairs, in order
axis         axes of a grid
role         roles of tokens in a fact: first of the subject, last of the prompt, ...
fact         facts of an average
request      facts for which values are optimised
prompt       prompts of one request
probe        prompts that test an edit
state        states of a half-revealed object
iteration    iterations of an optimisation by gradients
d, d_other   vectors of any width that are compared
rank         leading principal components
component    singular values or principal components
statistic    measures of similarity
draw         random pairings or subsets of facts
kept         facts of one subset
member       facts of one group
"""

from typing import TypeAlias

from jaxtyping import Bool, Float, Int
from torch import Tensor

Tokens: TypeAlias = Int[Tensor, "batch pos"]
PosMask: TypeAlias = Bool[Tensor, "batch pos"]
Resid: TypeAlias = Float[Tensor, "batch pos d_model"]
Logits: TypeAlias = Float[Tensor, "batch pos d_vocab_out"]
