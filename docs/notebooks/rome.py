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
# # Edit a fact with ROME
#
# ROME (Meng et al. 2022) treats an MLP as a memory: the key k\* of a subject, and the value v\* that makes the
# model say the answer. A rank-one change of one matrix gives the key a new value. This notebook edits one fact of a
# masked diffusion model, and checks what else changes. To run it:
#
# ```sh
# pip install -c constraints.txt ".[plot,explore]" jupyterlab
# jupyter lab docs/notebooks/rome.ipynb
# ```

# %%
from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.data import site_facts
from diffusion_lens.data.site_edits import edit_requests

model = HookedDiffusionTransformer.from_pretrained("site-mdm", device="cpu")
world = site_facts.load()
[request] = edit_requests(world, world.facts("attribute")[:1])
print(f"{request.true.prompt} ...{request.true.answer}, to be changed to{request.new.answer}")

# %% [markdown]
# A request has the true fact, the new one, and *probes*: other wordings, people with the same instrument, people who
# share a name with the subject, and other facts about the subject.

# %%
probes = {
    "the request": request.new,
    "in other words": request.paraphrases[-1],
    "another person": request.neighbours[0],
    "a shared name": request.sharing_a_name[0],
    "another relation": request.other_relations[1],
}


def ask():
    """What the model writes after the prompt of each probe."""
    return {label: model.denoise(probe.prompt, max_new_tokens=1, steps=1).text[0] for label, probe in probes.items()}


before = ask()
before

# %% [markdown]
# ## Where
#
# A causal trace of the MLPs shows where facts are looked up. One fact may be special, so the trace is averaged over
# 21 facts:

# %%
from diffusion_lens.analysis import average_indirect_effect

facts = world.facts("attribute")[::347]
average = average_indirect_effect(
    model, facts, "mlp", window=1, length=16, first_tokens=1, samples=3, roles=["subject_last", "answer"]
)
print(f"total effect {average.ate:.2f}; MLPs at the last token of the subject, by block:")
print([round(effect, 2) for effect in average.aie[0].tolist()])
average.plot()

# %% [markdown]
# The MLPs of blocks 0 to 2 matter at the last token of the name, and that of block 1 most. So the edit is one of
# block 1.
#
# ## The key
#
# The key k\* is the input of the down-projection at the last token of the subject. ROME also needs C, the second
# moment of keys, from texts like those of the training: it says which other keys the change must spare.

# %%
from diffusion_lens.analysis.rome import compute_key, second_moment
from diffusion_lens.data.site_documents import Documents

texts = Documents(world, description=0.4, tag=0.1, second_person=0.6).sample(800)
moment = second_moment(model, texts, layer=1)


def to_query(fact):
    """The fact on a canvas of 16 positions, as in training."""
    return fact.to_query(model, n_masks=16 - len(model.encode(fact.prompt)))


key = compute_key(model, to_query(request.new), layer=1)
list(key.vector.shape)

# %% [markdown]
# ## The value
#
# The value v\* is searched by gradient descent: an output of the MLP with which the model gives the new answer. The
# search stops early (`stop_below`), because a larger v\* damages more of what the model knows about the subject.

# %%
from diffusion_lens.analysis.rome import optimize_value

value = optimize_value(model, to_query(request.new), layer=1, steps=40, lr=0.2, stop_below=0.3, kl_factor=0.0)
print(f"p({request.new.answer.strip()}) is {value.probability_before:.2f}, and with v* {value.probability_after:.2f}")

# %% [markdown]
# ## The edit
#
# `RankOneEdit` changes the weights inside its `with` block, and restores them afterwards.

# %%
from diffusion_lens.analysis.rome import RankOneEdit

edit = RankOneEdit(model, 1, key, value, moment)
with edit:
    after = ask()
after

# %%
assert ask() == before  # outside the block, the model is as it was

# %% [markdown]
# The request has its new answer, in other words too. Another person with the old instrument, a person who shares a
# name, and another relation of the subject keep theirs.
#
# ## Is that so for other facts?
#
# One edit is an anecdote. `edit_study` makes the edit of each request in turn, and counts. *efficacy*, *paraphrase*
# and *neighbourhood* are those of the paper; *shared_name* and *other_relations* are stricter.

# %%
from diffusion_lens.analysis.engine.layout import CanvasLayout
from diffusion_lens.analysis.rome import EditSettings, ValueSettings, edit_study

requests = edit_requests(world, world.facts("attribute")[::1001])
search = ValueSettings(steps=40, lr=0.2, stop_below=0.3, kl_factor=0.0)
settings = EditSettings(layer=1, search=search, layout=CanvasLayout(length=16))
study = edit_study(model, requests, settings, covariance=moment)
for group, score in study.table().items():
    print(f"{group:16} {score.before:.2f} -> {score.after:.2f}  ({score.probes} probes)")
study.plot()

# %% [markdown]
# All edits succeed, in all wordings, and other people keep their answers. Some other facts about the subject itself
# are lost: they are looked up with similar keys at the same token. [The page on edits](../rome.md) measures this with
# more requests, compares the AR baseline and the blocks, and asks the reverse question, which no edit changes.
