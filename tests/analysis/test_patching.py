"""Grids equal TransformerLens's own, and the laws of patching hold."""

import copy

import pytest
import torch
from parts_by_hand import told_noise_of
from refusals import unrefused
from transformer_lens import patching

from diffusion_lens import Fact, HookedDiffusionTransformer, Query
from diffusion_lens.analysis import answer_probability, patch_grid
from diffusion_lens.analysis.patching import PatchGrid
from diffusion_lens.analysis.patching.runs import PATCH_SITES
from diffusion_lens.hooks.names import resid_post, resid_pre
from diffusion_lens.model.config import UNREACHED
from diffusion_lens.model.noise import HeadAt

# A masked diffusion model and a causal one.
both_variants = pytest.mark.parametrize("every", ["lit_gpt-mdm", "lit_gpt-ar"], indirect=True)
# These; with time conditioning, one under uniform noise and one by blocks; and one with experts. Log scores are read
# beside the tokens of the corrupted canvas, so that with all of the clean stream they still differ from the clean run
# where a token that is predicted differs.
WITH_NOISE = ["lit_gpt-mdm", "lit_gpt-ar", "udlm", "bd3lm", "llada_moe-options"]
with_noise = pytest.mark.parametrize("every", WITH_NOISE, indirect=True)
every_noise = pytest.mark.parametrize("every", [*WITH_NOISE, "sedd-uniform"], indirect=True)
# Models of each order in which a run writes its canvas, with steps of their own where the network is given the time.
every_loop = pytest.mark.parametrize("every", ["lit_gpt-mdm", "lit_gpt-ar", "udlm", "bd3lm", "llada2"], indirect=True)
# Sites that are compared with TransformerLens's tools on one model or on the other.
COMPARED = {
    "mdm": ("resid_pre", "attn_out", "k", "pattern"),
    "ar": ("resid_mid", "mlp_out", "z", "q", "v"),
}

# Our sites by the names of TransformerLens's tools, by position and for all positions of a head together.
BY_POSITION = {
    "resid_pre": "resid_pre",
    "resid_mid": "resid_mid",
    "attn_out": "attn_out",
    "mlp_out": "mlp_out",
    "z": "attn_head_out_by_pos",
    "q": "attn_head_q_by_pos",
    "k": "attn_head_k_by_pos",
    "v": "attn_head_v_by_pos",
    "pattern": "attn_head_pattern_by_pos",
}
BY_HEAD = {
    "z": "attn_head_out_all_pos",
    "q": "attn_head_q_all_pos",
    "k": "attn_head_k_all_pos",
    "v": "attn_head_v_all_pos",
    "pattern": "attn_head_pattern_all_pos",
}


def metric(logits):
    return (logits[:, -1, 3] - logits[:, -1, 5]).mean()


def scored(model, tokens):
    """The metric of a plain pass, which reads logits of p(x_0)."""
    present = tokens if model.head.needs_canvas else None
    return metric(HeadAt.of(model, present).clean_logits(model(tokens))).detach()


def close(actual, expected, name=""):
    torch.testing.assert_close(
        actual, expected, rtol=1e-5, atol=2e-5, equal_nan=True, msg=lambda message: f"{name} {message}"
    )


@pytest.fixture(scope="module")
def runs():
    """Two rows of three positions; the runs differ at position 1 in one row, at position 2 in the other."""
    clean = torch.tensor([[11, 22, 33], [55, 66, 77]])
    corrupted = torch.tensor([[11, 99, 33], [55, 66, 111]])
    return clean, corrupted


@pytest.fixture(scope="session")
def models():
    """The bundled models by their kinds."""
    return {kind: HookedDiffusionTransformer.from_pretrained(f"tiny-{kind}", device="cpu") for kind in ("mdm", "ar")}


def patched(model, tokens, name, positions, states):
    """The metric's logits with `states` at `positions`, the slow way: the whole network, one hook."""

    def hook_fn(activation, hook):
        activation = activation.clone()
        activation[:, positions] = states
        return activation

    with torch.no_grad():
        return model.run_with_hooks(tokens, fwd_hooks=[(name, hook_fn)])


@pytest.fixture(scope="module")
def pair(every, runs):
    """The two runs; by blocks of four with as many tokens after them, so that the row that is read is in the second."""
    if every.model.cfg.block_size is None:
        return runs
    same = torch.tensor([[44, 45, 46, 47]]).repeat(2, 1)
    return tuple(torch.cat([run, same], dim=1) for run in runs)


