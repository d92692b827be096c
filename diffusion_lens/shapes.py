"""The words for tensor axes. Every annotation in the package is written in these, and only these.

batch        rows of a batch: independent prompts (or noise draws, or patched copies of one prompt)
pos          positions of the canvas, given and masked alike
query, key   `pos` twice more: the position that attends, and the position attended to
selected     positions selected from `pos`, in the order requested
step         denoising steps
layer        blocks, in order
head         attention heads
kv_head      key/value heads; fewer than `head` when heads are grouped
d_model      residual stream
d_head       one head
d_mlp        hidden units of the MLP
d_vocab      tokens that can be read (embedding rows)
d_vocab_out  tokens that can be written (head columns); [MASK] is not among them
sample       draws of noise
cell         cells of a grid: restored or patched runs
answer       tokens of an answer, in order
entry        rows of a grid or of a list of pairs, in order
axis         axes of a grid
role         what a token is to a fact: first of the subject, last of the prompt, ...
fact         facts that are averaged over
request      facts that a value is searched for
prompt       prompts of one request
probe        prompts that an edit is judged by
state        states of a half-revealed object
iteration    of a search by gradients
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
