"""The edit: W k_p = v*, orthogonal keys unmoved, back bit for bit, nested, exported."""

from dataclasses import replace

import pytest
import torch

from diffusion_lens import Fact, HookedDiffusionTransformer, Query
from diffusion_lens.analysis.rome import (
    RankOneEdit,
    compute_key,
    optimize_value,
    query_with_prefixes,
    second_moment,
)
from diffusion_lens.data import toy_facts

LAYER = 1
GUSTAV = Fact("Gustav Geisser is the", "Gustav Geisser", " calm pilot")
PROBE = torch.arange(5, 15)[None]


def learned(model, fact, layer=LAYER, **settings):
    queries = query_with_prefixes(model, fact, ["today ", "surely "], length=14)
    value = optimize_value(model, queries, layer, **{"steps": 4, **settings})
    return compute_key(model, queries, layer), value, queries[0]


@pytest.fixture(scope="module")
def moment(tiny):
    return second_moment(tiny, toy_facts.load().sentences()[::40], LAYER)


@pytest.fixture(scope="module")
def gustav(tiny):
    return learned(tiny, GUSTAV)


@pytest.mark.parametrize("with_moment", [False, True])
def test_the_edited_memory_answers_the_request_with_v_star(tiny, gustav, moment, with_moment):
    key, value, query = gustav
    covariance = moment if with_moment else None
    edit = RankOneEdit(tiny, LAYER, key, value, covariance)
    c = moment.matrix + edit.ridge * torch.eye(len(key.vector)) if with_moment else torch.eye(len(key.vector))
    direction = torch.linalg.solve(c.double(), key.vector.double()).float()
    others = torch.randn(5, len(direction), generator=torch.Generator().manual_seed(0))
    others -= torch.outer(others @ direction, direction) / direction.square().sum()
    before = edit.weight.detach().clone()
    with edit:
        torch.testing.assert_close(edit.weight @ value.key, value.vector, rtol=1e-4, atol=1e-5)
        change = edit.weight - before
        assert (others @ change.T).norm() < 1e-5 * others.norm() * change.norm()
        # In the network, at the subject's last token of the plain request.
        _, cache = tiny.run_with_cache(query.tokens[None], names_filter=f"blocks.{LAYER}.hook_mlp_out")
        reached = cache["mlp_out", LAYER][0, query.subject[1] - 1]
        torch.testing.assert_close(reached, value.vector, rtol=1e-3, atol=1e-4)
        rows = tiny.readout.rows(torch.tensor(query.answer_positions))
        odds = tiny(query.tokens[None], logits_at=rows)[0].softmax(-1)
        assert odds[[0, 1], query.answer_tokens].prod().item() > 2 * value.probability_before


def test_in_every_family(summed):
    """Biases, norms of heads and tied weights included: the MLP answers v* at the subject, and what is left is left."""
    model, tokens = summed.model, summed.tokens[0, :9] % 500
    if model.cfg.has_mask:
        tokens[8] = model.cfg.blank
    query = Query(tokens, (2, 5), (9 if model.cfg.is_autoregressive else 8,), (31,))
    layer = summed.dense_layers[-2]
    value = optimize_value(model, query, layer, kl_factor=0.0, steps=8, lr=0.1)
    assert value.losses[-1, 1] < value.losses[0, 1]
    logits = model(tokens[None])
    with RankOneEdit(model, layer, compute_key(model, query, layer), value):
        edited, cache = model.run_with_cache(tokens[None])
        torch.testing.assert_close(cache["mlp_out", layer][0, 4], value.vector, rtol=1e-4, atol=1e-4)
        mlp = model.blocks[layer].mlp
        added = (mlp.W_out.T @ value.key + mlp.b_out) * model.time.gates(layer)[1]
        torch.testing.assert_close(added, value.vector, rtol=1e-4, atol=1e-4)
        assert not torch.equal(edited, logits)
    assert torch.equal(model(tokens[None]), logits)


