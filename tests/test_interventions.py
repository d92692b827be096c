"""What a factory puts in, the model shows: laws through ordinary runs, and a slow loop that says what may change."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformer_lens.hook_points import HookPoint

from diffusion_lens.interventions import (
    add_noise,
    at_steps,
    freeze,
    mask_tokens,
    mean_ablate,
    on_branch,
    replace,
    restore,
    steer,
    swap,
    zero_ablate,
)

RESID, Z, V = "blocks.1.hook_resid_post", "blocks.1.attn.hook_z", "blocks.1.attn.hook_v"
PATTERN = "blocks.1.attn.hook_pattern"
FITS = (RESID, "blocks.1.hook_attn_out", "blocks.1.hook_mlp_out", "blocks.1.mlp.hook_post", Z, V, PATTERN)
close = torch.testing.assert_close
on_mdm = pytest.mark.parametrize("either", ["mdm"], indirect=True)


@pytest.fixture(scope="module")
def clean(either):
    return either.tokens


@pytest.fixture
def corrupted(clean):
    """The same canvases with other tokens at two places."""
    tokens = clean.clone()
    tokens[:, 2:4] = torch.tensor([77, 301])
    return tokens


def point(name: str) -> HookPoint:
    hook_point = HookPoint()
    hook_point.name = name
    return hook_point


def slow(x, new, places, heads=None):
    """`x` with `new` at every place (and head) that is named, by hand."""
    x = x.clone()
    for row in range(x.shape[0]):
        for place in places:
            if heads is None:
                x[row, place] = new[row, place]
            else:
                for head in heads:
                    x[row, place, head] = new[row, place, head]
    return x


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_only_what_is_named_changes(data):
    n_pos, n_heads = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))

    def draw_indices(n, word):
        ends = st.one_of(st.none(), st.integers(-n, n))
        several = st.lists(st.integers(0, n - 1), min_size=1, unique=True)
        shape = data.draw(st.sampled_from(["all", "one", "slice", "list", "tensor", "from the end"]), label=word)
        if shape == "all":
            return None, range(n)
        if shape == "one":
            index = data.draw(st.integers(-n, n - 1))
            return index, [index]
        if shape == "slice":
            chosen = data.draw(
                st.builds(slice, ends, ends, st.sampled_from([None, 1, 2, -1])).filter(range(n).__getitem__)
            )
            return chosen, range(n)[chosen]
        indices = data.draw(several)
        if shape == "from the end":
            indices = [index - n for index in indices]
        return torch.tensor(indices) if shape == "tensor" else indices, indices

    places, each_place = draw_indices(n_pos, "places")
    heads, each_head = draw_indices(n_heads, "heads")
    x, other = torch.randn(2, 3, n_pos, n_heads, 5)
    changed = swap({"attn.hook_z": other}, places, heads=heads)(x, hook=point("attn.hook_z"))
    assert torch.equal(changed, slow(x, other, each_place, each_head))
    flat = swap({"resid": other[:, :, 0]}, places)(x[:, :, 0], hook=point("resid"))
    assert torch.equal(flat, slow(x[:, :, 0], other[:, :, 0], each_place))
    added = add_noise(torch.ones(5), places, heads=heads)(x, hook=point("attn.hook_z"))
    assert torch.equal(added, slow(x, x + 1, each_place, each_head))


def test_each_row_may_have_its_own_positions():
    x, other = torch.randn(2, 3, 6, 4)
    own = torch.tensor([[0, 5], [2, 1], [-1, -2]])
    together = swap({"resid": other}, own)(x, hook=point("resid"))
    for row in range(3):
        alone = swap({"resid": other[row]}, own[row])(x[row : row + 1], hook=point("resid"))
        assert torch.equal(together[row : row + 1], alone)


def test_restore_replaces_one_position_of_each_row():
    x, value = torch.randn(3, 6, 2, 4), torch.randn(6, 2, 4)
    back = restore(value, torch.tensor([4, 0, 4]))(x, hook=point("attn.hook_z"))
    one_head = restore(value, torch.tensor([4, 0, 4]), heads=1)(x, hook=point("attn.hook_z"))
    for row, place in enumerate([4, 0, 4]):
        assert torch.equal(back[row], slow(x[row : row + 1], value[None], [place])[0])
        assert torch.equal(one_head[row], slow(x[row : row + 1], value[None], [place], [1])[0])


@pytest.mark.parametrize("name", [PATTERN, "blocks.1.attn.hook_attn_scores"])
def test_patterns_are_chosen_by_query_and_head(name):
    x, other = torch.rand(2, 3, 4, 5, 5)  # [batch head query key]
    changed = swap({name: other}, [0, 3], heads=2)(x, hook=point(name))
    expected = x.clone()
    for query in (0, 3):
        expected[:, 2, query] = other[:, 2, query]
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("name", FITS)
def test_nothing_is_written_into_what_a_hook_is_handed(name):
    x = torch.randn(2, 4, 5, 5) if name == PATTERN else torch.randn(2, 5, *([4, 5] if name in (Z, V) else [5]))
    before, other = x.clone(), {name: torch.randn_like(x)}
    heads = [0] if x.dim() == 4 else None
    hook = point(name)
    for hook_fn in (
        replace(torch.ones(5), [1, 3], heads=heads),
        swap(other, [1, 3], heads=heads),
        restore(other[name][0], torch.tensor([1, 3]), heads=heads),
        mean_ablate(other, [1, 3], heads=heads),
        zero_ablate([1, 3], heads=heads),
        add_noise(torch.ones(5), [1, 3], heads=heads),
        steer(torch.ones(5), 2.0, [1, 3], heads=heads),
    ):
        changed = hook_fn(x, hook=hook)
        assert torch.equal(x, before)
        assert not torch.equal(changed, x)
        assert (changed.shape, changed.stride(), changed.dtype) == (x.shape, x.stride(), x.dtype)


def test_values_take_the_activations_dtype():
    x = torch.randn(2, 5, 4, dtype=torch.bfloat16)
    noise = torch.randn(2, 5, 4, dtype=torch.float64)
    noisy = add_noise(noise)(x, hook=point("resid"))
    assert torch.equal(noisy, x + noise.bfloat16())


@pytest.mark.parametrize("layer", [0, 2])
def test_everything_of_the_clean_run_is_the_clean_run(either, clean, corrupted, layer):
    """The residual stream at one layer is all there is."""
    name = f"blocks.{layer}.hook_resid_post"
    logits, cache = either.model.run_with_cache(clean, names_filter=name)
    patched = either.model.run_with_hooks(corrupted, fwd_hooks=[(name, swap(cache))])
    close(patched, logits, rtol=1e-5, atol=1e-5)
    assert (either.model(corrupted) - logits).abs().max() > 1e-2


@pytest.mark.parametrize(
    "names",
    [("hook_resid_pre", "hook_attn_out", "hook_mlp_out"), ("hook_resid_pre", "attn.hook_z", "mlp.hook_post")],
)
def test_the_parts_of_a_layer_are_the_layer(either, clean, corrupted, names):
    sites = [f"blocks.1.{name}" for name in names]
    logits, cache = either.model.run_with_cache(clean, names_filter=sites)
    patched = either.model.run_with_hooks(corrupted, fwd_hooks=[(site, swap(cache)) for site in sites])
    close(patched, logits, rtol=1e-5, atol=1e-5)


def test_the_embeddings_of_the_tokens_that_differ_are_enough(either, clean, corrupted):
    logits, cache = either.model.run_with_cache(clean, names_filter="hook_embed")
    for places in (slice(2, 4), [3, 2], torch.tensor([-14, -15])):
        patched = either.model.run_with_hooks(corrupted, fwd_hooks=[("hook_embed", swap(cache, places))])
        assert torch.equal(patched, either.model(clean))
        close(patched, logits)
    half = either.model.run_with_hooks(corrupted, fwd_hooks=[("hook_embed", swap(cache, 2))])
    assert not torch.equal(half, logits)


def test_a_runs_own_states_change_nothing(either, clean):
    logits, cache = either.model.run_with_cache(clean, names_filter=list(FITS))
    for name in FITS:
        own = cache[name].transpose(1, 2) if name == PATTERN else cache[name]
        for same in (swap(cache), swap({name: cache[name]}, [0, 5]), replace(own), replace(own[:, 5:6], 5)):
            with either.model.hooks(fwd_hooks=[(name, same)]):
                patched, seen = either.model.run_with_cache(clean, names_filter=name)
            close(seen[name], cache[name])
            close(patched, logits, rtol=1e-5, atol=1e-5)


def test_one_clean_row_serves_a_whole_batch(either, clean, corrupted):
    """A single query's cache, with its batch axis or without, against several corrupted draws."""
    for remove in (False, True):
        logits, cache = either.model.run_with_cache(clean[:1], names_filter=RESID, remove_batch_dim=remove)
        patched = either.model.run_with_hooks(corrupted, fwd_hooks=[(RESID, swap(cache))])
        close(patched, logits.expand_as(patched), rtol=1e-5, atol=1e-5)


