"""The logit lens, against the model's own norm and unembedding, TransformerLens's lens, and the states in the loop."""

import re
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close
from transformer_lens.tools.analysis.logit_lens import logit_lens as their_lens

from diffusion_lens import DiffusionConfig, Fact, HookedDiffusionTransformer
from diffusion_lens.analysis import LogitLens, logit_lens
from diffusion_lens.analysis.lens.lens import TABLES
from diffusion_lens.denoising.samplers import ReMDM
from diffusion_lens.interventions import at_steps, zero_ablate
from diffusion_lens.model.noise import HeadAt
from diffusion_lens.model.transformer import normalized
from diffusion_lens.model.weights import fold_norms

PROMPT = "Gustav Geisser is the"


def row_of(model, position, block=None, row=0):
    """The row that predicts a position, written out; the loop may read a block's first token in the row before."""
    if block is not None and block.first_shifted and position == block.start[row]:
        return position - 1
    return position if model.cfg.readout == "in_place" else max(position - 1, 0)


def points(model):
    last = model.cfg.n_layers
    return [*(f"blocks.{layer}.hook_resid_pre" for layer in range(last)), f"blocks.{last - 1}.hook_resid_post"]


def written_out(model, states, targets, present, k=5, step=None):
    """Every number of the lens at some rows, from the states Float[layer row d_model] and, for each row, a target and
    the token that stands there."""
    with model.clock.at(step):
        logits = model.unembed(normalized(model, states)).float()
        if model.head.needs_canvas:
            logits = HeadAt.of(model, present[None]).clean_logits(logits)
    if model.cfg.head != "logits" and model.cfg.has_mask:  # [MASK] takes no part in the softmax
        logits[..., model.cfg.mask_token_id] = -1e6
    log_p = logits.log_softmax(-1)
    order = logits.argsort(dim=-1, descending=True)
    n_writable = logits.shape[-1] - (model.cfg.has_mask and model.cfg.mask_token_id < logits.shape[-1])
    order = order[order != model.cfg.mask_token_id].view(*logits.shape[:-1], n_writable)
    last = log_p[-1].expand_as(log_p)
    of_target = log_p.gather(-1, targets.expand(len(states), -1)[..., None])
    return {
        "top_tokens": order[..., :k],
        "top_probabilities": log_p.exp().gather(-1, order[..., :k]),
        "entropy": torch.distributions.Categorical(logits=logits).entropy(),
        "kl": torch.nn.functional.kl_div(log_p, last, reduction="none", log_target=True).sum(-1),
        # Under uniform noise many tokens tie: they have no probability.
        "target_ranks": (log_p.gather(-1, order) > of_target).sum(dim=-1, keepdim=True),
        "target_probabilities": of_target.exp(),
    }


def states_in_the_loop(model, trajectory, hooks=(), branch="conditional"):
    """The states of every layer at every step of a forced replay, [layer batch pos d_model] by step."""
    states = {}

    def store(activation, hook):
        if hook.step.branch == branch:
            states.setdefault(hook.step.index, {})[hook.name] = activation.clone()

    own = [(name, store) for name in points(model)]
    trajectory.replay(model, canvas="forced", fwd_hooks=[*hooks, *own])
    return {step: torch.stack([by_name[name] for name in points(model)]) for step, by_name in states.items()}


def assert_reads(lens, model, states, index, row=0, step=None):
    """All entries of one row of one step are those of these states, Float[layer pos d_model]."""
    absent = lens.entropy[index, 0, row].isnan()
    tables = {name: getattr(lens, name)[index, :, row] for name in TABLES}
    for table in tables.values():
        assert (table[:, absent] == -1).all() if table.dtype == torch.long else table[:, absent].isnan().all()
    rows = [row_of(model, position, step and step.block, row) for position in lens.positions]
    assert torch.equal(lens.rows[index, row], torch.tensor(rows).masked_fill(absent, -1))
    present = None if step is None else step.tokens[row, rows]
    expected = written_out(model, states[:, rows], lens.targets[row, :, 0].clamp(min=0), present, step=step)
    for name, table in tables.items():
        has_target = ~absent & (lens.targets[row, :, 0] >= 0) if name.startswith("target") else ~absent
        found, wanted = table[:, has_target], expected[name][:, has_target]
        if name == "target_ranks":  # Rounding may exchange two tokens that are almost equally likely.
            assert (found != wanted).sum() <= 1
            wanted = torch.where((found - wanted).abs() == 1, found, wanted)
        assert_close(found, wanted, rtol=1e-3, atol=2e-5)


