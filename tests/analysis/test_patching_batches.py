"""How many cells go through at once, and how much of each is run, changes no score."""

import re
from contextlib import contextmanager

import pytest
import torch

from diffusion_lens.analysis import patch_grid
from diffusion_lens.analysis.engine.kept_run import NetworkInput
from diffusion_lens.analysis.patching.runs import PATCH_SITES


def metric(logits):
    return (logits[:, -1, 3] - logits[:, -1, 5]).mean()


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


@pytest.fixture
def runs():
    """Two rows of three positions; the runs differ at each."""
    return torch.tensor([[111, 122, 133], [155, 166, 177]]), torch.tensor([[11, 99, 33], [55, 66, 111]])


def needed_bytes(model, *given, **options):
    """The two numbers of the error message: bytes kept, and bytes of one cell."""
    with pytest.raises(ValueError, match="max_bytes=1 is too small") as raised:
        patch_grid(model, *given, **options, max_bytes=1)
    kept, cell = re.search(
        r"keep ([\d,]+) bytes, and one cell of \d+ rows takes ([\d,]+) more", str(raised.value)
    ).groups()
    return int(kept.replace(",", "")), int(cell.replace(",", ""))


@contextmanager
def forward_passes(model):
    """The shape [batch, pos] of what each forward pass is given; without a hook, so that nothing changes."""
    shapes, forward = [], model.forward

    def counted(given, *args, **options):
        shapes.append(tuple(given.shape[:2]))
        return forward(given, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", counted)
        yield shapes


@pytest.mark.parametrize(
    ("either", "site", "logits_at", "n_cells"),
    [
        ("mdm", "z", None, 1),
        ("ar", "z", [2], 3),
        ("mdm", "pattern", None, 3),
        ("mdm", "pattern", [2], 1),
        ("mdm", "resid_post", None, 3),
        ("ar", "resid_post", [2], 1),
    ],
    indirect=["either"],
)
def test_no_more_cells_go_together_than_the_budget_holds(either, runs, site, n_cells, logits_at):
    given, more = (
        (*runs, metric, site),
        dict(logits_at=logits_at, layers=[0, 1, 2], positions=[0] if site == "z" else None),
    )
    kept, cell = needed_bytes(either.model, *given, **more)
    with forward_passes(either.model) as shapes:
        narrow = patch_grid(either.model, *given, **more, max_bytes=kept + n_cells * cell)
    assert max(n_rows for n_rows, _ in shapes) == 2 * n_cells
    wide = patch_grid(either.model, *given, **more)
    close(narrow.scores, wide.scores)
    with pytest.raises(ValueError, match="is too small"):
        patch_grid(either.model, *given, **more, max_bytes=kept + cell - 1)


def test_a_budget_too_small_is_refused_before_anything_is_run(either, runs, token_layers):
    with token_layers() as counted:
        needed_bytes(either.model, *runs, metric, ["z", "pattern"])
    assert counted == [0]


METHODS = [
    *[("lit_gpt-mdm", "exact"), ("lit_gpt-ar", "attribution"), ("bd3lm", "attribution"), ("udlm", "exact")],
    ("llada2", "attribution"),
]


@pytest.mark.parametrize(("every", "method"), METHODS, indirect=["every"])
def test_the_predicted_bytes_are_those_that_both_runs_keep(every, runs, method, monkeypatch):
    kept_runs, run = [], NetworkInput.run
    monkeypatch.setattr(NetworkInput, "run", lambda *given: kept_runs.append(run(*given)) or kept_runs[-1])
    offenders = []
    for site in PATCH_SITES:
        if site == "post" and every.model.cfg.experts is not None:  # its layer 2 has experts
            continue
        options = dict(layers=[0, 2], logits_at=[2], method=method)
        predicted, _ = needed_bytes(every.model, *runs, metric, site, **options)
        patch_grid(every.model, *runs, metric, site, **options)
        clean, corrupted = kept_runs[-2:]
        gradients = clean.activations if method == "attribution" else {}
        tensors = *clean.activations.values(), *corrupted.activations.values(), *gradients.values(), corrupted.logits
        moved = PATCH_SITES[site].moves_to_block_end * len(options["layers"]) * corrupted.input.stream_bytes
        if predicted != sum(tensor.nbytes for tensor in tensors) + moved:
            offenders.append(site)
    assert offenders == []


def test_out_of_memory_halves_the_batch(either, runs, monkeypatch):
    """Of the twelve cells of a layer none goes through before they go three by three."""
    model, n_rows = either.model, []
    expected = patch_grid(model, *runs, metric, "z", layers=[0], logits_at=[2])
    forward = model.forward

    def small(resid, *args, **options):
        n_rows.append(len(resid))
        if len(resid) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(resid, *args, **options)

    monkeypatch.setattr(model, "forward", small)
    halved = patch_grid(model, *runs, metric, "z", layers=[0], logits_at=[2])
    assert max(n_rows) > 6
    close(halved.scores, expected.scores)


def test_more_rows_to_read_and_patterns_written_out_take_more_memory(either, runs):
    all_rows, one_row = (needed_bytes(either.model, *runs, metric, "z", logits_at=rows)[1] for rows in (None, [2]))
    assert all_rows > one_row
    by_position = {"pattern": [], "z": []}
    for n_pos in (40, 60, 120):  # On shorter canvases, the MLP of this network is wider than its patterns.
        longer = [torch.arange(n_pos)[None] + start for start in (100, 200)]
        for site, so_far in by_position.items():
            so_far.append(needed_bytes(either.model, *longer, metric, site, logits_at=[2])[1] / n_pos)
    assert len(set(by_position["z"])) == 1
    short, middle, long = by_position["pattern"]
    # Each position meets all: scores and patterns grow with the square, everything else with the length.
    assert long - middle == 3 * (middle - short)
    assert middle - short >= 20 * 2 * either.model.cfg.n_heads * either.model.cfg.dtype.itemsize


@pytest.mark.parametrize(
    ("either", "site"),
    [*(("ar", site) for site in PATCH_SITES), ("mdm", "pattern")],
    indirect=["either"],
)
def test_a_causal_model_runs_only_positions_from_the_patched_one_on(either, runs, site):
    """A cell at a time, the runs differing at every position; and whatever rows are read, in whatever order."""
    clean, corrupted = runs
    heads = {"heads": [1]} if site in ("z", "q", "k", "v", "pattern") else {}
    some = dict(layers=[0, 2], **heads)
    kept, cell = needed_bytes(either.model, clean, corrupted, metric, site, **some)
    with forward_passes(either.model) as shapes:
        grid = patch_grid(either.model, clean, corrupted, metric, site, max_bytes=kept + cell, **some)
    n_positions = {n_pos for _, n_pos in shapes[2:]}
    # The first position of a causal model attends to itself in both runs: there is no pattern to patch.
    from_first = {1, 2} if site == "pattern" else {1, 2, 3}
    assert n_positions == ({3} if either.kind == "mdm" else from_first)
    with either.model.hooks(fwd_hooks=[("hook_embed", lambda embedding, hook: None)]):  # then every position runs
        whole = patch_grid(either.model, clean, corrupted, metric, site, **some)
    close(grid.scores, whole.scores)

    def two_rows(logits):
        return logits[0, 1, 3] - logits[1, 0, 3].square()

    rows = dict(logits_at=[-1, 0, 2], max_bytes=kept + cell)
    some = dict(layers=[1], **heads)
    grid = patch_grid(either.model, clean, corrupted, two_rows, site, **rows, **some)
    whole = patch_grid(either.model, clean, corrupted, lambda logits: two_rows(logits[:, [2, 0, 2]]), site, **some)
    close(grid.scores, whole.scores)


def test_what_no_row_read_can_see_is_not_run(either, runs):
    def score(logits):
        return logits[:, 0, 3].mean()

    with forward_passes(either.model) as shapes:
        grid = patch_grid(either.model, *runs, score, "mlp_out", positions=[1, 2], logits_at=[0])
    assert (len(shapes) == 2) == (either.kind == "ar")
    assert bool((grid.effect == 0).all()) == (either.kind == "ar")


@pytest.fixture
def by_blocks():
    """Two rows of seven positions, two blocks of four; the runs differ at each."""
    return torch.arange(14).view(2, 7) + 100, torch.arange(14).view(2, 7) + 11


BY_BLOCKS = [("bd3lm", site) for site in ("resid_pre", "k", "pattern")] + [
    ("llada2", site) for site in ("z", "mlp_out")
]


@pytest.mark.parametrize(("every", "site"), BY_BLOCKS, indirect=["every"])
def test_a_model_by_blocks_runs_only_positions_from_the_patched_block_on(every, by_blocks, site):
    """A cell at a time, whatever rows are read; with a hook at the embedding every position runs."""
    some = dict(layers=[0, 2], **({"heads": [1]} if site in ("z", "k", "pattern") else {}))
    for read in ({}, {"logits_at": [-1, 1]}):
        kept, cell = needed_bytes(every.model, *by_blocks, metric, site, **some, **read)
        with forward_passes(every.model) as shapes:
            grid = patch_grid(every.model, *by_blocks, metric, site, max_bytes=kept + cell, **some, **read)
        assert {n_pos for _, n_pos in shapes[2:]} == {7, 3}
        with every.model.hooks(fwd_hooks=[("hook_embed", lambda embedding, hook: None)]):
            whole = patch_grid(every.model, *by_blocks, metric, site, **some, **read)
        close(grid.scores, whole.scores)


@pytest.mark.parametrize("every", ["bd3lm", "llada2"], indirect=True)
def test_blocks_that_no_row_read_can_see_are_not_run(every, by_blocks):
    def score(logits):
        return logits[:, 0, 3].mean()

    for row, n_passes in ((2, 2), (5, 3)):
        with forward_passes(every.model) as shapes:
            grid = patch_grid(every.model, *by_blocks, score, "mlp_out", positions=[4, 6], layers=[0], logits_at=[row])
        assert min(len(shapes), 3) == n_passes
        assert bool((grid.effect == 0).all()) == (row == 2)