def test_a_model_that_writes_by_blocks_writes_the_edited_answer(in_words):
    """The answer's block is opened after the prompt, which the edit changes where it is read as finished text."""
    model = in_words("sdar")
    names = ["denoise.hook_logits", "blocks.0.hook_mlp_out"]

    def written():
        run, cache = model.denoise_with_cache(GUSTAV.prompt, names, length=8, steps=1)
        return int(run.tokens[0, 4]), *(cache[0][name][0] for name in names)

    first, logits, _ = written()
    second = int(logits[4].topk(2).indices[1])
    query = replace(GUSTAV.to_query(model, n_masks=4), answer_positions=(4,), answer_tokens=(second,))
    value = optimize_value(model, query, 0, steps=6, lr=0.5, kl_factor=0.0)
    edit = RankOneEdit(model, 0, compute_key(model, query, 0), value)
    with edit:
        torch.testing.assert_close(edit.weight @ value.key, value.vector, rtol=1e-4, atol=1e-4)
        now, _, mlp_out = written()
        torch.testing.assert_close(mlp_out[query.subject[1] - 1], value.vector, rtol=1e-4, atol=1e-4)
    assert now == second != first
    assert written()[0] == first


def test_the_second_moment_spares_other_keys(tiny, gustav, moment):
    """C⁻¹ is what makes the edit gentle to the corpus: there the answers move less than with C = I."""
    key, value, _ = gustav
    factor = torch.linalg.cholesky(moment.matrix + 1e-9 * torch.eye(len(key.vector)))
    moved = [
        (RankOneEdit(tiny, LAYER, key, value, covariance).update() @ factor).norm() for covariance in (None, moment)
    ]
    assert moved[1] < 0.8 * moved[0]


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_leaving_restores_every_bit(tiny, gustav):
    key, value, _ = gustav
    weights = {name: weight.clone() for name, weight in tiny.state_dict().items()}
    logits = tiny(PROBE)
    edit = RankOneEdit(tiny, LAYER, key, value)
    parameter = edit.weight
    with edit:
        assert not torch.equal(tiny(PROBE), logits)
        assert edit.is_applied
    with pytest.raises(ValueError, match="token id 999 is not among"), edit:
        tiny(torch.tensor([[999]]))
    assert not edit.is_applied
    assert edit.weight is parameter
    assert torch.equal(tiny(PROBE), logits)
    assert all(torch.equal(weight, weights[name]) for name, weight in tiny.state_dict().items())
    edit.apply()
    edit.revert()
    assert torch.equal(tiny(PROBE), logits)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_edits_nest(tiny, gustav):
    other = Fact("the clever guard of Rolsen is", "clever guard of Rolsen", " Gustav Geisser")
    (key_a, value_a, _), (key_b, value_b, _) = gustav, learned(tiny, other)
    key_c, value_c, _ = learned(tiny, GUSTAV, layer=0)
    logits = tiny(PROBE)
    outer, inner = RankOneEdit(tiny, LAYER, key_a, value_a), RankOneEdit(tiny, LAYER, key_b, value_b)
    with outer:
        once = tiny(PROBE)
        with inner, RankOneEdit(tiny, 0, key_c, value_c):
            torch.testing.assert_close(inner.weight @ value_b.key, value_b.vector, rtol=1e-4, atol=1e-5)
            with pytest.raises(ValueError, match="the weight of layer 1 has changed since this edit was applied"):
                outer.revert()
        assert torch.equal(tiny(PROBE), once)
    assert torch.equal(tiny(PROBE), logits)


def test_after_an_exception_the_weight_returns_whatever_was_done_to_it(tiny, gustav):
    key, value, _ = gustav
    edit, inner = RankOneEdit(tiny, LAYER, key, value), RankOneEdit(tiny, LAYER, key, value)
    before = edit.weight.detach().clone()

    def scribble():
        with torch.no_grad():
            edit.weight.mul_(2)

    def fail_after(change):
        with edit:
            change()
            raise KeyError("of the body")

    for change in (scribble, inner.apply, edit.revert):
        with pytest.raises(KeyError, match="of the body"):
            fail_after(change)
        assert not edit.is_applied
        assert torch.equal(edit.weight, before)
    assert not inner.is_applied
    with pytest.raises(ValueError, match="this edit of layer 1 is not applied"):
        inner.revert()
    assert torch.equal(edit.weight, before)