def sites_of(model):
    """All sites; blocks of experts have no neurons that could be compared."""
    return [site for site in PATCH_SITES if site != "post" or model.cfg.experts is None]


@pytest.fixture(scope="module")
def grids(every, pair):
    """The grids of every site, by position."""
    return patch_grid(every.model, *pair, metric, sites_of(every.model))


@pytest.fixture(scope="module")
def clean_cache(every, pair):
    return every.model.run_with_cache(pair[0])[1]


def transformer_lenss(every, pair, clean_cache, name):
    with torch.no_grad():
        return getattr(patching, f"get_act_patch_{name}")(every.model, pair[1], clean_cache, metric)


@both_variants
def test_grids_are_transformer_lenss(every, pair, grids, clean_cache):
    for site in COMPARED[every.kind]:
        grid, theirs = grids[site], transformer_lenss(every, pair, clean_cache, BY_POSITION[site])
        assert grid.axes == ("layer", "pos", "head")[: grid.scores.dim()]
        close(grid.scores, theirs.transpose(1, 2) if site == "pattern" else theirs, site)
        assert grid.effect.abs().max() > 0.1


OTHERS = [("dream", "mlp_out"), ("llama", "k"), ("bd3lm", "z"), ("udlm", "mlp_out"), ("llada2", "mlp_out")]


@pytest.mark.parametrize(("every", "site"), OTHERS, indirect=["every"])
def test_grids_are_transformer_lenss_in_other_families(every, pair, clean_cache, site):
    grid = patch_grid(every.model, *pair, metric, site)
    close(grid.scores, transformer_lenss(every, pair, clean_cache, BY_POSITION[site]))


@both_variants
def test_whole_heads_are_transformer_lenss(every, pair, clean_cache):
    sites = [site for site in COMPARED[every.kind] if site in BY_HEAD]
    for site, grid in patch_grid(every.model, *pair, metric, sites, positions="all").items():
        assert grid.axes == ("layer", "head")
        close(grid.scores, transformer_lenss(every, pair, clean_cache, BY_HEAD[site]), site)


@with_noise
def test_the_stream_after_a_block_is_the_stream_before_the_next(grids):
    close(grids["resid_post"].scores[:-1], grids["resid_pre"].scores[1:])
    last = grids["resid_post"].scores[-1]
    close(last[-1], grids["resid_post"].clean)
    close(last[:-1], grids["resid_post"].corrupted.expand(len(last) - 1))


@every_noise
def test_the_corrupted_run_patched_into_itself_is_itself(every, pair):
    score = scored(every.model, pair[1])
    for grid in patch_grid(every.model, pair[1], pair[1], metric, sites_of(every.model)).values():
        assert (grid.scores == grid.corrupted).all()
        close(grid.clean, score)


@with_noise
def test_the_whole_stream_patched_is_the_clean_run(every, pair):
    for grid in patch_grid(every.model, *pair, metric, ["resid_pre", "resid_post"], positions="all").values():
        assert grid.axes == ("layer",)
        close(grid.scores, grid.clean.expand(3))
        close(grid.clean, scored(every.model, pair[0]))
        close(grid.corrupted, scored(every.model, pair[1]))


@with_noise
def test_before_the_first_difference_a_causal_model_has_nothing_to_patch(every, grids):
    effect = grids["resid_mid"].effect
    assert bool((effect[:, 0] == 0).all()) == (every.kind == "ar")
    assert effect[:2, 1:].abs().min() > 0


@pytest.mark.parametrize("every", ["bd3lm", "llada2"], indirect=True)
def test_by_blocks_a_difference_is_patched_from_its_own_block_on(every, pair):
    """The other way round, the tokens that differ in the second block, and the row that is read in either."""
    clean, corrupted = (run[:, [3, 4, 5, 6, 0, 1, 2]] for run in pair)
    for row in (2, 6):
        grid = patch_grid(every.model, clean, corrupted, lambda logits: logits[:, 0, 3].mean(), "z", logits_at=[row])
        assert (grid.effect[:, :4] == 0).all()
        assert (grid.effect[:2, 4:].abs().amax(dim=(0, 2)) > 0).all() == (row == 6)
        assert bool((grid.effect == 0).all()) == (row == 2)