def denoised(given):
    size = given.model.cfg.block_size if given.model.cfg.self_conditioning else 4  # its canvases are whole
    return given.model.denoise(given.tokens[:2, :4] % 500, max_new_tokens=size, steps=4)


def test_a_pass_is_read_as_written_out(every):
    model, tokens = every.model, every.tokens[:2, :6] % 500
    if model.cfg.has_mask:
        tokens = tokens.clone()
        tokens[:, 3:] = model.cfg.blank
    targets = torch.randint(500, (2, 6), generator=torch.Generator().manual_seed(1))
    lens = logit_lens(model, tokens, targets=targets, top_k=3)
    assert lens.positions == ([*range(1, 7)] if model.cfg.is_autoregressive else [*range(6)])
    _, cache = model.run_with_cache(tokens)
    states = torch.stack([cache[name] for name in points(model)])
    rows = [row_of(model, position) for position in lens.positions]
    for row in range(2):
        for name, expected in written_out(model, states[:, row, rows], targets[row], tokens[row, rows], 3).items():
            assert_close(getattr(lens, name)[:, row], expected, rtol=1e-3, atol=2e-5)
    assert (lens.kl[-1] == 0).all()
    assert lens.labels == [f"{layer}_pre" for layer in range(model.cfg.n_layers)] + ["final_post"]
    assert lens.rows.tolist() == [rows] * 2


def test_it_is_transformer_lenss(every, monkeypatch):
    model, tokens = every.model, every.tokens[:2, :6] % 500
    if model.cfg.time_conditioning:  # theirs cannot read through a norm that the time modulates, which says so
        with pytest.raises(ValueError, match="needs a modulation"):
            their_lens(model, tokens, positions=None)
        return
    monkeypatch.setattr(model.unembed, "soft_cap", None)  # theirs reads logits before the cap
    theirs = their_lens(model, tokens, positions=None, top_k=4, return_type="probs")
    ours = logit_lens(model, tokens, top_k=4)
    assert ours.labels == theirs.labels
    rows = ours.rows[0].tolist()
    if model.cfg.head == "logits":  # theirs leaves [MASK] in the softmax
        assert_close(ours.entropy, theirs.readout.entropy[..., rows], rtol=1e-4, atol=1e-5)
    if model.cfg.d_vocab_out != model.cfg.d_vocab or not model.cfg.has_mask:  # theirs ranks [MASK] too
        assert torch.equal(ours.top_tokens, theirs.readout.top_ids[..., rows, :])
        assert_close(ours.top_probabilities, theirs.readout.values[..., rows, :], rtol=1e-4, atol=1e-6)
    followed = their_lens(model, tokens, positions=None, targets=tokens.roll(-1, 1))
    ranked = logit_lens(model, tokens, targets=tokens.roll(-1, 1)[:, rows])
    assert_close(ranked.target_ranks[..., 0], followed.readout.target_ranks[..., rows, 0], rtol=0, atol=1)


def test_a_trajectory_is_read_as_the_loop_computes_it(every):
    model, trajectory = every.model, denoised(every)
    lens = logit_lens(model, trajectory)
    states = states_in_the_loop(model, trajectory)
    assert lens.steps == [*range(trajectory.n_steps)]
    for step in lens.steps:
        assert_reads(lens, model, states[step][:, step % 2], step, step % 2, trajectory.state_at(step))
    assert torch.equal(lens.at_step(1).rows, lens.rows[1])
    final = trajectory.tokens[:, lens.positions]
    assert torch.equal(lens.targets[..., 0], torch.where(model.cfg.writable(final), final, -1))
    n_distinct = trajectory.n_steps if model.cfg.time_conditioning else len(trajectory.canvases[:-1].unique(dim=0))
    assert lens.record["forward_passes"] == (1 if model.cfg.is_autoregressive else n_distinct)


