"""A splice changes nothing with its error term, and otherwise what decode(edit(encode(x))) changes."""

import copy
from types import SimpleNamespace

import pytest
import torch
from random_dictionaries import Identity, InPlace, RandomDictionary, Rescaling

from diffusion_lens.analysis import splice
from diffusion_lens.analysis.dictionaries.splice import check_dictionary
from diffusion_lens.data import toy_facts
from diffusion_lens.interventions import at_steps, named, while_masked
from diffusion_lens.records.identity import UNNAMED, name_of

RESID = "blocks.1.hook_resid_post"


def width_at(model, name):
    return model.run_with_cache(torch.tensor([[5, 6]]), names_filter=name)[1][name].flatten(2).shape[-1]


@pytest.mark.parametrize(
    "name", [RESID, "hook_embed", "blocks.0.attn.hook_z", "blocks.2.attn.hook_k", "blocks.0.mlp.hook_post"]
)
def test_with_the_error_term_no_bit_changes(several, name):
    model, tokens = several.model, several.tokens
    dictionary = RandomDictionary(width_at(model, name))
    assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=[(name, splice(dictionary))]), model(tokens))


@pytest.mark.parametrize("name", [RESID, "blocks.0.attn.hook_z", "blocks.2.attn.hook_k"])
def test_without_it_the_activation_is_the_reconstruction(several, name):
    model, tokens = several.model, several.tokens
    dictionary = RandomDictionary(width_at(model, name))

    def by_hand(activation, hook):
        rows = [
            dictionary.decode(dictionary.encode(x.reshape(1, 1, -1))).reshape(x.shape) for x in activation.flatten(0, 1)
        ]
        return torch.stack(rows).view(activation.shape)

    expected = model.run_with_hooks(tokens, fwd_hooks=[(name, by_hand)])
    spliced = model.run_with_hooks(tokens, fwd_hooks=[(name, splice(dictionary, error_term=False))])
    torch.testing.assert_close(spliced, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(spliced, model(tokens), atol=1e-2)


@pytest.mark.parametrize("writes", [False, True])
def test_an_edit_with_the_error_term_adds_the_decoded_difference(several, writes):
    model, tokens, feature = several.model, several.tokens, 7
    dictionary = RandomDictionary(model.cfg.d_model)

    def ablate(features, hook):
        if writes:
            features[..., feature] = 0
            return None
        return features * (torch.arange(features.shape[-1]) != feature)

    def by_hand(activation, hook):
        return activation - dictionary.encode(activation)[..., feature, None] * dictionary.decoder[feature]

    expected = model.run_with_hooks(tokens, fwd_hooks=[(RESID, by_hand)])
    edited = model.run_with_hooks(tokens, fwd_hooks=[(RESID, splice(dictionary, edit=ablate))])
    torch.testing.assert_close(edited, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(edited, model(tokens), atol=1e-3)


def test_gradients_of_features_are_those_of_small_edits(several):
    model, tokens = several.tell(copy.deepcopy(several.model).double()), several.tokens[:1]
    dictionary, kept = RandomDictionary(model.cfg.d_model).double(), []

    def keep(features, hook):
        features.retain_grad()
        kept.append(features)

    logits = model.run_with_hooks(tokens, fwd_hooks=[(RESID, splice(dictionary, edit=keep))])
    logits[0, 8].logsumexp(dim=-1).backward()

    def value(size):
        nudge = size * torch.nn.functional.one_hot(torch.tensor(3), kept[0].shape[-1])
        hook = splice(dictionary, edit=lambda features, hook: features + nudge)
        return model.run_with_hooks(tokens, fwd_hooks=[(RESID, hook)])[0, 8].logsumexp(dim=-1).item()

    assert kept[0].grad[..., 3].sum().item() == pytest.approx((value(1e-5) - value(-1e-5)) / 2e-5, rel=1e-4)


def double(features, hook):
    return features * 2


@pytest.mark.parametrize("edit", [None, double])
@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_gradients_reach_the_layers_below_through_the_features_only(either, edit):
    dictionary, point = RandomDictionary(8), either.model.hook_dict[RESID]
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    spliced = splice(dictionary, edit=edit)(x, point)
    by_hand = dictionary.decode(dictionary.encode(x) * (1 if edit is None else 2))
    weights = torch.linspace(-1, 2, 8)
    gradients = [torch.autograd.grad((value * weights).sum(), x)[0] for value in (spliced, by_hand)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("error_term", [True, False])
@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_dictionaries_that_write_or_keep_state_give_the_formula(either, error_term):
    """The formula is written out here, without either habit."""
    point = either.model.hook_dict[RESID]
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    plain = {
        InPlace: (lambda x: torch.relu(x - 1), lambda features: features * 0.5 + 1),
        Rescaling: (
            lambda x: torch.relu(x / x.norm(dim=-1, keepdim=True)),
            lambda features: features * x.norm(dim=-1, keepdim=True),
        ),
    }
    for kind, (encode, decode) in plain.items():
        error, kept, given = x - decode(encode(x)) if error_term else 0, [], x.clone()
        for edit, factor in ((None, 1), (double, 2), (lambda features, hook, kept=kept: kept.append(features), 1)):
            spliced = splice(kind(), error_term=error_term, edit=edit)(given, point)
            torch.testing.assert_close(spliced, decode(encode(x) * factor) + error)
            assert torch.equal(given, x)
        assert torch.equal(kept[0], encode(x))


def test_edits_act_at_the_chosen_steps_only(tiny):
    dictionary = RandomDictionary(tiny.cfg.d_model)
    seen = []

    def silence(features, hook):
        seen.append(hook.step.index)
        return torch.zeros_like(features)

    settings = dict(length=12, steps=5)
    prompt = toy_facts.load().facts()[0].prompt
    plain, cache = tiny.denoise_with_cache(prompt, RESID, **settings)
    trajectory, edited = tiny.denoise_with_cache(
        prompt, RESID, fwd_hooks=[(RESID, at_steps(splice(dictionary, edit=silence), [1, -1]))], **settings
    )
    assert sorted(set(seen)) == [1, plain.n_steps - 1]
    assert torch.equal(edited[0][RESID], cache[0][RESID])
    assert torch.equal(trajectory.canvases[1], plain.canvases[1])
    x = cache[1][RESID]
    expected = x + dictionary.decode(dictionary.encode(x) * 0) - dictionary.decode(dictionary.encode(x))
    torch.testing.assert_close(edited[1][RESID], expected)
    unspliced = tiny.denoise(prompt, fwd_hooks=[(RESID, while_masked(splice(dictionary)))], **settings)
    assert torch.equal(unspliced.canvases, plain.canvases)


@pytest.mark.parametrize("sampler", ["confidence", "remdm"])
@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_runs_with_guidance_and_remasking_are_unchanged_too(tiny, sampler):
    model, branches = tiny, set()
    dictionary, prompt = RandomDictionary(model.cfg.d_model), toy_facts.load().facts()[0].prompt
    settings = dict(length=12, steps=5, cfg_scale=0.7, temperature=0.5, sampler=sampler)

    def note(features, hook):
        branches.add((hook.step.branch, len(features)))

    spliced = model.denoise([prompt] * 2, fwd_hooks=[(RESID, splice(dictionary, edit=note))], **settings)
    plain = model.denoise([prompt] * 2, fwd_hooks=[(RESID, lambda activation, hook: None)], **settings)
    assert torch.equal(spliced.canvases, plain.canvases)
    assert branches == {("conditional", 2), ("unconditional", 2)}


def test_a_model_in_bf16_takes_a_dictionary_in_float32(several):
    model = several.tell(copy.deepcopy(several.model).to("bfloat16"))
    dictionary, tokens = RandomDictionary(model.cfg.d_model), several.tokens
    assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=[(RESID, splice(dictionary))]), model(tokens))
    _, cache = model.run_with_cache(tokens, names_filter=RESID)
    x = cache[RESID].float()
    with model.hooks(fwd_hooks=[(RESID, splice(dictionary, error_term=False))]):
        _, spliced = model.run_with_cache(tokens, names_filter=RESID)
    assert torch.equal(spliced[RESID], dictionary.decode(dictionary.encode(x)).bfloat16())
    halved = RandomDictionary(model.cfg.d_model).bfloat16()
    assert (
        several.model.run_with_hooks(tokens, fwd_hooks=[(RESID, splice(halved, error_term=False))]).dtype
        == torch.float32
    )


def test_a_hook_is_identified_by_the_weights_of_its_dictionary():
    first, same, other = (RandomDictionary(8, seed=seed) for seed in (0, 0, 1))
    assert name_of(splice(first)) == name_of(splice(same)) != name_of(splice(other))
    assert name_of(splice(first)).startswith("splice(dictionary=RandomDictionary #")
    assert UNNAMED not in name_of(splice(first))
    assert UNNAMED in name_of(splice(first, edit=lambda features, hook: features))
    assert UNNAMED not in name_of(splice(first, edit=named("no edit", lambda features, hook: features)))
    assert name_of(splice(first)) != name_of(splice(first, error_term=False))
    before = name_of(splice(first))
    with torch.no_grad():
        first.decoder[0, 0] += 1
    assert name_of(splice(first)) != before
    assert name_of(at_steps(splice(first), [2])).endswith("at steps [2]")


def test_a_recorded_run_names_the_splice(either):
    dictionary = RandomDictionary(either.model.cfg.d_model)
    run = either.model.denoise(torch.tensor([[5, 6]]), max_new_tokens=2, fwd_hooks=[(RESID, splice(dictionary))])
    assert run.record["hooks"] == {RESID: [f"forward: {name_of(splice(dictionary))}"]}


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_what_does_not_fit_is_refused(either):
    model, tokens = either.model, either.tokens

    def run(dictionary, name=RESID, **settings):
        return model.run_with_hooks(tokens, fwd_hooks=[(name, splice(dictionary, **settings))])

    width = model.cfg.d_model
    with pytest.raises(TypeError, match="SimpleNamespace is no dictionary: it has no method decode"):
        check_dictionary(SimpleNamespace(encode=lambda x: x))
    with pytest.raises(ValueError, match=r"call dictionary.turn_off_forward_pass_hook_z_reshaping\(\)"):
        splice(SimpleNamespace(encode=Identity().encode, decode=Identity().decode, hook_z_reshaping_mode=True))
    with pytest.raises(
        ValueError, match=rf"encode of RandomDictionary failed at '{RESID}'.*must have the width {width}"
    ):
        run(RandomDictionary(width + 1))
    with pytest.raises(ValueError, match=rf"decode of \w+ returned \[3, 17, 1\].*must have the width {width}"):
        run(SimpleNamespace(encode=lambda x: x[..., :1], decode=lambda features: features))
    with pytest.raises(ValueError, match=r"encode of \w+ returned \[51, 32\].*must return \[batch, pos, number"):
        run(SimpleNamespace(encode=lambda x: x.flatten(0, 1)[:, :32], decode=lambda features: features))
    with pytest.raises(TypeError, match="returned tuple; it must return a tensor"):
        run(SimpleNamespace(encode=lambda x: (x, x), decode=lambda features: features))
    with pytest.raises(ValueError, match=r"'blocks.0.attn.hook_pattern' is \[batch head query key\]"):
        run(Identity(), "blocks.0.attn.hook_pattern")
    with pytest.raises(ValueError, match=r"hook_tokens' is torch.int64"):
        model.denoise(tokens[:, :3], max_new_tokens=1, fwd_hooks=[("denoise.hook_tokens", splice(Identity()))])
    with pytest.raises(
        ValueError, match=rf"edit returned \[3, 17\]; it must return features of the shape \[3, 17, {width}\]"
    ):
        run(Identity(), edit=lambda features, hook: features[..., 0])
    with pytest.raises(ValueError, match=r"the dictionary is on meta, and the activation.* on cpu"):
        run(RandomDictionary(width).to("meta"))
    assert not model.list_hooks()