@every_noise
def test_a_row_of_a_batch_is_patched_as_it_is_alone(every, pair):
    clean, corrupted = pair
    one_layer = dict(sites="z", layers=[1])
    for row in range(2):
        together = patch_grid(every.model, clean, corrupted, lambda logits, row=row: logits[row, -1, 3], **one_layer)
        alone = patch_grid(every.model, clean[[row]], corrupted[[row]], lambda logits: logits[0, -1, 3], **one_layer)
        close(together.scores, alone.scores)


def test_layers_heads_and_positions_can_be_selected(either, runs):
    whole = patch_grid(either.model, *runs, metric, ["k", "mlp_out"])
    some = patch_grid(either.model, *runs, metric, ["k", "mlp_out"], layers=[2, 0], heads=[1], positions=[2, 1])
    close(some["k"].scores, whole["k"].scores[[2, 0]][:, [2, 1]][:, :, [1]])
    close(some["mlp_out"].scores, whole["mlp_out"].scores[[2, 0]][:, [2, 1]])
    assert some["k"].coordinates == {"layer": [2, 0], "pos": [2, 1], "head": [1]}


def test_negative_numbers_count_from_the_end(either, runs):
    picked = patch_grid(either.model, *runs, metric, ["k", "z"], layers=[2, 0], heads=[1], positions=[2, 1])
    negative = patch_grid(either.model, *runs, metric, ["k", "z"], layers=[-1, 0], heads=[-1], positions=[-1, 1])
    assert torch.equal(negative["k"].scores, picked["k"].scores)
    assert negative["k"].coordinates == {"layer": [2, 0], "pos": [2, 1], "head": [1]}
    assert negative["z"].coordinates["head"] == [3]
    longer = torch.tensor([[7, 11, 22, 33, 44, 55]])
    pairs, ends = (
        patch_grid(either.model, longer, runs[1][:1], metric, "resid_pre", positions=[pair, [pair, (0, 0)]])
        for pair in ((4, 1), (-2, -2))
    )
    assert torch.equal(ends.scores, pairs.scores)
    assert ends.coordinates == pairs.coordinates


def test_pairs_shift_and_lists_go_together(either, runs):
    """Two positions of a longer clean run, each alone and then both, into other positions of the corrupted one."""
    model, layer = either.model, 1
    clean, corrupted = torch.tensor([[7, 11, 22, 33, 44, 55]]), runs[1][:1]
    grid = patch_grid(model, clean, corrupted, metric, "resid_pre", positions=[(4, 1), (5, 2), [(4, 1), (5, 2)]])
    _, cache = model.run_with_cache(clean)
    states = cache[resid_pre(layer)][:, [4, 5]]
    slow = [
        patched(model, corrupted, resid_pre(layer), [1], states[:, [0]]),
        patched(model, corrupted, resid_pre(layer), [2], states[:, [1]]),
        patched(model, corrupted, resid_pre(layer), [1, 2], states),
    ]
    close(grid.scores[layer], torch.stack([metric(logits) for logits in slow]))
    assert grid.coordinates["pos"] == [[[4, 1]], [[5, 2]], [[4, 1], [5, 2]]]
    assert grid.labels == [["<44> → <99>", "<55> → <33>", "<44> → <99> … <55> → <33>"]]
    assert grid.clean.isnan()


def test_a_copy_of_the_model_as_source_changes_nothing(either, runs):
    copied = copy.deepcopy(either.model)
    own, other = (
        patch_grid(either.model, *runs, metric, ["resid_mid", "v"], source_model=source) for source in (None, copied)
    )
    for site, grid in own.items():
        assert torch.equal(grid.scores, other[site].scores)
        assert grid.record["source"] is None
        assert other[site].record["source"]["weights_sha256"] == grid.record["weights_sha256"]


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
@pytest.mark.parametrize(("reader", "source"), [("mdm", "ar"), ("ar", "mdm")])
def test_the_twin_patched_in_at_aligned_positions(models, reader, source):
    model, twin = models[reader], models[source]
    clean, corrupted = twin.to_tokens("Gustav Geisser is the brave"), model.to_tokens("brave drummer is")
    grid = patch_grid(model, clean, corrupted, metric, "attn_out", positions=[(0, 0), (4, 2)], source_model=twin)
    _, cache = twin.run_with_cache(clean)
    for layer in range(model.cfg.n_layers):
        name = f"blocks.{layer}.hook_attn_out"
        for column, (there, here) in enumerate([(0, 0), (4, 2)]):
            close(grid.scores[layer, column], metric(patched(model, corrupted, name, [here], cache[name][:, [there]])))
    assert grid.clean.isnan()
    assert grid.record["source"]["model"] == f"tiny-{source}"


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_a_clean_run_of_another_layout_is_not_scored(models):
    tokens = models["ar"].to_tokens("Gustav Geisser is")
    grid = patch_grid(models["mdm"], tokens, tokens, metric, "mlp_out", source_model=models["ar"])
    assert grid.clean.isnan()
    assert not grid.corrupted.isnan()