def test_states_move_to_aligned_positions(either, clean):
    """The same words four places later: patched over, what is read there is what the short canvas reads."""
    short = clean[:, 4:]
    _, cache = either.model.run_with_cache(short, names_filter=RESID)
    hook = (RESID, swap(cache, slice(4, None), source_positions=slice(0, 13)))
    _, after = either.model.run_with_cache(clean, names_filter=RESID)
    with either.model.hooks(fwd_hooks=[hook]):
        _, patched = either.model.run_with_cache(clean, names_filter=RESID)
    assert torch.equal(patched[RESID][:, 4:], cache[RESID])
    assert torch.equal(patched[RESID][:, :4], after[RESID][:, :4])


def test_a_head_moves_alone(either, clean, corrupted):
    """The output changes by that head's difference through W_O, and by nothing else."""
    out = "blocks.1.hook_attn_out"
    _, cache = either.model.run_with_cache(clean, names_filter=Z)
    _, low = either.model.run_with_cache(corrupted, names_filter=[Z, out])
    with either.model.hooks(fwd_hooks=[(Z, swap(cache, [0, 6], heads=2))]):
        _, patched = either.model.run_with_cache(corrupted, names_filter=out)
    expected = low[out].clone()
    expected[:, [0, 6]] += (cache[Z] - low[Z])[:, [0, 6], 2] @ either.model.W_O[1, 2]
    close(patched[out], expected, rtol=1e-5, atol=1e-5)