def test_the_last_layer_is_what_the_loop_proposes(several):
    model = several.model
    trajectory, proposed = denoised(several), {}

    def store(logits, hook):
        proposed[hook.step.index] = logits.clone()

    trajectory.replay(model, fwd_hooks=[("denoise.hook_logits", store)])
    lens = logit_lens(model, trajectory, layers=[-1])
    for index, step in enumerate(lens.steps):
        written = trajectory.revealed_at[:, lens.positions] == step
        if not written.any():
            continue
        logits = proposed[step][:, lens.positions][written]
        if model.cfg.head != "logits" and model.cfg.has_mask:  # [MASK] takes no part in the softmax
            logits[..., model.cfg.mask_token_id] = -1e6
        assert torch.equal(lens.top_tokens[index, 0][written][:, 0], logits.argmax(-1))
        entropy = torch.distributions.Categorical(logits=logits.float()).entropy()
        assert_close(lens.entropy[index, 0][written], entropy, rtol=1e-4, atol=1e-5)
        assert (lens.target_ranks[index, 0][written] == 0).all()
        assert_close(
            lens.target_probabilities[index, 0, ..., 0][written],
            trajectory.confidence[:, lens.positions][written],
            rtol=1e-4,
            atol=1e-5,
        )


def test_hooks_change_the_lens_as_they_change_the_loop(several):
    model, trajectory = several.model, denoised(several)
    hooks = [("blocks.1.hook_mlp_out", at_steps(zero_ablate(), [1, -1]))]
    lens, plain = logit_lens(model, trajectory, fwd_hooks=hooks), logit_lens(model, trajectory)
    states = states_in_the_loop(model, trajectory, hooks)
    for step in lens.steps:
        assert_reads(lens, model, states[step][:, 0], step, step=trajectory.state_at(step))
        is_read = ~lens.entropy[step].isnan()
        # Passes of other batches may round otherwise.
        changed = (lens.entropy[step, 2:] - plain.entropy[step, 2:])[is_read[2:]].abs() > 1e-4
        assert bool(changed.any()) == (step in (1, trajectory.n_steps - 1))
    assert lens.record["forward_passes"] == trajectory.n_steps
    assert list(lens.record["hooks"]) == ["blocks.1.hook_mlp_out"]
    assert not model.is_hooked
    with model.hooks(fwd_hooks=hooks), pytest.warns(UserWarning, match="written by another network"):
        attached = logit_lens(model, trajectory)
    assert torch.equal(attached.entropy.nan_to_num(), lens.entropy.nan_to_num())


@pytest.mark.parametrize("several", ["lit_gpt-mdm", "dream"], indirect=True)
@pytest.mark.parametrize("branch", ["conditional", "unconditional"])
def test_each_branch_of_guidance_is_read(several, branch):
    model = several.model
    trajectory = model.denoise(several.tokens[:2, :4] % 500, max_new_tokens=3, steps=3, cfg_scale=0.7)
    lens = logit_lens(model, trajectory, branch=branch)
    states = states_in_the_loop(model, trajectory, branch=branch)
    for step in lens.steps:
        assert_reads(lens, model, states[step][:, 1], step, row=1)
    assert (lens.kl[:, -1] == 0).all()
    assert (lens.record["branch"], lens.record["cfg_scale"]) == (branch, 0.7)


def test_tokens_that_are_remasked(several):
    model = several.model
    if model.cfg.opens_blocks or model.cfg.uniform_noise:
        return
    trajectory = model.denoise(several.tokens[:1, :3] % 500, max_new_tokens=6, steps=6, sampler=ReMDM("cap", eta=0.8))
    lens, states = logit_lens(model, trajectory), states_in_the_loop(model, trajectory)
    masked = trajectory.is_masked(trajectory.canvases)
    assert (masked[1:] & ~masked[:-1]).any()
    assert torch.equal(lens.masked, masked[:-1][..., lens.positions])
    for step in lens.steps:
        assert_reads(lens, model, states[step][:, 0], step)


def test_steps_with_the_same_canvas_share_a_pass(several):
    model = several.model
    if model.cfg.is_autoregressive:
        return
    trajectory = model.denoise(several.tokens[:1, :4] % 500, max_new_tokens=3, steps=8)
    distinct = len(trajectory.canvases[:-1].unique(dim=0))
    lens = logit_lens(model, trajectory)
    assert distinct < 8
    # A time-conditioned network reads the same canvas otherwise at another step.
    assert lens.record["forward_passes"] == (8 if model.cfg.time_conditioning else distinct)
    states = states_in_the_loop(model, trajectory)
    for step in lens.steps:
        assert_reads(lens, model, states[step][:, 0], step, step=trajectory.state_at(step))


