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
# # Causal tracing, forward and in reverse
#
# Where does a model keep a fact? A causal trace (Meng et al. 2022) corrupts the subject of a question with noise, so
# that the answer is lost. It then restores one state at a time to its clean value, and measures how much of the
# answer comes back. This notebook traces facts in a masked diffusion model and its autoregressive (AR) baseline. To
# run it:
#
# ```sh
# pip install -c constraints.txt ".[plot,explore]" jupyterlab
# jupyter lab docs/notebooks/causal_tracing.ipynb
# ```

# %%
from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.data import site_facts

model = HookedDiffusionTransformer.from_pretrained("site-mdm", device="cpu")
baseline = HookedDiffusionTransformer.from_pretrained("site-ar", device="cpu")
world = site_facts.load()
fact = next(fact for fact in world.facts("attribute") if fact.template == "people say <subject> gladly plays")
print(f"{fact.prompt} ...{fact.answer}")

# %% [markdown]
# ## One trace
#
# `to_query` lays the question out on the canvas of the model. `noise_scale` gives three standard deviations of the
# embeddings of the subject, as in the paper.

# %%
from diffusion_lens.analysis import causal_trace, noise_scale

query = fact.to_query(model, n_masks=3)
noise = noise_scale(model, [query])
trace = causal_trace(model, query, noise=noise)
print(f"p(bassoon) is {trace.clean:.2f}, and with noise on the subject {trace.corrupted:.2f}")
trace.plot()

# %% [markdown]
# Each cell is one corrupted run with one restored state, the residual stream after a block at a position. Two places
# bring the answer back: the last word of the name in the lower blocks, and the [MASK] in the upper blocks.
#
# ## MLPs and attention
#
# Which parts of a block write these states? `"mlp"` and `"attn"` restore the outputs of some neighbouring blocks
# instead (`window=2`).

# %%
causal_trace(model, query, "mlp", window=2, noise=noise).plot()

# %%
causal_trace(model, query, "attn", window=2, noise=noise).plot()

# %% [markdown]
# MLPs matter at the name, where they look the person up. Attention matters twice: low at the name, where it brings
# the two words together, and in block 3 at the [MASK], where it fetches the answer.
#
# ## The baseline
#
# The AR baseline has no [MASK]: its answer is read at the last word of the prompt.

# %%
query_ar = fact.to_query(baseline)
trace_ar = causal_trace(baseline, query_ar, noise=noise_scale(baseline, [query_ar]))
trace_ar.plot()

# %% [markdown]
# It has the same two sites, and hands over one block earlier.
#
# ## The reverse question
#
# The documents say of this person only "NAME is the DESCRIPTION". The diffusion model finds the name from the
# description nevertheless, the AR baseline does not:

# %%
reverse = world.facts("description", trained="p2d", asked="d2p")[0]
for network in (model, baseline):
    print(network.cfg.model_name, "writes:", network.denoise(reverse.prompt, max_new_tokens=4, steps=6).text[0])

# %%
query = reverse.to_query(model, n_masks=4, first_tokens=1)
noise = noise_scale(model, [query])
trace = causal_trace(model, query, noise=noise)
trace.plot()

# %% [markdown]
# The subject is now the description. Its last word, the place, is the only one that belongs to one person, and takes
# the role that the name has above. The [MASK] takes over in the same block.
#
# ## Step by step
#
# The first token of the name is written in the last step. Does an earlier canvas lead to it by another way?
# `trace_trajectory` traces the canvas of each step that you choose.

# %%
from diffusion_lens import plots
from diffusion_lens.analysis import trace_trajectory

run = model.denoise(query.tokens[None], steps=6)
by_step = trace_trajectory(model, query, [0, 4, 5], trajectory=run, noise=noise)
plots.trace_panels([[by_step.at_step(step) for step in by_step.steps]], [[f"step {step}" for step in by_step.steps]])

# %% [markdown]
# The sites are the same at every step: the tokens that are revealed first contain nothing about the person.
#
# ## Many facts
#
# One fact is weak evidence. `average_indirect_effect` averages over facts by the role of a token, with 95% intervals.
# It leaves out facts that the model does not know, and says how many.

# %%
from diffusion_lens.analysis import average_indirect_effect

facts = world.facts("attribute")[::347]
average = average_indirect_effect(model, facts, length=16, first_tokens=1, samples=3, roles=["subject_last", "answer"])
print(f"{len(average.ids)} of {len(facts)} facts known, average total effect {average.ate:.2f}")
average.plot()

# %% [markdown]
# The handover between the two places is sharp: the last token of the subject carries the answer up to block 2, and
# the [MASK] from block 3 on. Training planted this site in these models ([model cards](../verified.md)), so the
# trace shows what it should. [Two sites of a fact](../two_sites.md) has the complete measurement, and
# [ROME](rome.ipynb) edits the fact there.