def test_a_value_head_serves_its_group(either, clean, corrupted):
    """Four heads share two key/value heads: the second one moves heads 2 and 3."""
    _, cache = either.model.run_with_cache(clean, names_filter=V)
    _, low = either.model.run_with_cache(corrupted, names_filter=Z)
    with either.model.hooks(fwd_hooks=[(V, swap(cache, heads=[1]))]):
        _, patched = either.model.run_with_cache(corrupted, names_filter=Z)
    moved = (patched[Z] - low[Z]).abs().amax(dim=(0, 1, 3))
    assert (moved > 1e-4).tolist() == [False, False, True, True]


def test_zero_ablation_is_zeros_by_hand(either, clean):
    plain = either.model(clean)
    for name in FITS:
        by_hand = either.model.run_with_hooks(clean, fwd_hooks=[(name, lambda a, hook: torch.zeros_like(a))])
        ablated = either.model.run_with_hooks(clean, fwd_hooks=[(name, zero_ablate())])
        assert torch.equal(ablated, by_hand), name
        assert not torch.equal(ablated, plain), name


def test_a_block_without_its_outputs_leaves_the_residual_stream_unchanged(either, clean):
    sites = ["blocks.1.hook_attn_out", "blocks.1.hook_mlp_out"]
    with either.model.hooks(fwd_hooks=[(site, zero_ablate()) for site in sites]):
        _, cache = either.model.run_with_cache(clean, names_filter=["blocks.1.hook_resid_pre", RESID])
    assert torch.equal(cache[RESID], cache["blocks.1.hook_resid_pre"])


def test_the_mean_is_over_rows_and_positions_of_the_other_run(either, clean):
    _, cache = either.model.run_with_cache(clean[:2, :9], names_filter=[RESID, Z])
    with either.model.hooks(fwd_hooks=[(RESID, mean_ablate(cache, [1, 4])), (Z, mean_ablate(cache, 3, heads=[0, 2]))]):
        _, ablated = either.model.run_with_cache(clean, names_filter=[RESID, Z])
    for place in (1, 4):
        close(ablated[RESID][:, place], cache[RESID].flatten(0, 1).mean(0).expand(3, -1))
    for head in (0, 2):
        close(ablated[Z][:, 3, head], cache[Z][:, :, head].flatten(0, 1).mean(0).expand(3, -1))
    _, row = either.model.run_with_cache(clean[:1], names_filter=RESID, remove_batch_dim=True)
    close(mean_ablate(row)(cache[RESID], hook=point(RESID)), row[RESID].mean(0).expand_as(cache[RESID]))


