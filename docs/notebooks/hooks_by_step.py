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
# # Hooks by step
#
# A masked diffusion model writes a text in several denoising steps, and runs its network at each of them. A hook of
# this library knows the step: it can read or change an activation at selected steps only. To run this notebook:
#
# ```sh
# pip install -c constraints.txt ".[plot,explore]" jupyterlab
# jupyter lab docs/notebooks/hooks_by_step.ipynb
# ```

# %%
from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.data import site_facts

model = HookedDiffusionTransformer.from_pretrained("site-mdm", device="cpu")
fact = site_facts.load().facts("description", asked="p2d")[-1]
run = model.denoise(fact.prompt, max_new_tokens=5, steps=5)
run.plot()

# %% [markdown]
# The steps reveal the end token, the full stop and "of". The last step writes the role and the place, the two words
# that describe this person. Step 0 reveals nothing, because the number of positions of a step is rounded down.
#
# ## A hook that looks
#
# A hook is a function of an activation and a hook point. In the loop, `hook.step` tells where it is: the number of
# the step, the canvas, and which positions are masked. A hook that returns nothing changes nothing.


# %%
def look(activation, hook):
    step = hook.step
    print(f"step {step.index} of {step.n_steps}: {int(step.masked.sum())} masked, activation {list(activation.shape)}")


model.denoise(fact.prompt, max_new_tokens=5, steps=5, fwd_hooks=[("blocks.3.hook_attn_out", look)]).text[0]

# %% [markdown]
# ## A hook at some steps
#
# `at_steps` restricts a hook to some steps. `zero_ablate` sets an activation to zero. Here, it removes the output of
# attention in block 3 at one step at a time:

# %%
from diffusion_lens.interventions import at_steps, zero_ablate


def write_without_attention(steps):
    hooks = [("blocks.3.hook_attn_out", at_steps(zero_ablate(), steps))]
    return model.denoise(fact.prompt, max_new_tokens=5, steps=5, fwd_hooks=hooks)


for step in range(5):
    print(f"without it at step {step}:", write_without_attention([step]).text[0])

# %% [markdown]
# Without it at step 4, which writes role and place, the model gives those of somebody else. The earlier steps do not
# need it: "of", the full stop and the end token are the same for everybody.
#
# ## Compare two runs
#
# `run.diff` compares two runs of one prompt. What is the same is pale. A cell that differs has both texts, and a line
# marks the step at which the difference begins. The table has the same cells.

# %%
edited = write_without_attention([4])
difference = run.diff(edited)
for sentence in difference.sentences():
    print(sentence)
difference

# %% [markdown]
# ## Replay
#
# A finished run is replayed under hooks. `canvas="free"` lets the model write something else. `canvas="forced"` keeps
# every token and its step, and measures how probable each token is under the hook. Only the role and the place
# suffer:

# %%
hooks = [("blocks.3.hook_attn_out", zero_ablate())]
forced = run.replay(model, canvas="forced", fwd_hooks=hooks)
for position in (~run.given[0]).nonzero()[:, 0].tolist():
    word, step = run.words[int(run.tokens[0, position])].strip(), int(run.revealed_at[0, position])
    before, after = run.confidence[0, position], forced.confidence[0, position]
    print(f"{word:12} step {step}: p {before:.2f}, with the hook {after:.2f}")

# %% [markdown]
# ## Activations by step
#
# `denoise_with_cache` caches activations at the steps that you choose. `cache.stack` returns one tensor whose first
# axis is the step. Here it has the residual stream after block 4, and the plot shows how much it changes at each
# position when a token is revealed.

# %%
name = "blocks.4.hook_resid_post"
run, cache = model.denoise_with_cache(fact.prompt, max_new_tokens=5, steps=5, names_filter=name)
states = cache.stack(name)[:, 0]  # [step pos d_model]
change = (states[1:] - states[:-1]).norm(dim=-1) / states[:-1].norm(dim=-1)  # [step pos]
list(states.shape)

# %%
from diffusion_lens import plots

figure, [ax] = plots.panels(1, 1, width=8, height=2.6)
words = [run.words[int(token)].strip() for token in run.tokens[0]]
image = ax.imshow(change, aspect="auto")
ax.set_xticks(range(len(words)), words, rotation=45)
ax.set_yticks(range(4), [f"{step} to {step + 1}" for step in range(4)])
ax.set_ylabel("steps")
figure.colorbar(image, label="relative change")
figure

# %% [markdown]
# ## Hook the loop
#
# The decisions of the loop pass through hook points too. `denoise.hook_reveal` has the positions that a step reveals.
# This hook replaces them by the leftmost masked position, so that the diffusion model writes like an autoregressive
# model.


# %%
def leftmost(reveal, hook):
    masked = hook.step.masked
    return masked & (masked.cumsum(dim=1) == 1)


model.denoise(fact.prompt, max_new_tokens=5, steps=5, fwd_hooks=[("denoise.hook_reveal", leftmost)]).plot()

# %% [markdown]
# Next: [causal tracing](causal_tracing.ipynb) finds the places that matter without trying them by hand.
# [Patching and steering](../patching.md) has steering vectors.
