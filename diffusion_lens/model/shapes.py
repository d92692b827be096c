"""Names of tensor axes. Every annotation in the package uses these names, and no others.

batch        rows of a batch: independent prompts, noise samples, or patched copies of one prompt
pos          positions of the sequence, whether given or masked
query, key   positions, as `pos`: the position that attends, and the position that is attended to
selected     positions selected from `pos`, in the order requested
block        blocks of positions of a canvas, from left to right
step         denoising steps
branch       branches of guidance: the pass with the prompt, and the one without
transition   pairs of consecutive denoising steps
point        hook points, in order
layer        blocks, in order
row, column  places in a batch whose rows hold positions of several sequences
head         attention heads
kv_head      key/value heads; fewer than `head` with grouped-query attention
d_model      width of the residual stream
d_head       width of one head
frequency    rotary frequencies, one for each pair of dimensions of a head
d_mlp        hidden units of the MLP
expert       experts of a layer, of which a router chooses a few for each position
chosen       experts that a position is processed by, in order
d_cond       width of the vector that conditions a network on the time
d_vocab      tokens that the model can read (rows of the embedding)
d_vocab_out  tokens that the model can write (columns of the head), without [MASK]
token        tokens that occur in a result, in the order of their ids
sample       samples of noise
cell         cells of a grid, each a restored or patched run
answer       tokens of an answer, in order
order        orders in which an answer is revealed
entry        rows of a grid, of a list of pairs, or of a table, in order
level        noise levels, or ranges of them
feature      features of a dictionary
example      positions at which a feature is largest, the largest first
axis         axes of a grid
canvas       canvases of a denoising run: one before each step, and the final one; or the two of a pair
run          the two runs of a prompt that are compared
rest         any further axes, as in `*rest`
role         roles of tokens in a fact: first token of the subject, last token of the prompt, ...
fact         facts of a study
control      controls of a study
cluster      groups of facts that are not independent, such as those about one person
request      facts for which values are optimised
prompt       prompts of one request
probe        prompts that test an edit
class        classes that a linear probe tells apart
node, edge   parts of the network at a step and position in the graph of a run, and what passes from one to another
writer       parts of the network that write to the residual stream
reader       inputs of parts that read it
state        states of the model: without an edit, and with it; or clean, spliced and ablated
iteration    iterations of a gradient descent
d, d_other   widths of two sets of vectors that are compared
rank         leading principal components, or products of a low-rank update
component    singular values or principal components
statistic    measures of similarity
measure      measures of how sure a prediction is: confidence, entropy, margin
reading      steps, and summaries of the course of a measure over them
bin          bins of confidence
class        classes of words
resample     random pairings, subsets or samples of facts
target       tokens whose rank and probability are read
top          likeliest tokens, the likeliest first
subset       facts of one random subset
member       facts of one group
candidate    candidate answers
parameter    weight matrices, in the order of their names
term         terms of a sum of outer products
route        attention scores from reader to source: forward, reverse, and counterfactual
estimate     two numbers that are compared: of own and shuffled pairs, or predicted and measured
"""

from typing import TypeAlias

from jaxtyping import Bool, Float, Int
from torch import Tensor

Tokens: TypeAlias = Int[Tensor, "batch pos"]
PosMask: TypeAlias = Bool[Tensor, "batch pos"]
Resid: TypeAlias = Float[Tensor, "batch pos d_model"]
Logits: TypeAlias = Float[Tensor, "batch pos d_vocab_out"]