def test_masked_tokens_are_masks_on_the_canvas(either, clean):
    if either.kind == "ar":
        with pytest.raises(ValueError, match=r"has no \[MASK\].*add_noise"):
            mask_tokens(either.model, slice(2, 4))
        return
    canvas = clean.clone()
    canvas[:, 2:4] = either.model.cfg.mask_token_id
    masked = either.model.run_with_hooks(clean, fwd_hooks=[("hook_embed", mask_tokens(either.model, slice(2, 4)))])
    assert torch.equal(masked, either.model(canvas))
    with pytest.raises(ValueError, match=f"attached to '{RESID}'; attach it to 'hook_embed'"):
        either.model.run_with_hooks(clean, fwd_hooks=[(RESID, mask_tokens(either.model, 2))])


def test_a_direction_is_added(either, clean):
    direction = torch.linspace(-1, 1, either.model.cfg.d_model)

    def by_hand(activation, hook):
        activation = activation.clone()
        activation[:, 2:5] += 3.0 * direction
        return activation

    logits = either.model(clean)
    steered = either.model.run_with_hooks(clean, fwd_hooks=[(RESID, steer(direction, 3.0, slice(2, 5)))])
    assert torch.equal(steered, either.model.run_with_hooks(clean, fwd_hooks=[(RESID, by_hand)]))
    assert not torch.equal(steered, logits)
    assert torch.equal(either.model.run_with_hooks(clean, fwd_hooks=[(RESID, steer(direction, 0.0))]), logits)
    back = [(RESID, steer(direction, 3.0)), (RESID, steer(direction, -3.0))]
    close(either.model.run_with_hooks(clean, fwd_hooks=back), logits, rtol=1e-4, atol=1e-4)


def test_noise_has_a_draw_for_each_row(either, clean):
    noise = torch.randn(3, 2, either.model.cfg.d_model, generator=torch.Generator().manual_seed(0))
    noisy = either.model.run_with_hooks(clean, fwd_hooks=[("hook_embed", add_noise(noise, slice(2, 4)))])
    for row in range(3):
        hook = ("hook_embed", add_noise(noise[row], slice(2, 4)))
        alone = either.model.run_with_hooks(clean[row : row + 1], fwd_hooks=[hook])
        close(noisy[row : row + 1], alone, rtol=1e-5, atol=1e-5)


def test_a_gradient_flows_through(either, clean):
    """So that gradient methods may stand on them: d(logit)/d(value) is what a finite difference says."""
    value = torch.zeros(either.model.cfg.d_model, requires_grad=True)
    bump = torch.zeros_like(value)
    bump[7] = 1e-2

    def logit(value):
        return either.model.run_with_hooks(clean[:1], fwd_hooks=[(RESID, replace(value, 3))])[0, 3, 9]

    value.data = torch.linspace(-1, 1, len(value))
    (slope,) = torch.autograd.grad(logit(value), value)
    with torch.no_grad():
        measured = (logit(value + bump) - logit(value - bump)) / 2e-2
    close(slope[7], measured, rtol=1e-2, atol=1e-4)


@pytest.fixture(scope="module")
def runs(either):
    """Two prompts and how to denoise them, guided where there is a [MASK]."""
    options = dict(length=8, steps=4, cfg_scale=0.8) if either.kind == "mdm" else dict(length=8)
    return torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]]), torch.tensor([[5, 66, 77, 8], [9, 100, 111, 12]]), options


def every_branch(either, prompt, names, options):
    """A run, and its hooks to patch another run with it: a swap for each branch of guidance."""
    branches = ["conditional", "unconditional"] if options.get("cfg_scale") else ["conditional"]
    for branch in branches:
        trajectory, cache = either.model.denoise_with_cache(prompt, names_filter=names, branch=branch, **options)
        yield trajectory, cache, branch