def test_some_steps_layers_and_positions(several):
    model, trajectory = several.model, denoised(several)
    whole = logit_lens(model, trajectory)
    part = logit_lens(model, trajectory, steps=[-1, 1], layers=[2, -1, 0], positions=[-2, 5])
    n = trajectory.n_steps
    assert (part.steps, part.layers, part.positions) == ([n - 1, 1], [2, model.cfg.n_layers, 0], [6, 5])
    assert part.labels == ["2_pre", "final_post", "0_pre"]
    picked = [whole.positions.index(position) for position in part.positions]
    for name in TABLES:
        expected = getattr(whole, name)[part.steps][:, part.layers][:, :, :, picked]
        assert_close(getattr(part, name), expected, equal_nan=True, rtol=1e-3, atol=1e-5)
    assert torch.equal(part.tokens, whole.tokens[part.steps][..., picked])
    later = logit_lens(model, trajectory.from_step(2))
    assert later.steps == [*range(2, n)]
    assert_close(later.entropy, whole.entropy[2:], equal_nan=True, rtol=1e-4, atol=1e-5)


def test_ragged_rows_are_read_as_alone(small):
    texts = [PROMPT, "Gustav is"]
    ragged = logit_lens(small, texts, targets=[5, 7])
    for row, text in enumerate(texts):
        alone = logit_lens(small, text, targets=[5, 7])
        n = len(alone.positions)
        for name in TABLES:
            assert_close(getattr(ragged, name)[:, row, :n], getattr(alone, name)[:, 0], rtol=1e-4, atol=1e-5)
            rest = getattr(ragged, name)[:, row, n:]
            assert (rest == -1).all() if rest.dtype == torch.long else rest.isnan().all()
        assert (ragged.rows[row, n:] == -1).all()
    tokens, mask = small.tokenize(texts)
    with pytest.raises(ValueError, match=r"pass attention_mask=mask"):
        logit_lens(small, tokens)
    masked = logit_lens(small, tokens, targets=[5, 7], attention_mask=mask)
    assert torch.equal(masked.entropy.nan_to_num(), ragged.entropy.nan_to_num())
    runs = small.denoise(texts, max_new_tokens=3, steps=3)
    together = logit_lens(small, runs)
    for row in range(2):
        alone = logit_lens(small, runs.row(row))
        assert_close(together.entropy[:, :, row], alone.entropy[:, :, 0], equal_nan=True, rtol=1e-4, atol=1e-5)
        assert torch.equal(together.target_ranks[:, :, row], alone.target_ranks[:, :, 0])
    assert together.entropy.isnan().any()


def test_padding_on_the_left_is_not_read(own_pad):
    tokens = torch.tensor([[2, 2, 10, 11, 12], [20, 21, 22, 23, 24]])
    lens = logit_lens(own_pad, tokens)
    alone = logit_lens(own_pad, tokens[:1, 2:])
    shift = [lens.positions.index(position + 2) for position in alone.positions]
    assert_close(lens.entropy[:, 0, shift], alone.entropy[:, 0], rtol=1e-4, atol=1e-5)
    others = [i for i in range(len(lens.positions)) if i not in shift]
    assert lens.entropy[:, 0, others].isnan().all()
    assert not lens.entropy[:, 1].isnan().any()


def test_a_bidirectional_model_without_masks(several):
    if several.model.cfg.is_autoregressive:
        return
    architecture = replace(several.model.cfg.architecture, mask_token_id=None, head="logits")
    model = several.tell(HookedDiffusionTransformer(DiffusionConfig.from_architecture(architecture, device="cpu")))
    lens = logit_lens(model, several.tokens[:1, :5] % 500)
    assert not lens.masked.any()
    assert lens.entropy.isfinite().all()


