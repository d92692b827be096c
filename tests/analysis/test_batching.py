"""Cells are packed into batches in order, and a batch that does not fit is run in halves."""

import pytest
import torch
from small_networks import small_architecture

from diffusion_lens import DiffusionConfig, Query
from diffusion_lens.analysis import causal_trace
from diffusion_lens.analysis.engine.batching import RESERVE_ON_ACCELERATOR, in_batches, reserved, row_bytes

# What PyTorch's CPU allocator says when memory ends, on Linux and on Windows.
ON_LINUX = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to ..."
ON_WINDOWS = (
    "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried to allocate ..."
)
OUT_OF_MEMORY = [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(ON_LINUX), RuntimeError(ON_WINDOWS)]


class Machine:
    """Doubles numbers; more than `most` at once is too many. Remembers the size of every attempt."""

    def __init__(self, most, error=None):
        self.most, self.error = most, error
        self.attempts, self.done = [], []

    def __call__(self, batch):
        self.attempts.append(len(batch))
        if len(batch) > self.most:
            raise self.error
        self.done += batch
        return [2 * item for item in batch]


def doubled(machine, items, size):
    """The results in the order in which they came, after a check that each stands beside its own items."""
    results = []
    for batch, result in in_batches(machine, items, size):
        assert result == [2 * item for item in batch]
        results += result
    return results


@pytest.mark.parametrize(
    ("n_items", "size", "sizes"),
    [(7, 3, [3, 3, 1]), (6, 3, [3, 3]), (2, 5, [2]), (3, 1, [1, 1, 1]), (2, 0, [1, 1]), (0, 4, [])],
)
def test_all_in_order_and_no_more_than_the_size_at_once(n_items, size, sizes):
    items, machine = list(range(10, 10 + n_items)), Machine(most=size + 1)
    assert doubled(machine, items, size) == [2 * item for item in items]
    assert machine.attempts == sizes


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["accelerator", "linux", "windows"])
def test_what_does_not_fit_is_halved_until_it_does(error):
    machine = Machine(most=3, error=error)
    items = list(range(16))
    assert doubled(machine, items, 14) == [2 * item for item in items]
    assert machine.attempts == [14, 7, 3, 3, 3, 3, 3, 1]  # no larger one is tried again
    assert machine.done == items  # what is done is not done again


def test_a_short_last_batch_is_halved_by_its_own_length():
    machine = Machine(most=1, error=torch.OutOfMemoryError("full"))
    assert doubled(machine, [1, 2], 100) == [2, 4]
    assert machine.attempts == [2, 1, 1]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["accelerator", "linux", "windows"])
def test_one_that_does_not_fit_alone_is_the_error(error):
    machine = Machine(most=0, error=error)
    with pytest.raises(RuntimeError) as raised:
        doubled(machine, list(range(5)), 4)
    assert raised.value is error
    assert machine.attempts == [4, 2, 1]


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    machine = Machine(most=2, error=RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        doubled(machine, list(range(5)), 4)
    assert machine.attempts == [4]


def test_the_allocator_itself_is_understood():
    """A petabyte is more than any machine has; a byte is not."""
    tried = []

    def allocate(batch):
        tried.append(len(batch))
        return torch.empty(10**15 if len(batch) > 1 else 1, dtype=torch.uint8)

    assert [len(batch) for batch, _ in in_batches(allocate, [0, 1, 2], 3)] == [1, 1, 1]
    assert tried == [3, 1, 1, 1]


def a_query(model):
    tokens, mask = torch.arange(20, 29), model.cfg.mask_token_id
    if mask is None:
        return Query(tokens, (2, 4), (9,), (7,))
    tokens[8] = mask
    return Query(tokens, (2, 4), (8,), (7,))


@pytest.mark.parametrize(("either", "kind"), [("mdm", "resid"), ("ar", "mlp")], indirect=["either"])
def test_a_trace_that_runs_out_of_memory_gives_the_same_grid(either, kind, monkeypatch):
    model, query, samples = either.model, a_query(either.model), 3
    settings = dict(kind=kind, window=2, noise=0.5, samples=samples)
    whole = causal_trace(model, query, **settings)
    forward, ran, refused = model.forward, [], []

    def forward_of_one_cell(input, *args, **kwargs):
        if len(input) > samples:
            refused.append(len(input))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        ran.append(len(input))
        return forward(input, *args, **kwargs)

    monkeypatch.setattr(model, "forward", forward_of_one_cell)
    halved = causal_trace(model, query, **settings)
    assert refused
    assert max(ran) == samples
    torch.testing.assert_close(halved.scores, whole.scores, rtol=0, atol=1e-6)


def test_a_trace_gives_up_when_one_cell_does_not_fit(either, monkeypatch):
    model, forward, samples = either.model, either.model.forward, 3

    def forward_of_the_first_two_runs(input, *args, start_at_layer=None, **kwargs):
        if start_at_layer is not None:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(input, *args, **kwargs)

    monkeypatch.setattr(model, "forward", forward_of_the_first_two_runs)
    with pytest.raises(torch.OutOfMemoryError):
        causal_trace(model, a_query(model), noise=0.5, samples=samples)


def test_the_reserve_grows_with_the_positions_and_with_the_rows_read(either):
    cfg = either.model.cfg
    assert row_bytes(cfg, 40, 1) == 2 * row_bytes(cfg, 20, 1)
    assert row_bytes(cfg, 4, 400) == pytest.approx(2 * row_bytes(cfg, 4, 200), rel=0.02)


@pytest.mark.parametrize("of_graph", [False, True])
def test_an_allocator_takes_more_than_the_tensors(of_graph):
    cfg = DiffusionConfig.from_architecture(small_architecture(), device="cpu")
    assert reserved(cfg, 10**6, of_graph) > 10**6
    cfg.device = "cuda"  # A config alone needs no GPU.
    assert reserved(cfg, 10**6, of_graph) == RESERVE_ON_ACCELERATOR * 10**6 >= 1.5 * 10**6