def test_step_by_step_a_clean_run_brings_itself_back(either, runs):
    """The last layer's states, each at its own step, are all that the loop sees of the prompt."""
    prompt, other, options = runs
    last = "blocks.2.hook_resid_post"
    kept = list(every_branch(either, prompt, last, options))
    clean = kept[0][0]
    hooks = [(last, on_branch(swap(cache), branch)) for _, cache, branch in kept]
    plain = either.model.denoise(other, **options)
    patched = either.model.denoise(other, fwd_hooks=hooks, **options)
    assert torch.equal(patched.tokens[:, 4:], clean.tokens[:, 4:])
    close(patched.confidence, clean.confidence, rtol=1e-4, atol=1e-6)
    assert not torch.equal(plain.tokens[:, 4:], clean.tokens[:, 4:])


def test_forced_replay_with_the_subject_restored(tiny):
    """Noise on the name moves the confidences; the clean embeddings of the name, step by step, bring them back."""
    prompt = "Gustav Geisser is the"
    trajectory, cache = tiny.denoise_with_cache(prompt, names_filter="hook_embed", max_new_tokens=4, steps=4)
    noise = ("hook_embed", add_noise(torch.full((tiny.cfg.d_model,), 2.0), slice(0, 2)))
    noisy = trajectory.replay(tiny, fwd_hooks=[noise])
    assert (noisy.confidence - trajectory.confidence).abs().max() > 1e-2
    again = trajectory.replay(tiny, fwd_hooks=[noise, ("hook_embed", swap(cache, slice(0, 2)))])
    close(again.confidence, trajectory.confidence, rtol=1e-5, atol=1e-6)


def test_one_step_of_a_cache_serves_all_steps(either, runs):
    prompt, _, options = runs
    _, cache = either.model.denoise_with_cache(prompt, names_filter=RESID, **options)
    seen = []

    def look(activation, hook):
        seen.append(torch.equal(activation, cache[0, RESID]))

    either.model.denoise(prompt, fwd_hooks=[(RESID, swap(cache[0])), (RESID, look)], **options)
    assert seen
    assert all(seen)


@on_mdm
def test_a_prompt_masked_in_the_loop(either, runs):
    """At every step of a forced replay the network sees the recorded canvas with [MASK] put there by hand."""
    run, last, seen = either.model.denoise(runs[0], length=9, steps=3), "blocks.2.hook_resid_post", []
    hooks = [("hook_embed", mask_tokens(either.model, [1, 2])), (last, lambda a, hook: seen.append(a))]
    run.replay(either.model, fwd_hooks=hooks)
    assert len(seen) == 3
    for canvas, resid in zip(run.canvases, seen, strict=False):
        by_hand = canvas.clone()
        by_hand[:, 1:3] = either.model.cfg.mask_token_id
        close(resid, either.model.run_with_cache(by_hand, names_filter=last)[1][last], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [0, 2])
def test_freeze_keeps_the_value_of_the_step_where_it_first_acts(either, runs, k):
    """Until step k the run is its own, so freezing there is swapping in that step of an untouched run."""
    prompt, _, options = runs
    places = [1, 6]
    kept = list(every_branch(either, prompt, Z, options))
    swapped = [
        (Z, at_steps(on_branch(swap(cache[k], places, heads=[0, 3]), branch), range(k, 4))) for _, cache, branch in kept
    ]
    frozen = [(Z, at_steps(freeze(places, heads=[0, 3]), range(k, 4)))]
    by_swap = either.model.denoise(prompt, fwd_hooks=swapped, **options)
    by_freeze, cache = either.model.denoise_with_cache(prompt, names_filter=Z, fwd_hooks=frozen, **options)
    close(by_freeze.confidence, by_swap.confidence, rtol=1e-5, atol=1e-6)
    assert torch.equal(by_freeze.canvases, by_swap.canvases)
    held = cache.stack(Z)[k:, :, places]
    assert (held[:, :, :, [0, 3]] == held[0, :, :, [0, 3]]).all()
    assert (held[-1, :, :, [1, 2]] != held[0, :, :, [1, 2]]).any()