def test_a_weight_changed_inside_is_reported_and_undone(tiny, gustav):
    edit = RankOneEdit(tiny, LAYER, *gustav[:2])
    before = edit.weight.detach().clone()
    with pytest.raises(ValueError, match="the weight of layer 1 was changed inside the `with` of this edit"):  # noqa: SIM117
        with edit, torch.no_grad():
            edit.weight.add_(1)
    assert not edit.is_applied
    assert torch.equal(edit.weight, before)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_export_in_the_checkpoints_own_format(tiny, gustav, tmp_path):
    key, value, _ = gustav
    logits = tiny(PROBE)
    edit = RankOneEdit(tiny, LAYER, key, value)
    path = edit.export(tmp_path / "edited.safetensors")
    assert torch.equal(tiny(PROBE), logits)
    with edit:
        edited = tiny(PROBE)
        again = edit.export(tmp_path / "again.safetensors")
    assert path.read_bytes() == again.read_bytes()
    read = HookedDiffusionTransformer.from_pretrained(path, device="cpu")
    assert read.cfg.family == tiny.cfg.family
    assert torch.equal(read(PROBE), edited)


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_in_half_precision(tiny, gustav):
    """bfloat16 weights: the arithmetic is float64, so W k_p misses v* by the rounding of W alone, below a percent."""
    key, value, _ = gustav
    half = HookedDiffusionTransformer.from_pretrained(tiny.cfg.model_name, device="cpu", dtype=torch.bfloat16)
    logits = half(PROBE)
    with RankOneEdit(half, LAYER, key, value) as edit:
        assert edit.weight.dtype == torch.bfloat16
        answer = edit.weight.float() @ value.key
        assert (answer - value.vector).norm() < 0.01 * value.vector.norm()
        assert half(PROBE).isfinite().all()
    assert torch.equal(half(PROBE), logits)


def test_everything_in_half_precision(tiny, gustav, moment):
    """Key, value, C and edit of bfloat16 weights: how far each is from float32's."""
    key, value, query = gustav
    half = HookedDiffusionTransformer.from_pretrained(tiny.cfg.model_name, device="cpu", dtype=torch.bfloat16)
    half_key, half_value, _ = learned(half, GUSTAV)
    half_moment = second_moment(half, toy_facts.load().sentences()[::40], LAYER)
    edit, half_edit = (
        RankOneEdit(tiny, LAYER, key, value, moment),
        RankOneEdit(half, LAYER, half_key, half_value, half_moment),
    )
    pairs = [
        (half_key.vector, key.vector, 0.01),
        (half_value.vector, value.vector, 0.05),
        (half_moment.matrix, moment.matrix, 0.01),
        (half_edit.update(), edit.update(), 0.06),
    ]
    with edit, half_edit:
        pairs.append((half(query.tokens[None]).float(), tiny(query.tokens[None]), 0.02))
    for low, full, distance in pairs:
        assert low.isfinite().all()
        assert 0 < (low - full).norm() < distance * full.norm()


def test_applied_and_reverted_in_turn(tiny, gustav):
    edit = RankOneEdit(tiny, LAYER, *gustav[:2])
    with pytest.raises(ValueError, match="is not applied, so there is nothing to revert"):
        edit.revert()
    with edit, pytest.raises(ValueError, match="is applied already; revert it first"):
        edit.apply()


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_what_does_not_belong_together(tiny, gustav, moment):
    key, value, _ = gustav
    with pytest.raises(ValueError, match="layer=4 is not one of the layers 0 to 3"):
        RankOneEdit(tiny, 4, key, value)
    with pytest.raises(ValueError, match="the edit is of layer 2, but the key was taken at layer 1"):
        RankOneEdit(tiny, 2, key, value)
    with pytest.raises(ValueError, match="the covariance was taken at layer 3"):
        RankOneEdit(tiny, LAYER, key, value, replace(moment, layer=3))
    with pytest.raises(ValueError, match="the keys 300 and 352, but the weight of layer 1 is"):
        RankOneEdit(tiny, LAYER, replace(key, keys=key.keys[:, :300].clone()), value)
    with pytest.raises(ValueError, match=r"v\* cannot affect the request"):
        RankOneEdit(tiny, LAYER, replace(key, keys=torch.zeros_like(key.keys)), value)
    with pytest.raises(ValueError, match="even with a ridge"):
        RankOneEdit(tiny, LAYER, key, value, torch.zeros_like(moment.matrix))
    with pytest.raises(ValueError, match="is not finite in"):
        RankOneEdit(tiny, LAYER, key, replace(value, delta=value.delta * float("inf"))).apply()
    assert tiny(PROBE).isfinite().all()


@pytest.mark.parametrize("part", ["key", "value", "covariance"])
@pytest.mark.parametrize("fact", ["model", "architecture"])
def test_parts_of_another_model_of_the_same_sizes_are_refused(tiny, gustav, moment, part, fact):
    parts = {"key": gustav[0], "value": gustav[1], "covariance": moment}
    RankOneEdit(tiny, LAYER, **parts)
    parts[part] = replace(parts[part], record={**parts[part].record, fact: "another"})
    with pytest.raises(ValueError, match=f"the {part} was taken from another model"):
        RankOneEdit(tiny, LAYER, **parts)