def test_a_clean_run_of_another_vocabulary_is_not_scored(either, runs):
    source = copy.deepcopy(either.model)
    source.cfg.d_vocab_out //= 2
    source.unembed.weight.data = source.unembed.weight.data[: source.cfg.d_vocab_out]
    grid = patch_grid(either.model, *runs, metric, "mlp_out", source_model=source)
    assert grid.clean.isnan()
    close(grid.scores, patch_grid(either.model, *runs, metric, "mlp_out").scores)


@every_loop
def test_steps_are_the_canvases_one_by_one(every):
    model, steps = every.model, [0, 2]
    clean, corrupted = (model.denoise(torch.tensor([[11, token, 22]]), max_new_tokens=3, steps=3) for token in (33, 44))
    settings = dict(sites=["z", "resid_post"], layers=[0, 2])
    grids = patch_grid(model, clean, corrupted, metric, steps=steps, **settings)
    for index, step in enumerate(steps):
        canvases = [run.canvases[step] for run in (clean, corrupted)]
        canvases = [canvas[:, canvas[0] != UNREACHED] for canvas in canvases]
        n_pos = canvases[0].shape[1]
        with told_noise_of(model, corrupted.state_at(step)):
            at_step = patch_grid(model, *canvases, metric, **settings)
        for site, alone in at_step.items():
            close(grids[site].scores[index, :, :n_pos], alone.scores)
            close(grids[site].clean[index], alone.clean)
            close(grids[site].corrupted[index], alone.corrupted)
            assert grids[site].scores[index, :, n_pos:].isnan().all()
            close(grids[site].effect[index, :, :n_pos], alone.effect)
    assert grids["z"].axes == ("step", "layer", "pos", "head")
    assert grids["z"].scores.shape == (2, 2, 5 if model.cfg.is_autoregressive else 6, 4)
    assert grids["z"].coordinates["step"] == steps
    assert (grids["z"].labels[0][-1] == "") == (model.cfg.is_autoregressive or model.cfg.opens_blocks)


@every_loop
def test_a_branch_keeps_the_numbers_of_its_steps(every):
    model = every.model
    clean, corrupted = (model.denoise(torch.tensor([[11, token, 22]]), max_new_tokens=3, steps=3) for token in (33, 44))
    whole = patch_grid(model, clean, corrupted, metric, "mlp_out", [2])
    branch = patch_grid(model, clean.from_step(2), corrupted.from_step(1), metric, "mlp_out", [2])
    assert torch.equal(whole.scores, branch.scores)


def test_a_position_must_be_reached_in_both_runs(either):
    """A shorter prompt reaches its positions later; a masked diffusion model has all of them from the start."""
    model = either.model
    shorter, longer = (
        model.denoise(torch.tensor([prompt]), length=6, steps=2) for prompt in ([11, 22, 33], [11, 44, 55, 66])
    )
    for clean, corrupted in ((shorter, longer), (longer, shorter)):
        scores = patch_grid(model, clean, corrupted, metric, "mlp_out", [0, 1], positions=[1, 3]).scores
        assert not scores[:, :, 0].isnan().any()
        assert scores[0, :, 1].isnan().all() == (either.kind == "ar")
        assert not scores[1, :, 1].isnan().any()


