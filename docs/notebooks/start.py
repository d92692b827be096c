# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Start: a fact, read in a diffusion model
#
# This notebook loads a small masked diffusion model, asks it a question, watches it write the answer, and looks
# inside with a cache, a hook and a causal trace. It runs offline on a laptop in seconds. To work through it yourself:
#
# ```sh
# pip install -c constraints.txt ".[plot,explore]" jupyterlab
# jupyter lab docs/notebooks/start.ipynb
# ```

# %%
from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.data import site_facts

model = HookedDiffusionTransformer.from_pretrained("site-mdm", device="cpu")
baseline = HookedDiffusionTransformer.from_pretrained("site-ar", device="cpu")
print(model.cfg.n_layers, "blocks,", model.cfg.n_heads, "heads,", model.cfg.d_model, "dimensions")

# %% [markdown]
# `site-mdm` is a masked diffusion model (MDM), and `site-ar` its autoregressive (AR) baseline. Both were trained on
# short documents about fictional people. A `Fact` is a question with its answer, as text:

# %%
world = site_facts.load()
fact = world.facts("description", trained="p2d", asked="d2p")[0]
fact

# %% [markdown]
# The documents say of this person only "NAME is the DESCRIPTION" (`trained="p2d"`, person to description). The
# question gives the description and asks for the name (`asked="d2p"`), so it is in *reverse*.
#
# ## Watch the model write
#
# `denoise` fills the masked positions after the prompt, step by step. Each row of the figure is the canvas after one
# step. A darker green means that the model was more certain.

# %%
run = model.denoise(fact.prompt, max_new_tokens=4, steps=6)
run.plot()

# %% [markdown]
# The name is right, and it is written last: the model first writes the full stop and the end token. (The first steps
# reveal nothing, because six steps are more than four positions need.) The AR baseline has read the same sentences,
# and writes from left to right. It answers with another name, which is the *reversal curse*:

# %%
baseline.denoise(fact.prompt, max_new_tokens=4, steps=6).plot()

# %% [markdown]
# ## Read the logits
#
# A `Query` is the fact on the canvas of this model: the tokens of the prompt, followed by [MASK].

# %%
query = fact.to_query(model, n_masks=4, first_tokens=1)
print(model.to_string(query.tokens))
print("subject at positions", list(range(*query.subject)), "- answer at position", query.answer_positions[0])

# %% [markdown]
# `run_with_cache` is that of TransformerLens: it returns the logits, and the activations at every hook point.

# %%
logits, cache = model.run_with_cache(query.tokens[None])
probabilities, tokens = logits[0, query.answer_positions[0]].softmax(-1).topk(3)
for p, token in zip(probabilities.tolist(), tokens.tolist()):
    print(f"{model.to_single_str_token(token):12} {p:.3f}")

# %% [markdown]
# At which layer does the name appear? The *logit lens* reads the residual stream after every block as if the network
# ended there. Each cell shows the likeliest token, and its colour the entropy.

# %%
from diffusion_lens.analysis import logit_lens

lens = logit_lens(model, run, targets="Plerrick")
lens.plot(step=0)

# %% [markdown]
# At the first [MASK], the first name leads from `4_pre` on, the state before block 4. So block 3 brings it there. A
# hook shows which of its parts does.
#
# ## Change an activation
#
# A hook is a function of an activation and its hook point, and returns the new activation. This one removes the
# output of attention in one block:

# %%
import torch


def zero(activation, hook):
    return torch.zeros_like(activation)


def p_of_name(hooks):
    logits = model.run_with_hooks(query.tokens[None], fwd_hooks=hooks)
    return logits[0, query.answer_positions[0]].softmax(-1)[query.answer_tokens[0]].item()


print(f"nothing removed    {p_of_name([]):.2f}")
for block in range(model.cfg.n_layers):
    print(f"attention of block {block} {p_of_name([(f'blocks.{block}.hook_attn_out', zero)]):.2f}")

# %% [markdown]
# Attention in block 3 fetches the name, and attention in block 0 is needed to read the question. The other blocks
# matter little.
#
# ## Trace a fact
#
# A causal trace does this with one state at a time. It corrupts the subject with noise, restores one state to its
# clean value, and measures how much of the answer comes back.

# %%
from diffusion_lens.analysis import causal_trace, noise_scale

trace = causal_trace(model, query, noise=noise_scale(model, [query]))
trace

# %% [markdown]
# Two places bring the name back: the last word of the description in the lower blocks, and the [MASK] from block 3
# on. A result at the end of a cell shows its figure, its settings and its table. `trace.plot()` draws the figure
# alone, and `trace.to_dataframe()` returns the table.
#
# ## Explore the run
#
# `explore` shows all of this in one view: the canvas by step, the lens, and a causal trace. Move through the steps, and
# point at a token or a cell. The button "as Python" gives the code of a view. `run.explore("run.html", ...)` writes the
# page to a file, which opens in any browser without a network.

# %%
from diffusion_lens.analysis import trace_trajectory

by_step = trace_trajectory(model, query, trajectory=run, noise=noise_scale(model, [query]))
run.explore(lens=lens, trace=by_step)

# %% [markdown]
# With the model at hand, `diffusion_lens.explorer.explore(model, fact)` is a widget that also computes what you look
# at, and new runs with other settings, forced tokens or ablated parts. `explore([model, baseline], fact)` shows both
# models side by side.
#
# Next: [hooks by step](hooks_by_step.ipynb), [causal tracing](causal_tracing.ipynb), [ROME](rome.ipynb), and [your
# own model and facts](your_own.ipynb). [Causal tracing](../causal_tracing.md) explains more of
# what is seen here, and [Concepts](../concepts.md) the words.