def test_targets(tiny):
    query = Fact(PROMPT, "Gustav Geisser", " brave drummer").to_query(tiny, n_masks=10 if tiny.cfg.has_mask else None)
    lens = logit_lens(tiny, query)
    for position, token in zip(query.answer_positions, query.answer_tokens, strict=True):
        assert lens.targets[0, lens.positions.index(position), 0] == token
    assert lens.targets[0, lens.positions.index(3), 0] == query.tokens[3]
    brave, drummer = (tiny.to_single_token(word) for word in ("brave", "drummer"))
    both = logit_lens(tiny, query, targets=["brave", drummer], positions=[4])
    assert both.targets.tolist() == [[[brave, drummer]]]
    assert both.target_ranks[-1, 0, 0, 0] == 0 < both.target_ranks[-1, 0, 0, 1]
    one = logit_lens(tiny, query, targets="drummer", positions=[4])
    assert torch.equal(one.target_ranks[..., 0], both.target_ranks[..., 1])
    absent = logit_lens(tiny, query, targets=torch.tensor([[-1]]), positions=[4])
    assert (absent.target_ranks == -1).all()
    assert absent.target_probabilities.isnan().all()


def test_less_precision_and_folded_norms(several):
    model, tokens = several.model, several.tokens[:2, :6] % 500
    copy = HookedDiffusionTransformer(model.cfg, tensors=model.state_dict().items())
    if model.cfg.time_conditioning:
        with pytest.raises(ValueError, match="cannot be folded"):
            fold_norms(copy)
    else:
        fold_norms(copy)
        plain, folded = logit_lens(model, tokens), logit_lens(copy, tokens)
        assert_close(folded.kl, plain.kl, rtol=1e-3, atol=1e-4)
        assert torch.equal(folded.top_tokens[..., 0], plain.top_tokens[..., 0])
    half = several.tell(HookedDiffusionTransformer(model.cfg, tensors=model.state_dict().items()).to("bfloat16"))
    lens = logit_lens(half, tokens)
    logits = half(tokens)[:, lens.rows[0]].float()
    if model.cfg.head != "logits":  # [MASK] takes no part in the softmax
        logits[..., model.cfg.mask_token_id] = -1e6
    assert lens.entropy.dtype == torch.float32
    assert_close(lens.entropy[-1], torch.distributions.Categorical(logits=logits).entropy(), rtol=1e-2, atol=1e-2)
    assert (lens.kl[-1] == 0).all()


def test_less_memory_takes_more_passes_and_gives_the_same(several):
    model = several.model
    tokens = several.tokens[:2] % 500
    whole = logit_lens(model, tokens)
    with pytest.raises(ValueError, match=r"a pass that reads one row takes [\d,]+: give more") as refused:
        logit_lens(model, tokens, max_bytes=1000)
    one_row = int(re.findall(r"takes ([\d,]+)", str(refused.value))[0].replace(",", ""))
    budget = sum(getattr(whole, name).nbytes for name in TABLES) + one_row
    small = logit_lens(model, tokens, max_bytes=budget + 2**12)
    assert small.record["forward_passes"] > whole.record["forward_passes"] == 1
    for name in TABLES:
        assert_close(getattr(small, name), getattr(whole, name), equal_nan=True, rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match="a pass that reads one row takes"):
        logit_lens(model, tokens, max_bytes=budget - 1)


def test_the_layer_from_which_the_target_leads(tiny):
    lens = logit_lens(tiny, tiny.denoise(PROMPT, length=10, steps=4))
    first, within = lens.first_layer(), lens.first_layer(rank=3)
    for index in torch.cartesian_prod(*map(torch.arange, first.shape)).tolist():
        step, row, position, target = index
        ranks = lens.target_ranks[step, :, row, position, target].tolist()
        leading = [layer for layer in range(5) if all(rank == 0 for rank in ranks[layer:])]
        assert first[tuple(index)] == min(leading, default=-1)
        near = [layer for layer in range(5) if all(0 <= rank <= 3 for rank in ranks[layer:])]
        assert within[tuple(index)] == min(near, default=-1)
    backwards = logit_lens(tiny, tiny.denoise(PROMPT, length=10, steps=4), layers=[4, 3, 2, 1, 0])
    assert torch.equal(backwards.first_layer(), first)


def test_a_file_with_one_row_for_all_steps_is_refused(tiny, tmp_path):
    lens = logit_lens(tiny, tiny.denoise(PROMPT, length=10, steps=2))
    object.__setattr__(lens, "rows", lens.rows[0])
    with pytest.raises(ValueError, match=r"'rows', which should be .*step batch selected.* compute it again"):
        LogitLens.load(lens.save(tmp_path / "lens.safetensors"))


