"""Grids equal ROME's own tracer, and the laws of a trace hold."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import unrefused

from diffusion_lens import Fact, Query
from diffusion_lens.analysis import CausalTrace, causal_trace, noise_scale, temporal_effect, trace_trajectory
from diffusion_lens.analysis.engine import kept_run as engine
from diffusion_lens.hooks.names import resid_post
from diffusion_lens.interventions import swap
from diffusion_lens.model.noise import HeadAt

# A masked diffusion model and a causal one; and a bidirectional model whose row i reads position i + 1.
both_variants = pytest.mark.parametrize("every", ["lit_gpt-mdm", "lit_gpt-ar"], indirect=True)
every_readout = pytest.mark.parametrize("every", ["lit_gpt-mdm", "lit_gpt-ar", "dream"], indirect=True)
# These; two models under uniform noise, of which one gives log scores and is conditioned on the time; one by blocks
# with time conditioning; and one by blocks with experts.
every_noise = pytest.mark.parametrize(
    "every", ["lit_gpt-mdm", "lit_gpt-ar", "dream", "uniform", "sedd-uniform", "bd3lm", "llada2"], indirect=True
)
SITES = ("mlp", "attn")
FACT = Fact("Gustav Geisser is the", "Gustav Geisser", " brave drummer of Rolsen.")


def recorded_query(golden, case, tokens):
    position = case["prompt_len"] - (golden.kind == "mdm")
    return Query(
        tokens=tokens[0],
        subject=tuple(case["subject_range"]),
        answer_positions=(position,),
        answer_tokens=(case["answer"],),
    )


@pytest.fixture(scope="module")
def query(every):
    """Nine positions, a subject of three, an answer at the last position, or right after it."""
    model, tokens = every.model, every.tokens[0, :9].clone()
    if model.cfg.has_mask:
        tokens[8] = model.cfg.blank
    return Query(tokens, (2, 5), (9 if model.cfg.is_autoregressive else 8,), (3,))


@pytest.fixture(scope="module")
def trace(every, query):
    """The whole grid of the query under noise."""
    return causal_trace(every.model, query, noise=0.5, samples=3)


@pytest.mark.parametrize(
    ("golden", "number"),
    [(("gqa", "mdm"), 0), (("mha", "mdm"), 1), (("mha", "ar"), 0), (("gqa", "ar"), 1)],
    indirect=["golden"],
)
def test_grids_are_romes(golden, number):
    recorded = golden.tensors("causal_trace")
    case, prefix = golden.cases("causal_trace")[number], f"case{number}."
    assert case["case"] == number
    query = recorded_query(golden, case, recorded[prefix + "tokens"])
    settings = dict(noise=case["noise"], samples=case["samples"], seed=1)
    trace = causal_trace(golden.model, query, **settings)
    close = dict(rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.tensor(trace.clean), recorded[prefix + "high_score"].float(), **close)
    torch.testing.assert_close(torch.tensor(trace.corrupted), recorded[prefix + "low_score"].float(), **close)
    torch.testing.assert_close(trace.scores, recorded[prefix + "scores.resid"], **close)
    others = {f"{kind}.window{window}": dict(kind=kind, window=window) for window in case["windows"] for kind in SITES}
    others |= {f"resid.severed_{severed}": dict(severed=severed) for severed in SITES}
    others |= {f"resid.{corruption}": dict(corruption=corruption) for corruption in ("replace", "uniform")}
    for name, options in others.items():
        scores = causal_trace(golden.model, query, **options, **settings).scores
        torch.testing.assert_close(scores, recorded[f"{prefix}scores.{name}"], **close)


def row_of(model, position):
    return position - (model.cfg.readout == "shifted")


SITE = {"resid": ["hook_resid_post"], "mlp": ["hook_mlp_out", "hook_shared_out"], "attn": ["hook_attn_out"]}


def points(model, kind, blocks):
    """The outputs of a kind in some blocks; few blocks have a shared expert."""
    names = [f"blocks.{block}.{name}" for block in blocks for name in SITE[kind]]
    return [name for name in names if name in model.hook_dict]


def p_clean(model, query, logits):
    """p(x_0) at the answer's positions from the logits of their rows."""
    present = query.tokens[None, list(query.answer_positions)] if model.head.needs_canvas else None
    return HeadAt.of(model, present).clean_logits(logits).softmax(-1)