def test_everything_frozen_every_token_is_what_the_first_step_says(either, runs):
    prompt, _, options = runs
    options = {**options, "cfg_scale": 0.0}
    frozen = either.model.denoise(prompt, fwd_hooks=[("blocks.2.hook_resid_post", freeze())], **options)
    logits = either.model(frozen.canvases[0].clamp(min=0))
    written = frozen.revealed_at >= 0
    said = logits[either.model.readout.locate(written)].softmax(-1).max(-1)
    assert torch.equal(frozen.tokens[written], said.indices)
    close(frozen.confidence[written], said.values.detach(), rtol=1e-5, atol=1e-6)
    assert not torch.equal(frozen.tokens, either.model.denoise(prompt, **options).tokens)


@pytest.mark.parametrize("later", [range(4), [2, 3]])
def test_one_freeze_serves_run_after_run(either, runs, later):
    prompt, other, options = runs

    def run(prompt, hold, steps):
        return either.model.denoise(prompt, fwd_hooks=[("blocks.2.hook_resid_post", at_steps(hold, steps))], **options)

    hold = freeze()
    run(prompt, hold, [0, 1])
    second, fresh = run(other, hold, later), run(other, freeze(), later)
    assert torch.equal(second.canvases, fresh.canvases)
    assert torch.equal(second.confidence, fresh.confidence)


@pytest.fixture
def pushed(either, runs):
    """A run to replay, a hook point, and a hook that changes what passes there."""
    push = ("hook_embed", steer(torch.ones(either.model.cfg.d_model)))
    return either.model.denoise(runs[0], **runs[2]), "blocks.2.hook_resid_post", push, freeze()


def test_a_freeze_begins_anew_in_runs_that_share_what_is_given(either, pushed):
    """The second replay acts at later steps only: by step numbers alone it could pass for the first one going on."""
    run, site, push, one = pushed
    run.replay(either.model, fwd_hooks=[push, (site, at_steps(one, [0, 1]))])
    second = run.replay(either.model, fwd_hooks=[(site, at_steps(one, [2, 3]))])
    fresh = run.replay(either.model, fwd_hooks=[(site, at_steps(freeze(), [2, 3]))])
    assert torch.equal(second.confidence, fresh.confidence)


def test_a_freeze_begins_anew_after_an_exception(either, pushed):
    run, site, push, one = pushed

    def stop(activation, hook):
        if hook.step.index == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.replay(either.model, fwd_hooks=[push, (site, one), ("ln_final.hook_normalized", stop)])
    rest = run.from_step(2)
    again = rest.replay(either.model, fwd_hooks=[(site, one)])
    assert torch.equal(again.confidence, rest.replay(either.model, fwd_hooks=[(site, freeze())]).confidence)


def test_one_freeze_serves_runs_that_alternate(either, runs):
    """A run of another model between two steps of this one; what this one holds stays held."""
    other = copy.deepcopy(either.model)
    site, prompt, options = "blocks.2.hook_resid_post", runs[0][:, :3], dict(length=5, steps=2)
    one = freeze()

    def between(activation, hook):
        other.denoise(prompt + 1, fwd_hooks=[(site, one)], **options)

    alternating = either.model.denoise(prompt, fwd_hooks=[(site, one), ("hook_embed", between)], **options)
    alone = either.model.denoise(prompt, fwd_hooks=[(site, freeze()), ("hook_embed", lambda a, hook: None)], **options)
    assert torch.equal(alternating.confidence, alone.confidence)


def test_one_freeze_serves_replay_after_replay_at_several_hook_points(either, runs):
    run = either.model.denoise(runs[0], **runs[2])
    sites = ["blocks.0.hook_attn_out", "blocks.2.hook_resid_post"]
    one = freeze()
    for strength in (1.0, 0.0):
        push = ("hook_embed", steer(torch.ones(either.model.cfg.d_model), strength))
        shared = run.replay(either.model, fwd_hooks=[push, *((site, one) for site in sites)])
        apart = run.replay(either.model, fwd_hooks=[push, *((site, freeze()) for site in sites)])
        assert torch.equal(shared.confidence, apart.confidence)


