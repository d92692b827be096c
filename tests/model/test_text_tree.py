"""A row that holds several texts gives at each of their positions what the text gives alone."""

import pytest
import torch
from small_networks import small_architecture

from diffusion_lens import DiffusionConfig, HookedDiffusionTransformer
from diffusion_lens.model.attention import KeyValueCache
from diffusion_lens.model.packing import TextTree, reading_tree

TREES = {
    "rotary": (1, dict(attention_dir="causal", readout="shifted")),
    "alibi": (1, dict(attention_dir="causal", readout="shifted", positional_embedding_type="alibi")),
    "blocks": (2, dict(attention_dir="block_causal", causal_block=2, mask_token_id=39)),
    "scaled queries": (1, None),
}


def build(specimen, configs, name):
    size, fields = TREES[name]
    if fields is None:
        return size, specimen(configs["nemotron-ar"]).model
    return size, HookedDiffusionTransformer(DiffusionConfig.from_architecture(small_architecture(**fields)))


@pytest.mark.parametrize("name", TREES)
@torch.no_grad()
def test_each_text_of_a_tree_is_read_as_if_it_were_alone(specimen, configs, name):
    size, model = build(specimen, configs, name)
    rows = [
        [[3, 4, 5, 6, 7, 8, 9, 10], [3, 4, 5, 6, 7, 8, 9, 11]],
        [[3, 4, 5, 6, 1, 2], [3, 4, 5, 6, 2, 1]],
        [[3, 4, 5, 6, 7, 8, 2], [3, 4, 5, 6, 7, 8, 2]],
        [[3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8]],  # the beginning of others
    ]
    texts = [torch.tensor(text) for text in rows]
    tree, tokens = TextTree.of(texts, size)
    assert tokens.shape[1] == 4 + 2 + 2 + size + 2
    assert tree.n_common == 4
    assert [tree.stops[place] for place in (0, 4, 6, 8)] == [10 + size, 8 + size, 8, 8 + size]
    with reading_tree(model, tree):
        together = model(tokens)
        cache = KeyValueCache(model.cfg.n_layers)
        model(tokens[:, :6], past_kv_cache=cache)
        resumed = model(tokens[:, 6:], past_kv_cache=cache, logits_at=[-1])
    torch.testing.assert_close(resumed, together[:, -1:])
    for text, places in zip(texts, tree.places, strict=True):
        torch.testing.assert_close(together[:, list(places)], model(text))
