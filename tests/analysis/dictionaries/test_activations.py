"""Stored activations equal those of a cache row by row, and an interrupted call continues to the same files."""

import copy
import hashlib
from itertools import islice

import numpy as np
import pytest
import torch

from diffusion_lens.analysis import ActivationStore, NoiseRange, activations
from diffusion_lens.analysis.dictionaries import store as shard_task
from diffusion_lens.data import toy_facts
from diffusion_lens.interventions import named, zero_ablate
from diffusion_lens.settings import own_seed

RESID, Z = "blocks.1.hook_resid_post", "blocks.0.attn.hook_z"
COLUMNS = ("t", "masked", "position", "text", "token")
SENTENCES = toy_facts.load().sentences()[::61][:9]


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_rows_are_those_of_a_cache_of_each_text_alone(small, tmp_path):
    """Each text is masked again here, from its seed, and run by itself."""
    has_mask = small.cfg.has_mask
    levels = [0.3, 0.8] if has_mask else None
    store = activations(small, SENTENCES, [RESID, Z], out=tmp_path / "a", t=levels, batch_size=4)
    row = 0
    for text, sentence in enumerate(SENTENCES):
        tokens = small.to_tokens(sentence)
        for level, t in enumerate(levels or [0.0]):
            uniform = torch.rand(
                1 + tokens.shape[1], generator=torch.Generator().manual_seed(own_seed(0, f"{text}/{level}"))
            )
            masked = uniform[1:] < torch.tensor(t)
            noisy = tokens.masked_fill(masked, small.cfg.mask_token_id) if has_mask else tokens
            _, cache = small.run_with_cache(noisy, names_filter=[RESID, Z])
            rows = torch.arange(row, row + tokens.shape[1])
            torch.testing.assert_close(store.rows(RESID, rows), cache[RESID][0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(store.rows(Z, rows), cache[Z][0].flatten(1), rtol=1e-4, atol=1e-5)
            assert torch.equal(store.masked[rows], masked)
            assert store.t[rows].tolist() == pytest.approx([t] * len(rows))
            assert store.token[rows].tolist() == tokens[0].tolist()
            assert store.position[rows].tolist() == list(range(len(rows)))
            assert set(store.text[rows].tolist()) == {text}
            row += tokens.shape[1]
    assert len(store) == row
    assert store.is_complete
    assert repr(store).startswith(f"ActivationStore({row} rows of blocks.0.attn.hook_z, {RESID}, ")
    assert store.record["weights_sha256"]


@pytest.mark.parametrize("small", ["mdm", "uniform"], indirect=True)
def test_masked_and_unmasked_rows_are_the_parts_of_all(small, tmp_path):
    stores = {
        mask: activations(small, SENTENCES, RESID, out=tmp_path / mask, mask=mask, seed=3)
        for mask in ("masked", "unmasked", "all")
    }
    whole = stores["all"]
    for mask in ("masked", "unmasked"):
        part, rows = stores[mask], whole.select(masked=mask == "masked")
        assert 0 < len(part) == len(rows) < len(whole)
        assert torch.equal(part.rows(RESID, torch.arange(len(part))), whole.rows(RESID, rows))
        assert all(torch.equal(getattr(part, column), getattr(whole, column)[rows]) for column in COLUMNS)


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_the_share_of_masked_positions_is_the_noise_level(small, tmp_path):
    sentences = toy_facts.load().sentences()[:120]
    store = activations(
        small, sentences, "hook_embed", out=tmp_path / "a", t=NoiseRange(0.2, 0.8, samples=3), batch_size=64
    )
    share = torch.zeros(3)
    for part, (low, high) in enumerate(NoiseRange(0.2, 0.8, samples=3).spans):
        rows = store.select(t=NoiseRange(low, high))
        assert 0.9 * len(rows) < len(store) / 3 < 1.1 * len(rows)
        share[part] = store.masked[rows].float().mean() - store.t[rows].mean()
    assert share.abs().max() < 0.05
    embedded = store.rows("hook_embed", torch.arange(len(store)))
    is_mask = (embedded == small.W_E[small.cfg.mask_token_id]).all(dim=1)
    assert torch.equal(is_mask, store.masked)
    canvases = torch.stack([store.text.float(), store.t]).T.unique(dim=0)
    assert len(canvases) == 3 * len(sentences)
    assert abs(canvases[:, 1].mean() - 0.5) < 0.02


def test_a_noise_level_does_not_depend_on_the_batches(small, tmp_path):
    stores = [activations(small, SENTENCES, RESID, out=tmp_path / str(size), batch_size=size) for size in (2, 9)]
    for column in COLUMNS:
        assert torch.equal(*(getattr(store, column) for store in stores))
    vectors = [store.rows(RESID, torch.arange(len(store))) for store in stores]
    torch.testing.assert_close(*vectors, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stops_after", [0, 3])
def test_an_interrupted_call_continues_to_the_same_files(small, tmp_path, monkeypatch, stops_after):
    settings = dict(names=[RESID, Z], batch_size=2, shard_bytes=2500, dtype="bfloat16")
    whole = activations(small, SENTENCES, out=tmp_path / "whole", **settings)
    assert len(whole.shards) > 2
    real, calls = shard_task.run_to, []

    def broken(*args):
        if len(calls) == stops_after:
            raise KeyboardInterrupt
        calls.append(1)
        return real(*args)

    monkeypatch.setattr(shard_task, "run_to", broken)
    with pytest.raises(KeyboardInterrupt):
        activations(small, SENTENCES, out=tmp_path / "parts", **settings)
    monkeypatch.setattr(shard_task, "run_to", real)
    (tmp_path / "parts" / ".000007.safetensors.abc.part").write_text("half of a file")
    so_far = ActivationStore.load(tmp_path / "parts")
    assert not so_far.is_complete
    assert repr(so_far).endswith("incomplete)")
    resumed = activations(small, SENTENCES, out=tmp_path / "parts", **settings)
    assert digests(tmp_path / "parts") == digests(tmp_path / "whole")
    assert resumed.is_complete
    assert resumed.rows(RESID, torch.arange(3)).dtype == torch.bfloat16
    monkeypatch.setattr(shard_task, "run_to", lambda *args: pytest.fail("everything is stored"))
    assert len(activations(small, SENTENCES, out=tmp_path / "parts", **settings)) == len(whole)


def test_facts_store_their_answers_only(small, tmp_path):
    facts = toy_facts.load().facts()[:5]
    unusable = copy.copy(facts[2])
    object.__setattr__(unusable, "answer", " " + "Zweig" * 3)
    facts[2] = unusable
    store = activations(small, facts, RESID, out=tmp_path / "a")
    assert set(store.text.tolist()) == {0, 1, 3, 4}
    assert list(store.record["texts"]["set_aside"]) == [unusable.id]
    for index in (0, 4):
        prompt, answer = facts[index].tokenize(small)
        rows = (store.text == index).nonzero()[:, 0]
        assert store.token[rows].tolist() == answer
        assert store.position[rows].tolist() == list(range(len(prompt), len(prompt + answer)))


@pytest.mark.filterwarnings("ignore:no position of these tokens is")
def test_rows_of_tokens_without_their_padding(own_pad, tmp_path):
    tokens = torch.tensor([[5, 6, 7, 8, 9], [2, 2, 10, 11, 12]])
    given = tokens.clone()
    store = activations(own_pad, tokens, RESID, out=tmp_path / "a", t=None if own_pad.cfg.is_autoregressive else 0)
    assert store.token.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert store.position.tolist() == [*range(5), *range(3)]
    _, cache = own_pad.run_with_cache(tokens, names_filter=RESID)
    expected = cache[RESID][tokens != 2]
    torch.testing.assert_close(store.rows(RESID, torch.arange(8)), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(tokens, given)


def test_prepended_bos_is_neither_masked_nor_stored(own_pad, tmp_path):
    own_pad = copy.deepcopy(own_pad)
    own_pad.tokenizer.bos_token = "<eos>"
    store = activations(own_pad, ["w5 w6", "w7 w8 w9"], "hook_embed", out=tmp_path / "a", prepend_bos=True)
    assert store.token.tolist() == [5, 6, 7, 8, 9]
    assert store.position.tolist() == [1, 2, 1, 2, 3]


def test_batches_are_every_row_once_in_the_order_of_the_seed(small, tmp_path):
    store = activations(small, SENTENCES, RESID, out=tmp_path / "a", batch_size=2, shard_bytes=4000)
    everything = store.rows(RESID, torch.arange(len(store)))
    assert torch.equal(store.rows("blocks.1.hook_out", torch.tensor([5, 0, 5])), everything[[5, 0, 5]])
    batches = list(store.batches(RESID, 16))
    assert [len(batch) for batch in batches[:-1]] == [16] * (len(batches) - 1)
    shuffled = torch.cat(batches)
    assert not torch.equal(shuffled, everything)
    assert torch.equal(shuffled.unique(dim=0), everything.unique(dim=0))
    assert torch.equal(shuffled, torch.cat(list(store.batches(RESID, 7))))
    assert not torch.equal(shuffled, torch.cat(list(store.batches(RESID, 16, seed=1))))
    two = torch.cat(list(store.batches(RESID, 16, epochs=2)))
    assert torch.equal(two[: len(store)], shuffled)
    assert not torch.equal(two[len(store) :], shuffled)
    endless = store.batches(RESID, 40, epochs=None, dtype=torch.float64)
    assert {(tuple(batch.shape), batch.dtype) for batch in islice(endless, 9)} == {
        ((40, small.cfg.d_model), torch.float64)
    }
    assert next(endless) is not None
    assert torch.equal(torch.cat(list(store.batches(RESID, 5))), shuffled)


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_rows_are_chosen_by_numbers_or_by_a_mask(small, tmp_path):
    store = activations(small, SENTENCES[:4], RESID, out=tmp_path / "a", batch_size=2, shard_bytes=2000)
    assert len(store.shards) > 1
    everything, n_rows = store.rows(RESID, torch.arange(len(store))), len(store)
    assert torch.equal(store.rows(RESID, store.masked), everything[store.masked])
    assert torch.equal(store.rows(RESID, store.masked.tolist()), everything[store.masked])
    for numbers in ([4, 0], (4, 0), np.array([4, 0]), torch.tensor([4, 0], dtype=torch.int32)):
        assert torch.equal(store.rows(RESID, numbers), everything[[4, 0]])
    assert torch.equal(store.rows(RESID, 3), everything[[3]])
    assert store.rows(RESID, []).shape == (0, small.cfg.d_model)
    for refused, error, message in (
        (
            store.masked[:-1],
            ValueError,
            rf"are torch.bool \[{n_rows - 1}\]; give .* a mask of all {n_rows} rows",
        ),
        (torch.zeros(2, 2).long(), TypeError, r"indices=<torch.int64 \[2, 2\]> is a Tensor; it must be a whole number"),
        (torch.tensor([0.5]), TypeError, "are torch.float32; give whole numbers, or a mask"),
        (["first"], TypeError, r"indices\[0\]='first' is a str; it must be a whole number"),
        ([-1], IndexError, f"rows are numbered from 0 to {n_rows - 1}"),
    ):
        with pytest.raises(error, match=message):
            store.rows(RESID, refused)


def test_the_callers_hooks_are_felt_and_recorded(small, tmp_path):
    settings = dict(names=RESID, out=tmp_path / "a")
    plain = activations(small, SENTENCES, **settings)
    with small.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", zero_ablate())]):
        hooked = activations(small, SENTENCES, names=RESID, out=tmp_path / "b")
        with pytest.raises(ValueError, match=r"hooks: blocks.0.hook_mlp_out none there"):
            activations(small, SENTENCES, **settings)
    rows = torch.arange(len(plain))
    assert not torch.allclose(plain.rows(RESID, rows), hooked.rows(RESID, rows), atol=1e-2)


@pytest.mark.parametrize("small", ["mdm"], indirect=True)
def test_what_does_not_fit_is_refused(small, tmp_path):
    def collect(**options):
        return activations(small, **{"texts": SENTENCES, "names": RESID, "out": tmp_path / "x", **options})

    for options, message in (
        ({"t": 1.5}, r"t=1.5; a noise level is the probability of being masked, between 0 and 1"),
        ({"t": []}, "t is empty; give a noise level"),
        ({"t": 0, "mask": "masked"}, "mask='masked' selects nothing at the noise level t=0"),
        ({"t": 1, "mask": "unmasked"}, "mask='unmasked' selects nothing at the noise level t=1"),
        ({"mask": "mask"}, "mask='mask'; it must be 'masked', 'unmasked' or 'all'"),
        ({"names": "blocks.0.attn.hook_pattern"}, r"\[batch head query key\], and a vector for each position"),
        ({"names": "denoise.hook_logits"}, "passes only inside the denoising loop"),
        ({"texts": []}, "there is no text: the list is empty"),
        ({"texts": ["Ada", ""]}, "text 1: "),
        ({"texts": torch.tensor([[5, small.cfg.mask_token_id]])}, r"text 0 contains \[MASK\]"),
        ({"texts": [" ".join(["Ada"] * 999)]}, "text 0: 999 positions do not fit into the context"),
        ({"attention_mask": torch.ones(1, 2)}, "attention_mask= belongs to tokens"),
        ({"batch_size": 0}, "batch_size=0; it must be at least 1"),
        ({"dtype": "int8"}, "cannot have the dtype 'int8'"),
        ({"t": 1e-9, "mask": "masked"}, "mask='masked' selects no position of any canvas at t=1e-09"),
    ):
        with pytest.raises(ValueError, match=message):
            collect(**options)
    with pytest.raises(
        KeyError, match=r"no hook point 'blocks.1.hook_resid_pots'; nearest are: blocks.1.hook_resid_post"
    ):
        collect(names="blocks.1.hook_resid_pots")
    with pytest.raises(TypeError, match="unexpected keyword argument 'maks'; the nearest is 'mask'"):
        collect(maks="all")
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match=r"low=0.5 and high=0.5; low must be below high"):
        NoiseRange(0.5, 0.5)

    store = collect()
    with pytest.raises(ValueError, match=r"was made with other settings.*\(seed: 0 there, 1 here"):
        collect(seed=1)
    with pytest.raises(KeyError, match=r"'hook_embed' was not stored; the nearest are: blocks.1.hook_resid_post"):
        store.batches("hook_embed", 4)
    with pytest.raises(IndexError, match="rows are numbered from 0 to"):
        store.rows(RESID, torch.tensor([len(store)]))
    with pytest.raises(ValueError, match=r"no row of .* is selected by t=0.123"):
        store.batches(RESID, 4, t=0.123)
    with pytest.raises(FileNotFoundError, match="contains no activations"):
        ActivationStore.load(tmp_path / "nothing")


@pytest.mark.parametrize("small", ["ar"], indirect=True)
def test_an_ar_baseline_has_no_noise(small, tmp_path):
    with pytest.raises(ValueError, match=r"t=0.5: .* has no \[MASK\], so its texts have no noise; leave out t"):
        activations(small, SENTENCES, RESID, out=tmp_path / "a", t=0.5)
    with pytest.raises(ValueError, match=r"mask='masked': .* has no \[MASK\]; use mask='all'"):
        activations(small, SENTENCES, RESID, out=tmp_path / "a", mask="masked")


def test_damaged_folders_are_refused(small, tmp_path):
    store = activations(small, SENTENCES, RESID, out=tmp_path / "a", batch_size=2, shard_bytes=4000)
    first, second, *_ = sorted((tmp_path / "a").glob("*.safetensors"))
    kept = first.read_bytes()
    first.write_bytes(kept[:-9])
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        ActivationStore.load(tmp_path / "a")
    first.unlink()
    gapped = ActivationStore.load(tmp_path / "a")
    assert not gapped.is_complete
    n_lost = len(store) - len(gapped)
    rows = torch.arange(len(gapped))
    assert torch.equal(gapped.rows(RESID, rows), store.rows(RESID, rows + n_lost))
    assert torch.equal(gapped.text, store.text[n_lost:])
    again = activations(small, SENTENCES, RESID, out=tmp_path / "a", batch_size=2, shard_bytes=4000)
    assert again.is_complete
    assert first.read_bytes() == kept
    first.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match=r"contains the canvases from \d+ on, which do not .*: the file was renamed"):
        ActivationStore.load(tmp_path / "a")
    first.write_bytes(kept)
    other = activations(small, SENTENCES[:4], RESID, out=tmp_path / "b")
    second.write_bytes((other.path / "000000.safetensors").read_bytes())
    with pytest.raises(ValueError, match="belongs to another call than"):
        ActivationStore.load(store.path)


def test_values_that_the_stored_dtype_cannot_hold_are_refused(small, tmp_path):
    with (
        small.hooks(fwd_hooks=[(RESID, named("times 1e6", lambda activation, hook: activation * 1e6))]),
        pytest.raises(ValueError, match=r"too large for dtype=torch.float16; use 'bfloat16' or 'float32'"),
    ):
        activations(small, SENTENCES, RESID, out=tmp_path / "a", dtype="float16")