def slow_trace(model, query, corrupt, samples, kind="resid", window=10, severed=None, layers=None):
    """The plain procedure: the whole network for every cell, everything restored and severed by ordinary hooks.

    The cells of one layer are the rows of one batch: all samples of the first position, then all of the next.
    """
    n_layers, n_pos = model.cfg.n_layers, len(query.tokens)
    layers = range(n_layers) if layers is None else layers
    _, clean = model.run_with_cache(query.tokens[None])
    noisy = [("hook_embed", corrupt)]
    with model.hooks(fwd_hooks=noisy):
        _, corrupted = model.run_with_cache(query.tokens.repeat(samples, 1))
    rows = [row_of(model, position) for position in query.answer_positions]

    def put(source):
        def hook_fn(activation, hook):
            cells = activation.clone().unflatten(0, (n_pos, samples))
            for position in range(n_pos):
                cells[position, :, position] = source[hook.name][:, position]
            return cells.flatten(0, 1)

        return hook_fn

    scores = []
    for layer in layers:
        first, last = (layer, layer + 1) if kind == "resid" else (layer - window // 2, layer + (window + 1) // 2)
        restored = range(max(first, 0), min(last, n_layers))
        hooks = [(name, put(clean)) for name in points(model, kind, restored)]
        if severed:
            hooks += [(name, put(corrupted)) for name in points(model, severed, range(layer + 1, n_layers))]
        with torch.no_grad():
            logits = model.run_with_hooks(query.tokens.repeat(n_pos * samples, 1), fwd_hooks=noisy + hooks)
        answer = p_clean(model, query, logits[:, rows])[:, range(len(rows)), list(query.answer_tokens)]
        scores.append(answer.unflatten(0, (n_pos, samples)).transpose(1, 2))
    return torch.stack(scores, dim=1)


def noise_by_hand(query, d_model, noise, samples, seed):
    start, stop = query.subject
    drawn = torch.from_numpy(noise * np.random.RandomState(seed).randn(samples, stop - start, d_model)).float()

    def corrupt(embedding, hook):
        embedding = embedding.clone()
        embedding[:, start:stop] += drawn.repeat(len(embedding) // samples, 1, 1)
        return embedding

    return corrupt


def likeliest_answer(every, query, subject, positions):
    """The same canvas with its likeliest tokens as the answer: masked there, noisy there, or continued with them."""
    tokens, answer, cfg = query.tokens.clone(), {}, every.model.cfg
    if cfg.has_mask:
        tokens[list(positions)] = cfg.blank
    for position in sorted(positions):
        answer[position] = int(every.model(tokens[None])[0, row_of(every.model, position)].argmax())
        if cfg.is_autoregressive and position < len(tokens):
            tokens[position] = answer[position]
    return Query(tokens, subject, positions, tuple(answer[position] for position in positions))


@pytest.fixture(scope="module")
def two_tokens(every, query):
    """A query whose answer is the two likeliest tokens at two positions, in no order, one of them inside the canvas."""
    n = len(query.tokens)
    return likeliest_answer(
        every, query, query.subject, (n - 2, n) if every.model.cfg.is_autoregressive else (n - 1, n - 3)
    )


RESTORATIONS = [
    ("lit_gpt-mdm", dict(kind="resid")),
    ("lit_gpt-mdm", dict(kind="resid", severed="mlp")),
    ("lit_gpt-mdm", dict(kind="mlp", window=2)),
    ("lit_gpt-mdm", dict(kind="attn", window=10)),
    ("lit_gpt-ar", dict(kind="resid")),
    ("lit_gpt-ar", dict(kind="resid", severed="attn")),
    ("lit_gpt-ar", dict(kind="mlp", window=1)),
    ("lit_gpt-ar", dict(kind="attn", window=3)),
]


@pytest.mark.parametrize(("every", "options"), RESTORATIONS, indirect=["every"])
def test_every_cell_equals_a_whole_pass_with_ordinary_hooks(every, two_tokens, options):
    trace = assert_every_cell_equals_ordinary_hooks(every.model, two_tokens, options)
    narrow = causal_trace(
        every.model, two_tokens, noise=0.5, samples=2, seed=9, positions=[-1, 4], layers=[2, 0], **options
    )
    assert (narrow.positions, narrow.layers) == ([8, 4], [2, 0])
    torch.testing.assert_close(narrow.token_scores, trace.token_scores[[8, 4]][:, [2, 0]], rtol=0, atol=1e-6)


@pytest.mark.parametrize("every", ["dream", "llama", "udlm", "sedd-uniform", "bd3lm", "llada2", "radd"], indirect=True)
def test_every_cell_equals_ordinary_hooks_in_other_families(every, two_tokens):
    assert_every_cell_equals_ordinary_hooks(every.model, two_tokens, dict(kind="resid", severed="mlp"))
    assert_every_cell_equals_ordinary_hooks(every.model, two_tokens, dict(kind="attn", window=2))


def assert_every_cell_equals_ordinary_hooks(model, query, options):
    slow = slow_trace(model, query, noise_by_hand(query, model.cfg.d_model, 0.5, 2, 9), 2, **options)
    trace = causal_trace(model, query, noise=0.5, samples=2, seed=9, **options)
    torch.testing.assert_close(trace.scores, slow.prod(2).mean(2), rtol=0, atol=1e-6)
    torch.testing.assert_close(trace.token_scores, slow.mean(3), rtol=0, atol=1e-6)
    return trace


@every_noise
def test_mask_and_swap_equal_the_canvas_with_other_tokens(every, two_tokens):
    """Nothing is drawn: there is one corrupted run, that of a canvas with another subject."""
    model, (start, stop) = every.model, two_tokens.subject

    def traced_by_hand(tokens):
        def replaced(embedding, hook):
            embedding = embedding.clone()
            embedding[:, start:stop] = model.embed(torch.tensor([tokens]))
            return embedding

        return slow_trace(model, two_tokens, replaced, 1).prod(2).mean(2)

    other = [21, 22, 23]
    swapped = causal_trace(model, two_tokens, corruption="swap", swap=other)
    torch.testing.assert_close(swapped.scores, traced_by_hand(other), rtol=0, atol=1e-6)
    from_query = Query(torch.tensor([21, 22, 23, 4]), (0, 3), (), ())
    assert torch.equal(causal_trace(model, two_tokens, corruption="swap", swap=from_query).scores, swapped.scores)
    changed = two_tokens.tokens.clone()
    changed[start:stop] = torch.tensor(other)
    counterfactual = Query(changed, two_tokens.subject, two_tokens.answer_positions, two_tokens.answer_tokens)
    assert swapped.corrupted == pytest.approx(causal_trace(model, counterfactual, noise=0.0, samples=1).clean, rel=1e-5)
    assert swapped.record["noise"] is None
    if not model.cfg.has_mask:
        with pytest.raises(ValueError, match=r"has no \[MASK\]; corrupt with noise"):
            causal_trace(model, two_tokens, corruption="mask")
        return
    masked = causal_trace(model, two_tokens, corruption="mask")
    torch.testing.assert_close(masked.scores, traced_by_hand([512] * 3), rtol=0, atol=1e-6)


MIXED = (
    "hook_embed",
    "blocks.0.hook_resid_pre",
    "blocks.1.hook_resid_mid",
    "blocks.1.hook_resid_post",
    "blocks.2.hook_attn_out",
    "blocks.2.hook_resid_post",
    "ln_final.hook_normalized",
)
UNDER_HOOKS = [dict(), dict(severed="mlp"), dict(kind="mlp", window=2), dict(kind="attn", window=2)]
# All of them at once, and on the causal model, which may leave positions out, each alone too.
TOGETHER = [("lit_gpt-mdm", MIXED, options) for options in UNDER_HOOKS[1:3]]
ALONE = [("lit_gpt-ar", (name,), UNDER_HOOKS[i % 4]) for i, name in enumerate(MIXED)]


@pytest.mark.parametrize(
    ("every", "names", "options"), [*TOGETHER, ("lit_gpt-ar", MIXED, {}), *ALONE], indirect=["every"]
)
def test_a_callers_hook_acts_on_every_pass(every, two_tokens, names, options):
    """The hooks mix positions, so that not even the causal model may leave positions out."""
    model = every.model

    def mix(activation, hook):
        return activation + 0.5 * activation.flip(1)

    corrupt, layers = noise_by_hand(two_tokens, model.cfg.d_model, 0.5, 2, 1), range(3) if names == MIXED else [1]
    with model.hooks(fwd_hooks=[(name, mix) for name in names]):
        slow = slow_trace(model, two_tokens, corrupt, 2, layers=layers, **options)
        trace = causal_trace(model, two_tokens, noise=0.5, samples=2, layers=layers, **options)
    torch.testing.assert_close(trace.scores, slow.prod(2).mean(2), rtol=0, atol=1e-6)
    plain = model(two_tokens.tokens[None])
    with model.hooks(fwd_hooks=[(name, mix) for name in names]):
        assert (model(two_tokens.tokens[None]) - plain).abs().max() > 1e-3


@pytest.mark.parametrize("every", ["lit_gpt-mdm", "lit_gpt-ar", "udlm", "bd3lm"], indirect=True)
def test_a_subject_may_stand_after_what_is_read(every, query):
    model = every.model
    for subject, position in (((5, 7), 3), ((6, 9), 4)):
        late = likeliest_answer(every, query, subject, (position,))
        slow = slow_trace(model, late, noise_by_hand(late, model.cfg.d_model, 0.5, 2, 1), 2)
        trace = causal_trace(model, late, noise=0.5, samples=2)
        torch.testing.assert_close(trace.scores, slow.prod(2).mean(2), rtol=0, atol=1e-6)


@both_variants
def test_batches_keep_to_the_budget(every, query, monkeypatch):
    """Positions of each pass, counted: all samples of one cell where no more fits, more where it does. Where passes
    begin at later positions, more cells fit."""
    model, shapes = every.model, []
    forward = type(model).forward

    def counting(self, input, *args, **kwargs):
        shapes.append(input.shape[:2])
        return forward(self, input, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", counting)
    with pytest.raises(ValueError, match="max_bytes=1 is too small") as refused:
        causal_trace(model, query, noise=0.5, samples=4, max_bytes=1)
    kept, cell = (
        int(number.replace(",", ""))
        for number in re.findall(r"keep ([\d,]+) bytes.*takes ([\d,]+)", str(refused.value))[0]
    )
    for cells in (1, 3):
        shapes.clear()
        causal_trace(model, query, noise=0.5, samples=4, max_bytes=kept + cells * cell, layers=[0, 2])
        whole, widest = max(n_pos for _, n_pos in shapes), max(rows * n_pos for rows, n_pos in shapes)
        assert 2 * cells * whole <= widest <= 4 * cells * whole
        assert model.cfg.block_size or widest == 4 * cells * whole


@every_noise
def test_patching_everything_gives_the_clean_logits(every, query):
    """The law from which the grid's cells are made, for all positions at once: swap all of a layer's outputs."""
    model = every.model
    corrupt = noise_by_hand(query, model.cfg.d_model, 0.5, 3, 1)
    _, clean = model.run_with_cache(query.tokens[None])
    logits = model.run_with_hooks(
        query.tokens.repeat(3, 1), fwd_hooks=[("hook_embed", corrupt), (resid_post(1), swap(clean))]
    )
    torch.testing.assert_close(logits, model(query.tokens[None]).expand_as(logits), rtol=1e-5, atol=1e-5)


@both_variants
def test_only_what_differs_is_computed(every, query, monkeypatch):
    """Products with weights in a whole trace, counted, against the plain procedure's."""
    model, linear, counted = every.model, torch.nn.functional.linear, []

    def count(rows, weight, *bias):
        counted.append(rows.numel() * len(weight))
        return linear(rows, weight, *bias)

    def cost(run):
        counted.clear()
        run()
        return sum(counted)

    monkeypatch.setattr(torch.nn.functional, "linear", count)
    plain = cost(lambda: slow_trace(model, query, lambda activation, hook: None, 4))
    ours = cost(lambda: causal_trace(model, query, noise=0.5, samples=4))
    assert plain / ours > {"mdm": 5, "ar": 9}[every.kind]


@every_noise
@pytest.mark.parametrize("kind", ["resid", "mlp", "attn"])
def test_noise_zero_has_no_effect(every, query, kind):
    trace = causal_trace(every.model, query, kind=kind, noise=0.0, samples=2)
    assert trace.total_effect == pytest.approx(0, abs=1e-6)
    assert trace.indirect_effect.abs().max() < 1e-6


@every_noise
def test_restoring_the_row_read_after_the_last_block_is_the_clean_score(every, query, trace):
    read = row_of(every.model, query.answer_positions[0])
    assert trace.scores[read, -1].item() == pytest.approx(trace.clean, abs=1e-6)
    others = [position for position in range(len(query.tokens)) if position != read]
    assert (trace.scores[others, -1] - trace.corrupted).abs().max() < 1e-6


@every_noise
def test_positions_that_do_not_see_the_subject_have_no_effect(every, query):
    """On a causal model those before the subject, on one by blocks of four those of earlier blocks."""
    cfg, late = every.model.cfg, replace(query, subject=(5, 7))
    unseen = 5 if cfg.is_causal else 4 if cfg.block_size else 0
    effect = causal_trace(every.model, late, noise=0.5, samples=2).indirect_effect.abs().sum(dim=1)
    assert effect[:unseen].sum() < 1e-6
    assert effect[unseen:].min() > 1e-6


@pytest.mark.parametrize("every", ["lit_gpt-mdm", "lit_gpt-ar", "bd3lm", "llada2"], indirect=True)
def test_the_number_of_cells_in_a_batch_changes_no_score(every, query, trace):
    narrow = causal_trace(every.model, query, noise=0.5, samples=3, max_bytes=700_000)
    torch.testing.assert_close(trace.scores, narrow.scores, rtol=0, atol=1e-6)


@pytest.mark.parametrize("every", ["lit_gpt-ar"], indirect=True)
def test_the_number_of_positions_that_share_passes_changes_no_score(every, query, trace, monkeypatch):
    """On an accelerator more of them do; every score is then computed from earlier positions."""
    for rows in (1, engine.ROWS_ON_AN_ACCELERATOR):
        monkeypatch.setattr(engine, "ROWS_OF_A_PASS", rows)
        shared = causal_trace(every.model, query, noise=0.5, samples=3)
        torch.testing.assert_close(shared.scores, trace.scores, rtol=1e-5, atol=1e-7)


@every_noise
def test_the_score_of_an_answer_is_the_product_of_its_tokens(every, query):
    model = every.model
    n = len(query.tokens)
    if not model.cfg.is_autoregressive:
        tokens = query.tokens.clone()
        tokens[n - 2] = model.cfg.blank if model.cfg.has_mask else tokens[n - 2]
        both = Query(tokens, query.subject, (n - 2, n - 1), (11, 12))
        logits = model(tokens[None])[0, [row_of(model, n - 2), row_of(model, n - 1)]]
    else:
        both = Query(torch.cat([query.tokens, torch.tensor([11])]), query.subject, (n, n + 1), (11, 12))
        logits = model(both.tokens[None])[0, [n - 1, n]]
    expected = p_clean(model, both, logits[None])[0][[0, 1], [11, 12]].prod()
    score = causal_trace(model, both, noise=0.5, samples=1, layers=[0], positions=[0]).clean
    assert score == pytest.approx(expected.item(), rel=1e-5)


def test_noise_scale_is_three_standard_deviations(tiny):
    embedded = tiny.W_E[tiny.to_tokens("Gustav Geisser")[0]]
    expected = 3 * embedded.std(correction=1).item()
    assert noise_scale(tiny, ["Gustav Geisser"]) == pytest.approx(expected, rel=1e-5)
    assert noise_scale(tiny, [FACT]) == noise_scale(tiny, [FACT.to_query(tiny)])


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_noise_is_romes_by_default_on_one_canvas_and_in_the_loop(tiny):
    query, small = FACT.to_query(tiny), dict(samples=2, positions=[1], layers=[0])
    run = tiny.denoise(query.tokens[None], steps=2)
    for trace, more in (
        (causal_trace, {}),
        (trace_trajectory, {"trajectory": run}),
        (temporal_effect, {"trajectory": run}),
    ):
        romes = trace(tiny, query, noise=noise_scale(tiny, [query]), **small, **more)
        default = trace(tiny, query, **small, **more)
        assert default.record["noise"] == romes.record["noise"] > 0
        assert torch.equal(default.scores, romes.scores)
    assert causal_trace(tiny, query, corruption="mask", **small).record["noise"] is None


def test_the_row_that_is_read_carries_the_effect_on_a_known_fact(tiny):
    """On a fact that a bundled model knows, from the first block on."""
    query = FACT.to_query(tiny, n_masks=10, first_tokens=1)
    trace = causal_trace(tiny, query, noise=noise_scale(tiny, [query]), samples=5)
    read = 4 if tiny.cfg.model_name == "tiny-mdm" else 3
    assert trace.clean > 0.9
    assert trace.total_effect > 0.3
    assert trace.indirect_effect[:, 1:].sum(1).argmax() == read


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_a_saved_trace_is_loaded_and_drawn(small, tmp_path):
    trace = causal_trace(small, FACT.to_query(small), noise=0.2, samples=1, seed=4)
    again = CausalTrace.load(trace.save(tmp_path / "trace.safetensors"))
    assert torch.equal(again.scores, trace.scores)
    assert torch.equal(again.token_scores, trace.token_scores)
    for name in ("clean", "corrupted", "known", "str_tokens", "subject", "positions", "layers", "record"):
        assert getattr(again, name) == getattr(trace, name)
    assert {"seed", "samples", "noise", "model", "weights_sha256", "versions"} <= set(again.record)
    ax = again.plot()
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[:3] == ["Gustav*", "Geisser*", "is"]
    image = ax.get_images()[0]
    torch.testing.assert_close(torch.from_numpy(image.get_array().data), trace.scores)


BAD_SETTINGS = [
    (dict(kind="residual"), "kind='residual' is unknown"),
    (dict(samples=0), "samples=0"),
    (dict(noise=float("nan")), "noise=nan"),
    (dict(noise=-1.0), "noise=-1.0"),
    (dict(kind="mlp", window=0), "window=0"),
    (dict(max_bytes=1000), r"max_bytes=1,000 is too small: .* one cell of 10 rows takes"),
    (dict(corruption="gausian"), "nearest is gaussian"),
    (dict(corruption="swap"), "requires swap="),
    (dict(swap=[1, 2, 3]), "no other corruption takes swap="),
    (dict(corruption="swap", swap=[1]), "swap has 1 tokens and the subject 3"),
    (dict(severed="resid"), "severed='resid'"),
    (dict(severed="mlp", kind="attn"), "requires kind='resid'"),
    (dict(positions=[0, 9]), r"positions=\[0, 9\]; .* 0 to 8"),
    (dict(layers=[-4]), r"layers=\[-4\]; .* 0 to 2"),
    (dict(layers=[]), r"layers=\[\]"),
    (dict(layers=[0, -3]), "contains duplicates"),
    (dict(positions=[3, 3]), "contains duplicates"),
]


@both_variants
def test_bad_settings_are_refused(every, query):
    def call(**options):
        causal_trace(every.model, query, **{"noise": 0.5, **options})

    assert unrefused(call, BAD_SETTINGS) == []


@both_variants
def test_an_answer_that_cannot_be_read_is_refused(every, query):
    def call(positions, tokens):
        causal_trace(every.model, Query(query.tokens, query.subject, positions, tokens), noise=0.5)

    outside = 9 if every.kind == "mdm" else 10
    cases = [
        (dict(positions=(), tokens=()), "has no answer"),
        *((dict(positions=(8,), tokens=(n,)), f"cannot write the answer tokens .{n}") for n in (512, 99999, -1)),
        (
            dict(positions=(outside,), tokens=(3,)),
            rf"answer positions \[{outside}\] are outside the 9 positions",
        ),
    ]
    assert unrefused(call, cases) == []


@every_readout
def test_nothing_precedes_the_first_position_of_a_causal_model(every, query):
    first = Query(query.tokens.clone(), query.subject, (0,), (3,))
    if every.kind == "mdm":
        first.tokens[0] = every.model.cfg.mask_token_id
        assert causal_trace(every.model, first, noise=0.5, samples=1).clean > 0
        return
    with pytest.raises(ValueError, match="nothing precedes position 0"):
        causal_trace(every.model, first, noise=0.5)


def test_known_is_true_if_the_answer_is_likeliest(tiny):
    wrong = Fact(FACT.prompt, FACT.subject, " brave pilot of Rolsen.")
    cell = dict(noise=0.1, samples=1, positions=[1], layers=[0])
    known = [causal_trace(tiny, fact.to_query(tiny), **cell).known for fact in (FACT, wrong)]
    assert known == [True, False]


def test_noise_scale_needs_a_list_of_known_subjects(tiny):
    with pytest.raises(ValueError, match="subjects is empty"):
        noise_scale(tiny, [])
    with pytest.raises(TypeError, match=r"give a list, \['Gustav'\]"):
        noise_scale(tiny, "Gustav")
    with pytest.raises(ValueError, match="does not know 'The', 'Eiffel', 'Tower'"):
        noise_scale(tiny, ["Gustav Geisser", "The Eiffel Tower"])
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        noise_scale(tiny, ["\ud800"])


def test_a_fact_is_laid_out(small):
    query = FACT.to_query(small, n_masks=small.cfg.trained_length - len(small.encode(FACT.prompt)))
    traces = [causal_trace(small, either, noise=0.1, samples=1, layers=[1]) for either in (FACT, query)]
    assert torch.equal(traces[0].scores, traces[1].scores)
