"""Keys: rows of a batch are what they are alone, prefixes come from the model, bad input is explained."""

from dataclasses import replace

import pytest
import torch

from diffusion_lens import Fact, Query
from diffusion_lens.analysis.rome import KeyResult, compute_key, compute_keys, query_with_prefixes, sample_prefixes
from diffusion_lens.settings import own_seed

GUSTAV = Fact("Gustav Geisser is the", "Gustav Geisser", " brave drummer of Rolsen.")


def query(tokens, subject):
    return Query(torch.tensor(tokens), subject, (), ())


@pytest.fixture
def prompts():
    """Three lengths; the subject at other positions."""
    return [
        query([51, 20, 21, 11, 12], (1, 3)),
        query([40, 41, 42, 51, 20, 21, 11, 12], (4, 6)),
        query([20, 21, 60], (0, 2)),
    ]


def test_a_key_is_what_enters_the_down_projection(summed, prompts):
    """By hand, one unpadded prompt at a time: rows of a batch must not see one another's padding."""
    for layer in summed.dense_layers:
        key = compute_key(summed.model, prompts, layer)
        for row, prompt in zip(key.keys, prompts, strict=True):
            seen = {}
            summed.model.run_with_hooks(
                prompt.tokens[None],
                fwd_hooks=[(f"blocks.{layer}.hook_mlp_out", lambda out, hook, seen=seen: seen.update(out=out[0]))],
            )
            mlp = summed.model.blocks[layer].mlp
            out = (row @ mlp.W_out + mlp.b_out) * summed.model.time.gates(layer)[1]
            torch.testing.assert_close(out, seen["out"][prompt.subject[1] - 1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(key.vector, sum(key.keys) / 3)


def test_requests_together_are_requests_alone(summed, prompts):
    layer = summed.dense_layers[-2]
    together = compute_keys(summed.model, [prompts, prompts[1], prompts[2:]], layer, max_batch=2)
    assert [len(key.keys) for key in together] == [3, 1, 1]
    for key, request in zip(together, [prompts, prompts[1], prompts[2:]], strict=True):
        torch.testing.assert_close(key.keys, compute_key(summed.model, request, layer).keys, rtol=1e-5, atol=1e-5)
    assert together[2].record["prompts"] == [summed.model.words([20, 21, 60])]


def test_at_the_first_token_of_the_subject(either, prompts):
    one_token = query([51, 20, 21, 11, 12], (1, 2))
    first = compute_key(either.model, prompts[0], 1, at="subject_first")
    assert torch.equal(first.vector, compute_key(either.model, one_token, 1).vector)
    assert not torch.allclose(first.vector, compute_key(either.model, prompts[0], 1).vector)


def test_prefixes_are_the_models_own(tiny):
    prefixes = sample_prefixes(tiny, (3, 2, 3), start="today", seed=5)
    assert len(prefixes) == 3
    assert prefixes == sample_prefixes(tiny, (3, 2, 3), start="today", seed=5)
    assert prefixes != sample_prefixes(tiny, (3, 2, 3), start="today", seed=6)
    assert prefixes[0] != prefixes[2]
    for i, length in enumerate((3, 2, 3)):
        run = tiny.denoise("today", max_new_tokens=length, steps=length, temperature=1.0, seed=[own_seed(5, i)])
        assert prefixes[i].startswith("today")
        assert prefixes[i].endswith(". ")
        assert "<eos>" not in prefixes[i]
        assert prefixes[i][:-2].split() == run.text[0].replace("<eos>", " ").split()


@pytest.mark.parametrize("tiny", ["tiny-ar"], indirect=True)
def test_seeds_share_no_prefix_by_construction(tiny):
    """Four seeds of 12 texts are 48 samples; with sums of seeds they were 15, each text but the first met again."""
    drawn = [sample_prefixes(tiny, (6,) * 12, start="today", temperature=3.0, seed=seed) for seed in range(4)]
    texts = {text for texts in drawn for text in texts}
    assert len(texts) > 43


def test_requests_with_prefixes(tiny):
    queries = query_with_prefixes(tiny, GUSTAV, ["today ", "Gustav Geisser, "], length=14, first_tokens=2)
    subject = tiny.to_tokens("Gustav Geisser")[0]
    for query, n_before in zip(queries, (0, 1, 3), strict=True):
        assert torch.equal(query.tokens[slice(*query.subject)], subject)
        assert query.subject == (n_before, n_before + 2)
        assert query.answer_positions[0] == n_before + 4
        assert query.answer_tokens == queries[0].answer_tokens
        assert len(query.tokens) == (14 if tiny.cfg.has_mask else n_before + 5)
    again = replace(GUSTAV, prompt=f"{GUSTAV.prompt} Gustav Geisser is the")
    settings = dict(first_tokens=1, length=18)
    for mention in (0, 1):
        queries_of_mention = query_with_prefixes(tiny, again, ["Gustav Geisser, "], occurrence=mention, **settings)
        assert [query.subject[0] for query in queries_of_mention] == [4 * mention, 3 + 4 * mention]
        at_character = replace(
            again, subject_start=again.prompt.index("Gustav", mention)
        )  # counted in the fact's own prompt
        by_character = query_with_prefixes(tiny, at_character, ["Gustav Geisser, ", "today "], **settings)
        assert [query.subject[0] for query in by_character] == [4 * mention, 3 + 4 * mention, 1 + 4 * mention]
    key = compute_key(tiny, queries, 1)
    torch.testing.assert_close(key.keys[0], compute_key(tiny, GUSTAV.to_query(tiny, n_masks=10), 1).vector)


def test_requests_stand_on_canvases_of_the_trained_length(tiny):
    masked = tiny.cfg.has_mask
    requests = query_with_prefixes(tiny, GUSTAV, ["today "], length=14 if masked else None)
    for query, by_default in zip(requests, query_with_prefixes(tiny, GUSTAV, ["today "]), strict=True):
        assert torch.equal(by_default.tokens, query.tokens)
    if masked:
        with pytest.raises(ValueError, match=r"length=14, on which the model was trained, .*: give length=1[5-9] or"):
            query_with_prefixes(tiny, GUSTAV, ["Gustav Geisser is the brave drummer of Rolsen. "])


def test_save_and_load(tiny, tmp_path):
    key = compute_key(tiny, GUSTAV.to_query(tiny), 2)
    again = KeyResult.load(key.save(tmp_path / "key.safetensors"))
    assert torch.equal(again.keys, key.keys)
    assert (again.layer, again.record) == (2, key.record)
    assert {"at", "prompts", "model", "weights_sha256", "versions"} <= set(again.record)


@pytest.mark.parametrize("layer", [-4, 3])
def test_a_layer_out_of_range(either, prompts, layer):
    with pytest.raises(ValueError, match=f"layer={layer} is not one of the layers 0 to 2"):
        compute_key(either.model, prompts, layer)


def test_bad_requests(either, prompts):
    with pytest.raises(ValueError, match="at='subject_middle' is unknown, nearest is subject_last"):
        compute_key(either.model, prompts, 1, at="subject_middle")
    with pytest.raises(ValueError, match="there is no query"):
        compute_key(either.model, [], 1)
    with pytest.raises(ValueError, match="max_batch=0"):
        compute_key(either.model, prompts, 1, max_batch=0)


def test_facts_that_cannot_be_queried(tiny):
    with pytest.raises(ValueError, match="the subject 'Ada Marsh' is not in the prompt"):
        query_with_prefixes(tiny, Fact("Gustav Geisser is the", "Ada Marsh", " brave"), ["today "])
    with pytest.raises(ValueError, match="lengths is empty"):
        sample_prefixes(tiny, ())