def test_ragged_rows_of_a_trajectory_are_patched_as_they_are_alone(small):
    """Prompts of different lengths in one batch: the shorter row is padded, or has not reached the last positions."""
    texts = [("Gustav Geisser is", "brave drummer is"), ("Gustav is", "brave is")]
    read = (lambda logits: logits[0, 1, 3], lambda logits: logits[1, 1, 3])
    together = [small.denoise([text[side] for text in texts], max_new_tokens=2, steps=2) for side in (0, 1)]
    for row, (pair, reads) in enumerate(zip(texts, read, strict=True)):
        alone = [small.denoise(text, max_new_tokens=2, steps=2) for text in pair]
        expected = patch_grid(small, *alone, lambda logits: logits[0, 1, 3], "resid_mid", [1], layers=[0, 1]).scores
        of_row = patch_grid(small, *together, reads, "resid_mid", [1], layers=[0, 1]).scores
        close(of_row[:, :, : expected.shape[2]], expected)
        assert row == 0 or of_row.shape[2] > expected.shape[2]


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_text_tokens_and_queries_are_one_input(small):
    facts = [Fact(f"{name} is the", name, " brave") for name in ("Gustav Geisser", "brave drummer")]
    queries = [fact.to_query(small) for fact in facts]
    by_query = patch_grid(small, *queries, metric, "resid_mid")
    by_tokens = patch_grid(small, *(query.tokens[None] for query in queries), metric, "resid_mid")
    assert torch.equal(by_query.scores, by_tokens.scores)
    by_text = patch_grid(small, *(fact.prompt for fact in facts), metric, "resid_mid")
    by_texts = patch_grid(small, *(small.to_tokens(fact.prompt) for fact in facts), metric, "resid_mid")
    assert torch.equal(by_text.scores, by_texts.scores)
    assert by_text.labels == [["Gustav → brave", "Geisser → drummer", "is", "the"]]


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_padded_texts_are_patched_as_they_are_alone(small):
    clean, corrupted = (["Gustav Geisser is", "Gustav"], ["brave drummer is", "brave"])
    together = patch_grid(small, clean, corrupted, lambda logits: logits[1, 0, 3], "resid_mid").scores
    alone = patch_grid(small, clean[1], corrupted[1], lambda logits: logits[0, 0, 3], "resid_mid").scores
    close(together[:, :1], alone)
    last = together.shape[1] - 1
    by_itself = patch_grid(
        small, clean, corrupted, lambda logits: logits[0, -1, 3], "resid_mid", positions=[last], layers=[1]
    )
    whole = patch_grid(small, clean[0], corrupted[0], lambda logits: logits[0, -1, 3], "resid_mid", layers=[1])
    close(by_itself.scores[0, 0], whole.scores[0, -1])


@with_noise
def test_only_the_selected_rows_are_computed(every, pair):
    shapes = set()

    def at_rows(logits):
        shapes.add(tuple(logits.shape))
        return (logits[:, 0, 3] - logits[:, 0, 5]).mean()

    # In the last block keys and values of other positions reach the rows that are read, and outputs do not.
    cells = dict(sites=["z", "k", "v", "resid_pre"], layers=[0, 2])
    at_all_rows = patch_grid(every.model, *pair, metric, **cells)
    for site, grid in patch_grid(every.model, *pair, at_rows, logits_at=[-1], **cells).items():
        close(grid.scores, at_all_rows[site].scores, site)
    assert shapes == {(2, 1, every.model.cfg.d_vocab_out)}