def test_it_is_saved_and_shown(tiny, tmp_path):
    run = tiny.denoise(PROMPT, length=14, steps=3)
    lens = logit_lens(tiny, run, top_k=2)
    again = LogitLens.load(lens.save(tmp_path / "lens.safetensors"))
    for name in (*TABLES, "targets", "tokens", "rows"):
        assert torch.equal(getattr(again, name).nan_to_num(), getattr(lens, name).nan_to_num())
    assert (again.words, again.record, again.labels) == (lens.words, lens.record, lens.labels)
    n_steps, n_pos = lens.entropy.shape[0], lens.entropy.shape[-1]
    assert repr(again) == f"LogitLens({tiny.cfg.model_name}, {n_steps} steps, 5 layers, 1 x {n_pos} positions, top 2)"

    ax = lens.plot(position=4)
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"step {step}" for step in lens.steps]
    assert [label.get_text() for label in ax.get_xticklabels()] == lens.labels
    shown = torch.from_numpy(ax.get_images()[0].get_array().filled(float("nan")))
    assert torch.equal(shown, lens.entropy[:, :, 0, lens.positions.index(4)])
    assert ax.texts[len(lens.labels) - 1].get_text() == "brave"
    ranks = lens.plot(step=0, show="rank")
    shown = torch.from_numpy(ranks.get_images()[0].get_array().filled(float("nan")))
    assert shown.shape == (n_pos, 5)
    assert_close(shown[-1, -1] if tiny.cfg.has_mask else shown[3, -1], torch.tensor(0.0))
    assert lens.at_step(1).plot(show="probability").get_title() == tiny.cfg.model_name
    assert torch.equal(lens.at_step(1).entropy.nan_to_num(), lens.entropy[1].nan_to_num())


def test_what_cannot_be_read_is_refused(tiny):
    run = tiny.denoise(PROMPT, length=8, steps=3)
    n_steps = run.n_steps
    for arguments, message in (
        ({"steps": [n_steps]}, rf"steps=\[{n_steps}\]; give numbers from 0 to {n_steps - 1}"),
        ({"layers": [5]}, r"layers=\[5\]; give numbers from 0 to 4"),
        ({"layers": []}, r"layers=\[\]"),
        ({"positions": [8]}, r"positions=\[8\]"),
        ({"top_k": 0}, "top_k=0; it must be at least 1"),
        ({"branch": "unconditional"}, "needs guidance"),
        ({"branch": "both"}, "branch='both'"),
        ({"targets": [tiny.cfg.d_vocab]}, "cannot write the target tokens"),
        ({"targets": []}, "give at least one token"),
        (
            {"targets": torch.zeros(1, 3, dtype=torch.long)},
            r"a tensor has one token for each row and selected position",
        ),
        ({"fwd_hooks": [("ln_final.hook_scale", zero_ablate())]}, "a hook is attached to ln_final or unembed"),
        ({"fwd_hooks": [("denoise.hook_tokens", zero_ablate())]}, "passes only inside the denoising loop"),
        ({"fwd_hooks": [("denoise.hook_logits", zero_ablate())]}, "passes only inside the denoising loop"),
    ):
        with pytest.raises(ValueError, match=message):
            logit_lens(tiny, run, **arguments)
        assert not tiny.is_hooked
    with pytest.raises(ValueError, match="steps= requires a trajectory"):
        logit_lens(tiny, PROMPT, steps=[0])
    with pytest.raises(ValueError, match="attention_mask= belongs to tokens"):
        logit_lens(tiny, PROMPT, attention_mask=torch.ones(1, 4))
    with pytest.raises(TypeError, match="the nearest is 'positions'"):
        logit_lens(tiny, PROMPT, position=[0])
    lens = logit_lens(tiny, run)
    for call, message in (
        (lambda: lens.at_step(9), "step 9 was not read"),
        (lambda: lens.plot(), "give either step="),
        (lambda: lens.plot(position=50), "position 50 is not"),
        (lambda: lens.plot(step=0, show="logits"), "show='logits' is unknown; it must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    if tiny.cfg.is_autoregressive:
        with pytest.raises(ValueError, match="nothing precedes position 0"):
            logit_lens(tiny, run, positions=[0])