def test_outside_the_loop_nothing_is_frozen(either, clean, corrupted):
    hook = (RESID, freeze())
    either.model.run_with_hooks(corrupted, fwd_hooks=[hook])
    assert torch.equal(either.model.run_with_hooks(clean, fwd_hooks=[hook]), either.model(clean))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: zero_ablate([]), ValueError, "positions is empty"),
        (lambda: zero_ablate(torch.tensor([0.5])), TypeError, "positions are torch.float32; give indices"),
        (lambda: zero_ablate(torch.tensor([True, False])), TypeError, r"positions are torch.bool.*mask.nonzero"),
        (lambda: zero_ablate(torch.zeros(1, 2, 3, dtype=torch.long)), ValueError, r"positions has shape \[1, 2, 3\]"),
        (lambda: zero_ablate(heads=torch.zeros(1, 2, dtype=torch.long)), ValueError, r"heads has shape \[1, 2\]"),
    ],
)
def test_bad_choices_are_refused_at_once(make, error, message):
    with pytest.raises(error, match=message):
        make()


def of_shape(*shape: int) -> dict[str, torch.Tensor]:
    return {RESID: torch.zeros(shape)}


@pytest.mark.parametrize(
    ("name", "hook_fn", "error", "message"),
    [
        (RESID, zero_ablate([3, 17]), ValueError, rf"positions \[17\] are outside the 17 positions of '{RESID}'"),
        (RESID, zero_ablate(-18), ValueError, r"positions \[-18\] are outside"),
        (RESID, zero_ablate(slice(3, 18)), ValueError, r"positions slice\(3, 18, None\) .* outside the 17 positions"),
        (RESID, zero_ablate(slice(3, 3)), ValueError, "is empty or reaches outside"),
        (RESID, zero_ablate([3, -14]), ValueError, r"positions \[3, -14\] name one of the 17 positions .* twice"),
        (RESID, zero_ablate(torch.tensor([[0], [0]])), ValueError, "positions of 2 rows were given.* 3 rows"),
        (RESID, zero_ablate(heads=0), ValueError, r"\[3, 17, 64\] has no axis of heads; attn.hook_z"),
        (Z, zero_ablate(heads=[1, 4]), ValueError, rf"heads \[4\] are outside the 4 heads of '{Z}'"),
        (V, zero_ablate(heads=2), ValueError, r"heads \[2\] are outside the 2 heads"),
        (RESID, replace(torch.zeros(5)), ValueError, r"shape \[5\] does not broadcast to \[3, 17, 64\]"),
        (RESID, add_noise(torch.zeros(3, 2, 64), [0]), ValueError, r"\[3, 2, 64\] does not broadcast to \[3, 1, 64\]"),
        (RESID, replace(torch.zeros(64) * 1j), TypeError, "cannot represent values of torch.complex64"),
        (RESID, swap({}), KeyError, "the cache has no"),
        (RESID, swap({"blocks.1.hook_resid_pre": torch.zeros(1)}), KeyError, "nearest.*blocks.1.hook_resid_pre"),
        (RESID, swap(of_shape(2, 17, 64)), ValueError, "the other run's .* has 2 rows; .* the 3 of this run"),
        (RESID, swap(of_shape(3, 9, 64), [12]), ValueError, r"positions \[12\] are outside .* the other run's"),
        (RESID, swap(of_shape(3, 9, 64)), ValueError, r"gives \[3, 9, 64\] for \[3, 17, 64\].*source_positions"),
        (RESID, swap(of_shape(3, 17, 64), [1, 2], source_positions=3), ValueError, "as many source_positions"),
        (RESID, swap(of_shape(64)), ValueError, "must be an activation"),
        (RESID, mean_ablate(of_shape(64)), ValueError, "must be an activation"),
        (RESID, swap({0: of_shape(3, 17, 64)}), ValueError, r"inside the denoising loop.*cache\[step\]"),
    ],
)
def test_what_does_not_fit_is_named(either, clean, name, hook_fn, error, message):
    with pytest.raises(error, match=message):
        either.model.run_with_hooks(clean, fwd_hooks=[(name, hook_fn)])


def test_a_step_that_the_cache_does_not_hold(either, runs):
    prompt, _, options = runs
    _, cache = either.model.denoise_with_cache(prompt, names_filter=RESID, steps_filter=[1, 2], **options)
    with pytest.raises(KeyError, match=r"has the steps \[1, 2\] and not 0: use at_steps\(hook, \[1, 2\]\)"):
        either.model.denoise(prompt, fwd_hooks=[(RESID, on_branch(swap(cache), "conditional"))], **options)
    there = at_steps(on_branch(swap(cache), "conditional"), cache.steps)
    either.model.denoise(prompt, fwd_hooks=[(RESID, there)], **options)
