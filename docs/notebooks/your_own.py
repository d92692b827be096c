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
# # Your own model and your own facts
#
# This notebook loads a checkpoint from a folder, checks it, reads facts from a CSV and a JSON file, and runs the
# analyses on them. The checkpoint is a small one in the format of LLaDA, made on the spot, so that everything runs
# offline on the CPU. For a published model, only the name changes. To run the notebook:
#
# ```sh
# pip install -c constraints.txt ".[plot,explore]" jupyterlab
# jupyter lab docs/notebooks/your_own.ipynb
# ```

# %% [markdown]
# ## A checkpoint in a folder
#
# You have a folder already: skip this cell. It writes the bundled model `site-mdm` as LLaDA's code would have saved
# it, with LLaDA's names for the tensors and the keys of the config. (LLaDA's head has a row for [MASK] too, and its
# rotary tables are not rounded.)

# %%
from dataclasses import replace
from pathlib import Path

import torch

from diffusion_lens import HookedDiffusionTransformer
from weight_conversion import export

bundled = HookedDiffusionTransformer.from_pretrained("site-mdm", device="cpu")
architecture = bundled.cfg.architecture
weights = dict(bundled.state_dict())
weights["unembed.weight"] = torch.cat([weights["unembed.weight"], torch.zeros(1, architecture.d_model)])
llada = replace(architecture, family="llada", name="my-llada", d_vocab_out=architecture.d_vocab, rotary_dtype="float32")
export(weights, llada, "my-llada/model.safetensors")
bundled.tokenizer.save_pretrained("my-llada")
sorted(path.name for path in Path("my-llada").iterdir())

# %% [markdown]
# ## Check it
#
# A checkpoint that is read with a small mistake still writes text. So check it first: `diffusion-lens check` compares
# its loss on a page with shuffled words, and tries likely mistakes, such as another attention direction or another
# [MASK].

# %%
# !diffusion-lens check my-llada

# %% [markdown]
# ## Load it
#
# `from_pretrained` takes a folder, a file, a published name such as `"llada-8b-base"`, or the id of a repository of
# the hub. The family is recognised from the config, and no code of the checkpoint is run. For a large model, pass
# `device="cuda"` and `dtype="bfloat16"`.

# %%
model = HookedDiffusionTransformer.from_pretrained("my-llada", device="cpu")
print(model.cfg.family, model.cfg.n_layers, "blocks, [MASK] is token", model.cfg.mask_token_id)

# %% [markdown]
# ## Your own sentence

# %%
run = model.denoise("the sailor of Kaurgate is", max_new_tokens=4, steps=4)
run.plot()

# %% [markdown]
# `sampler="llada"` is the sampler with which LLaDA was published. It writes the same here:

# %%
model.denoise("the sailor of Kaurgate is", max_new_tokens=4, sampler="llada").text[0]

# %% [markdown]
# ## Your own facts
#
# A fact needs a prompt, the subject as it stands in the prompt, and the answer. The answer begins with a space, as it
# would in the running text. A CSV file has a header:

# %%
csv = """prompt,subject,answer
"Plerrick Baupling plays","Plerrick Baupling"," bassoon"
"Rorrick Brosser plays","Rorrick Brosser"," bassoon"
"Plerrick Skusser plays","Plerrick Skusser"," lute"
"""
Path("facts").mkdir(exist_ok=True)
Path("facts/instruments.csv").write_text(csv, encoding="utf-8")
print(csv)

# %% [markdown]
# A JSON file is a list of facts with the same fields:

# %%
import json

sailor = {"prompt": "the sailor of Kaurgate is", "subject": "sailor of Kaurgate", "answer": " Plerrick Baupling."}
Path("facts/people.json").write_text(json.dumps([sailor]), encoding="utf-8")
print(json.dumps([sailor], indent=1))

# %% [markdown]
# `read_facts` reads a file, or all files of a folder. The commands take the same path: `--data facts`.

# %%
from diffusion_lens.data import read_facts

facts = read_facts("facts")
[f"{fact.prompt} ...{fact.answer}" for fact in facts]

# %% [markdown]
# ## What does the model know?
#
# `rank_answer` ranks each token of an answer among all tokens, after those before it. Rank 0 is the likeliest.

# %%
from diffusion_lens.evaluation import rank_answer

for fact in facts:
    ranks = rank_answer(model, fact.prompt, fact.answer, n_masks=4)
    print(fact.prompt, "...", ranks.answer, "ranks", ranks.rank.tolist())

# %% [markdown]
# The model does not agree that Plerrick Skusser plays the lute: it ranks another instrument above it. Analyses of
# many facts leave such a fact out, because there is no answer to restore, and say so in their title:

# %%
from diffusion_lens.analysis import average_indirect_effect

average = average_indirect_effect(model, facts, length=12, first_tokens=1, samples=5, roles=["subject_last", "answer"])
average

# %% [markdown]
# ## Your own hook
#
# A hook takes an activation and its hook point, and returns the new activation. `blocks.3.attn.hook_z` has the output
# of each head, Float[batch pos head d_head]. This hook silences one head. Which head of block 3 fetches the
# instrument?


# %%
def silence(head):
    def hook_fn(z, hook):
        z = z.clone()
        z[:, :, head] = 0
        return z

    return hook_fn


query = facts[0].to_query(model, n_masks=4, first_tokens=1)
for head in range(model.cfg.n_heads):
    logits = model.run_with_hooks(query.tokens[None], fwd_hooks=[("blocks.3.attn.hook_z", silence(head))])
    p = logits[0, query.answer_positions[0]].softmax(-1)[query.answer_tokens[0]]
    print(f"without head 3.{head}: p(bassoon) {p:.2f}")

# %% [markdown]
# Head 3.0 does: without it, the instrument is lost. The same hook works in the loop, `model.denoise(...,
# fwd_hooks=[("blocks.3.attn.hook_z", silence(0))])`, and at some of its steps ([Hooks by step](hooks_by_step.ipynb)).
# [Write a hook](../write_a_hook.md) lists every name with its shape.
