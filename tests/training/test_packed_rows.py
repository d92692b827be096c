"""Rows of fresh documents: packed one after the other, drawn from the training's generator, resumable."""

import random

import pytest
import torch

from bundled_models.rows_and_blocks import PackedRows
from diffusion_lens.training import TrainingConfig, train
from diffusion_lens.training.trainer import RowOrder

END = 0


def count_up(rng):
    """A document 1, 2, ..., n with its end token."""
    return [*range(1, rng.randint(1, 6) + 1), END]


def batch(rows, seed=0, batch_size=8):
    return rows.next_batch(RowOrder(None, torch.Generator().manual_seed(seed)), batch_size, "cpu").tokens


def test_a_row_is_documents_one_after_the_other_cut_at_its_length():
    tokens = batch(PackedRows(count_up, (20,)), batch_size=50)
    assert tokens.shape == (50, 20)
    for row in tokens.tolist():
        expected = 1
        for token in row:
            assert token in (END, expected)
            assert (token, expected) != (END, 1)  # no document is empty
            expected = 1 if token == END else token + 1
    assert len({tuple(row) for row in tokens.tolist()}) == 50


def test_rows_are_those_of_the_slow_loop():
    generator = torch.Generator().manual_seed(3)
    rng = random.Random(int(torch.randint(2**62, (), generator=generator)))
    length = rng.choice((6, 12))
    expected = []
    for _ in range(8 * 12 // length):
        row = []
        while len(row) < length:
            row += count_up(rng)
        expected.append(row[:length])
    assert batch(PackedRows(count_up, (6, 12)), seed=3).tolist() == expected


def test_every_length_occurs_with_as_many_tokens():
    rows, order = PackedRows(count_up, (5, 10, 20)), RowOrder(None, torch.Generator().manual_seed(0))
    shapes = {tuple(rows.next_batch(order, 4, "cpu").tokens.shape) for _ in range(40)}
    assert shapes == {(16, 5), (8, 10), (4, 20)}


def test_batches_follow_the_generator_alone():
    rows = PackedRows(count_up, (9,))
    random.seed(1)
    torch.manual_seed(1)
    first = batch(rows)
    random.seed(2)
    torch.manual_seed(2)
    assert torch.equal(batch(rows), first)
    assert not torch.equal(batch(rows, seed=1), first)


def test_the_data_are_identified_by_lengths_and_documents():
    digests = {
        PackedRows(count_up, (9,)).sha256(),
        PackedRows(count_up, (8, 9)).sha256(),
        PackedRows(lambda rng: [*count_up(rng), END], (9,)).sha256(),
    }
    assert len(digests) == 3
    assert PackedRows(count_up, (9,)).sha256() in digests


class Stop(Exception):
    pass


@pytest.mark.parametrize("kind", ["mdm", "ar"])
def test_an_interrupted_training_sees_the_same_documents(kind, new_model, tmp_path):
    rows = PackedRows(count_up, (6, 12))
    config = TrainingConfig(steps=6, batch_size=4, warmup=1)
    whole, resumed = new_model(kind), new_model(kind)
    record = train(whole, rows, config, progress=False)
    assert record.record["rows"] is None

    def stop(model):
        raise Stop

    with pytest.raises(Stop):
        train(
            new_model(kind),
            rows,
            config,
            folder=tmp_path,
            checkpoint_every=2,
            evaluate=stop,
            evaluate_every=5,
            progress=False,
        )
    again = train(resumed, rows, config, folder=tmp_path, progress=False)
    assert again.record["starts"][-1]["step"] == 4
    assert torch.equal(again.losses, record.losses)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name])
    with pytest.raises(ValueError, match="data_sha256"):
        train(new_model(kind), PackedRows(count_up, (12,)), config, folder=tmp_path, progress=False)


def test_bad_sources_are_refused():
    with pytest.raises(ValueError, match="lengths is empty"):
        PackedRows(count_up, ())
    with pytest.raises(ValueError, match="a length of rows=0; it must be at least 1"):
        PackedRows(count_up, (4, 0))
    with pytest.raises(ValueError, match=r"document\(\) returned no tokens"):
        batch(PackedRows(lambda rng: [], (4,)))