@with_noise
def test_answer_probability_is_read_where_the_answer_is(every):
    model = every.model
    if not model.cfg.is_autoregressive:
        noise = [model.cfg.blank] * 2 if model.cfg.has_mask else [7, 8]
        clean, corrupted = (Query(torch.tensor([9, s, *noise]), (1, 2), (2, 3), (11, 12)) for s in (21, 22))
    else:
        clean, corrupted = (Query(torch.tensor([9, s, 11]), (1, 2), (2, 3), (11, 12)) for s in (21, 22))
    rows = [1, 2] if model.cfg.is_autoregressive else [2, 3]
    grid = patch_grid(model, clean, corrupted, answer_probability(model, corrupted), "resid_pre")

    def p_answer(query):
        logits = model(query.tokens[None])[0, rows].detach()
        if model.cfg.head != "logits":  # [MASK] takes no part in the softmax
            logits[:, model.cfg.mask_token_id] = -1e6
        return logits.softmax(-1)[[0, 1], [11, 12]].prod()

    torch.testing.assert_close(grid.clean, p_answer(clean), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(grid.corrupted, p_answer(corrupted), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(grid.scores[0, 1], grid.clean, rtol=1e-4, atol=1e-9)
    assert grid.record["logits_at"] == rows
    assert grid.record["metric"] == "p('<11><12>')"
    assert grid.caption().startswith(f"For {model.cfg.model_name}, the figure shows the effect of patching resid_pre")
    with pytest.raises(ValueError, match="has its own rows"):
        patch_grid(model, clean, corrupted, answer_probability(model, corrupted), "z", logits_at=[1])


@pytest.mark.parametrize("every", ["uniform"], indirect=True)
def test_a_metric_of_another_kind_of_logits_is_refused(every, specimen):
    """The rows are the same, and a log score is no logit."""
    shape = every.model.cfg.architecture.to_dict()
    other = specimen({**shape, "family": "diffusion_lens", "head": "log_scores"}).model
    query = Query(torch.tensor([9, 21, 7, 8]), (1, 2), (2, 3), (11, 12))
    with pytest.raises(ValueError, match="another kind of logits"):
        patch_grid(every.model, query, query, answer_probability(other, query), "resid_pre")


def test_a_metric_of_the_other_model_is_refused(models):
    """Its rows are others: a causal model reads a token one row earlier, and another canvas."""
    mdm, ar = models["mdm"], models["ar"]
    masked = Query(torch.tensor([9, 21, mdm.cfg.blank, mdm.cfg.blank]), (1, 2), (2, 3), (11, 12))
    read = Query(torch.tensor([9, 21, 11]), (1, 2), (2, 3), (11, 12))
    for model, query, other, of_other in ((mdm, masked, ar, read), (ar, read, mdm, masked)):
        metric = answer_probability(other, of_other)
        with pytest.raises(ValueError, match=f"was not made for {model.cfg.model_name!r}, whose corrupted run"):
            patch_grid(model, query, query, metric, "resid_pre")
        runs = model.denoise(torch.tensor([[9, 21]]), length=4, **({"steps": 2} if model is mdm else {}))
        with pytest.raises(ValueError, match="was not made for"):
            patch_grid(model, runs, runs, metric, "resid_pre", steps=[0])


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_steps_count_from_the_end_and_are_those_of_both_runs(either):
    model, prompt = either.model, torch.tensor([[11, 33, 22]])
    clean, corrupted = (model.denoise(torch.tensor([[11, token, 22]]), length=6, steps=3) for token in (33, 44))
    last = patch_grid(model, clean, corrupted, metric, "resid_pre", steps=[-1])
    assert last.coordinates["step"] == [2]
    torch.testing.assert_close(last.scores, patch_grid(model, clean, corrupted, metric, "resid_pre", steps=[2]).scores)
    short = model.denoise(prompt, length=6, steps=2)
    with pytest.warns(UserWarning, match="one trajectory has 2 steps and the other 3"):
        patch_grid(model, short, corrupted, metric, "resid_pre", steps=[1])
    with (
        pytest.warns(UserWarning, match="is another time"),
        pytest.raises(ValueError, match="trajectories have 2 and 3 steps: count from the first step"),
    ):
        patch_grid(model, short, corrupted, metric, "resid_pre", steps=[-1])


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
@pytest.mark.parametrize(("name", "site"), [("mlp.hook_post", "post"), ("blocks.1.hook_resid_pre", "resid_pre")])
def test_the_name_of_a_hook_point_leads_to_its_site(either, runs, name, site):
    with pytest.raises(ValueError, match=f"is the name of a hook point: its site is '{site}'"):
        patch_grid(either.model, *runs, metric, name)


@with_noise
def test_hooks_around_the_sweep_act_once(every, pair):
    """Steering vectors, one a position, on the stream where cells begin: neither lost nor added twice."""
    model, (clean, corrupted) = every.model, pair
    vector = torch.linspace(-3, 3, clean.shape[1] * model.cfg.d_model).view(clean.shape[1], -1)
    steer = [(name, lambda resid, hook: resid + vector) for name in ("hook_embed", resid_pre(1), resid_post(1))]
    with model.hooks(fwd_hooks=steer):
        grids = patch_grid(model, clean, corrupted, metric, ["resid_pre", "resid_post"])
        _, cache = model.run_with_cache(clean)
        for layer in range(3):
            for name, grid in ((resid_pre(layer), grids["resid_pre"]), (resid_post(layer), grids["resid_post"])):
                close(grid.scores[layer, 2], metric(patched(model, corrupted, name, [2], cache[name][:, [2]])))


@pytest.mark.parametrize("either", ["ar"], indirect=True)
def test_save_load_and_plot(either, tmp_path):
    model = either.model
    clean, corrupted = (model.denoise(torch.tensor([[11, token, 22]]), max_new_tokens=2, steps=2) for token in (33, 44))
    grid = patch_grid(model, clean, corrupted, metric, "z", [0, 1])
    again = PatchGrid.load(grid.save(tmp_path / "grid.safetensors"))
    for name in ("scores", "clean", "corrupted"):
        torch.testing.assert_close(getattr(again, name), getattr(grid, name), rtol=0, atol=0, equal_nan=True)
    for name in ("axes", "site", "coordinates", "labels", "error", "record"):
        assert getattr(again, name) == getattr(grid, name)
    assert {"method", "metric", "model", "weights_sha256", "versions"} <= set(grid.record)
    assert grid.record["corrupted_tokens"][0][0][:3] == [11, 44, 22]
    ax = again.plot(step=1, head=2)
    drawn = torch.from_numpy(ax.get_images()[0].get_array().filled(float("nan")))
    torch.testing.assert_close(drawn, grid.effect[1, :, :, 2].T, equal_nan=True)
    assert [label.get_text() for label in ax.get_yticklabels()] == grid.labels[1]
    with pytest.raises(ValueError, match=r"head=None: say which head to draw, one of \[0, 1, 2, 3\]"):
        grid.plot(step=1)
    with pytest.raises(ValueError, match="step=5: say which step"):
        grid.plot(step=5, head=1)


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_plots_of_heads_and_of_layers(either, runs):
    whole = patch_grid(either.model, *runs, metric, ["z", "mlp_out"], positions="all")
    ax = whole["z"].plot(title="heads")
    assert ax.get_title() == "heads"
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"head {head}" for head in range(4)]
    torch.testing.assert_close(torch.from_numpy(ax.get_images()[0].get_array().data), whole["z"].effect.T)
    layers = whole["mlp_out"].plot().get_images()[0].get_array()
    torch.testing.assert_close(torch.from_numpy(layers.data), whole["mlp_out"].effect[None])
    with pytest.raises(ValueError, match="no head axis; its axes are layer"):
        whole["mlp_out"].plot(head=1)


BAD_SETTINGS = [
    (dict(sites="resid_prae"), "site='resid_prae' is unknown, nearest is resid_pre"),
    (dict(sites=[]), "no site was given; they are resid_pre"),
    (dict(method="gradient"), "method='gradient' is unknown; it must be one of exact, attribution"),
    (dict(positions="every"), "positions='every'; it must be None"),
    (dict(positions=[4]), r"positions in the clean run=\[4\]; give numbers from 0 to 2, or negative"),
    (dict(positions=[(0, -4)]), r"positions in the corrupted run=\[-4\]; give numbers from 0 to 2"),
    (dict(positions=[2, 0, -1]), "contains duplicates"),
    (dict(positions=[[(0, 1), (2, 2)], [(2, 2), (0, 1)]]), "contains duplicates"),
    (dict(positions=[[(0, 1), (2, 1)]]), "patches a position twice in one cell"),
    (dict(positions=[]), "has no entry"),
    (dict(positions=[0, []]), "or an empty one"),
    (dict(layers=[3]), r"layers=\[3\]; give numbers from 0 to 2, or negative"),
    (dict(layers=[]), r"layers=\[\]; give one index or more"),
    (dict(layers=[2, -1]), r"layers=\[2, -1\] contains duplicates"),
    (dict(heads=[4]), r"z heads=\[4\]; give numbers from 0 to 3, or negative"),
    (dict(heads=[0, 0]), r"heads=\[0, 0\] contains duplicates"),
    (dict(sites="k", heads=[2]), r"k heads=\[2\]; give numbers from 0 to 1, or negative"),
    (dict(sites="mlp_out", heads=[0]), "mlp_out has no heads"),
    (dict(steps=[0]), "steps= requires two trajectories"),
    (dict(max_bytes=1), "max_bytes=1 is too small"),
    (dict(check=-1), "check=-1"),
    (dict(logits_at=[]), "it must be a list of rows"),
    (dict(logits_at=torch.zeros(2, 3, dtype=torch.bool)), "it must be a list of rows"),
    (
        dict(metric=lambda logits: logits[:, -1, 3]),
        r"the metric returned a tensor \[2\]; it must return one number",
    ),
    (dict(metric=lambda logits: None), "the metric returned None"),
    (dict(clean=torch.tensor([[1, 2, 3]])), "the clean run has 1 rows and the corrupted run 2"),
    (
        dict(clean=torch.ones(2, 5, dtype=torch.long)),
        "the clean run has 5 positions and the corrupted run 3: pair them by hand",
    ),
    (
        dict(sites="pattern", clean=torch.ones(2, 5, dtype=torch.long), positions=[0]),
        r"hook_pattern is \[2, 4, 5, 5\] in the clean run and \[2, 4, 3, 3\] in the corrupted one",
    ),
]


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_bad_settings_are_refused(either, runs):
    def call(**options):
        patch_grid(either.model, **{"clean": runs[0], "corrupted": runs[1], "metric": metric, "sites": "z", **options})

    assert unrefused(call, BAD_SETTINGS) == []


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_models_that_do_not_fit(either, runs, models):
    with pytest.raises(ValueError, match=r"'tiny-mdm' has 4 layers and .* 3: select the layers to patch with layers="):
        patch_grid(either.model, *runs, metric, "z", source_model=models["mdm"])
    with pytest.raises(ValueError, match=r"blocks.0.hook_mlp_out is .* in the clean run and .* 64\] in the corrupted"):
        patch_grid(either.model, *runs, metric, "mlp_out", layers=[0], source_model=models["mdm"])


def test_bad_steps(either, runs):
    run = either.model.denoise(torch.tensor([[11, 22]]), max_new_tokens=2, steps=2)
    with pytest.raises(ValueError, match="a trajectory has one canvas per step: select steps"):
        patch_grid(either.model, run, run, metric, "z")
    with pytest.raises(ValueError, match="step 2 is not one of the steps 0 to 1"):
        patch_grid(either.model, run, run, metric, "z", [0, 2])
    with pytest.raises(ValueError, match="steps= requires two trajectories"):
        patch_grid(either.model, run, runs[1], metric, "z", [0])


@pytest.mark.parametrize("either", ["mdm"], indirect=True)
def test_progress_shows_a_bar_a_site(either, runs, capsys):
    patch_grid(either.model, *runs, metric, ["k", "mlp_out"], progress=True)
    shown = capsys.readouterr().err
    assert "patch k" in shown
    assert "patch mlp_out" in shown


def test_after_an_error_nothing_is_left(either, runs):
    def fails(logits):
        if len(calls) == 3:
            raise RuntimeError("the metric broke")
        calls.append(1)
        return metric(logits)

    calls = []
    with pytest.raises(RuntimeError, match="the metric broke"):
        patch_grid(either.model, *runs, fails, "z")
    assert len(calls) == 3


def test_a_callers_hook_may_carry_a_patch_to_the_row_that_is_read(either):
    """With a hook that mixes positions at the final norm every position's last stream matters, as patching it shows."""
    model = either.model
    clean, corrupted = either.tokens[:1, :5], either.tokens[1:2, :5]

    def mix(normalized, hook):
        return normalized + 0.3 * normalized.roll(1, dims=1)

    def score(logits):
        return logits[:, 0, 3].mean()

    last = model.cfg.n_layers - 1
    with model.hooks(fwd_hooks=[("ln_final.hook_normalized", mix)]):
        grid = patch_grid(model, clean, corrupted, score, "resid_post", layers=[last], logits_at=[3])
        _, cache = model.run_with_cache(clean, names_filter=resid_post(last))
        for position, patched_score in enumerate(grid.scores[0]):

            def put(stream, hook, position=position):
                stream = stream.clone()
                stream[:, position] = cache[resid_post(last)][:, position]
                return stream

            slow = model.run_with_hooks(corrupted, fwd_hooks=[(resid_post(last), put)])[:, 3:4]
            close(patched_score, score(slow).to(patched_score.dtype))
    assert len({round(value, 4) for value in grid.scores[0].tolist()}) == 3


def test_scores_of_a_float64_model_are_float64(specimen, configs):
    model = specimen(configs["llama"]).model.to("float64")
    clean, corrupted = torch.arange(5)[None] + 3, torch.arange(5)[None] + 40

    def large(logits):
        return 1e4 * logits[:, -1, 3].mean()

    grid = patch_grid(model, clean, corrupted, large, "resid_post", layers=[-1], positions="all")
    assert grid.scores.dtype == torch.float64
    torch.testing.assert_close(grid.scores[0], grid.clean, rtol=1e-12, atol=0)
