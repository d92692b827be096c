"""The effect of masking a written token again, against canvases that are masked and read one at a time."""

import pytest
import torch

from diffusion_lens import HookedDiffusionTransformer
from diffusion_lens.analysis import remask_effect

LENGTH = 11


@pytest.fixture(scope="module")
def model():
    return HookedDiffusionTransformer.from_pretrained("site-mdm")


@pytest.fixture(scope="module")
def run(model):
    return model.denoise(["Plerrick Baupling is the", "Plerrick Baupling is"], max_new_tokens=6, steps=6)


def one_at_a_time(model, run, step, index, others):
    """own, KL and change of each pair, by a pass for each variant of the canvas and the whole of its logits."""
    canvas, final, given = run.canvases[index, 0].clone(), run.tokens[0], run.given[0]
    still = {i for i in range(len(canvas)) if canvas[i] == run.blank}
    read = [i for i in range(len(canvas)) if not given[i]]

    def log_p(pos, *masked):
        tokens = canvas.clone()
        tokens[list(masked)] = run.blank
        state = run.row(0).state_at(step, tokens=tokens[None])
        with torch.no_grad(), model.clock.at(state):
            logits = model.forward(tokens[None])[0]
            row = model.readout.rows(torch.tensor([pos]))[0]
            return model.head.clean_logits(logits[row]).log_softmax(dim=0)

    own, kl, change = [], [], []
    for i in (i for i in read if i not in still):
        own.append(log_p(i, i)[canvas[i]])
        for j in read:
            if i == j:
                kl.append(torch.tensor(torch.nan)), change.append(torch.tensor(torch.nan))
                continue
            beside = () if j in still or others == "present" else (j,)
            before, after = log_p(j, *beside), log_p(j, i, *beside)
            kl.append(torch.nn.functional.kl_div(after, before, reduction="sum", log_target=True))
            change.append((after - before)[final[j]])
    return torch.stack(own), torch.stack(kl), torch.stack(change)


@pytest.mark.parametrize(("canvas", "others"), [(-1, "present"), (2, "masked")])
def test_every_pair_one_at_a_time(every, canvas, others):
    model, cfg = every.model, every.model.cfg
    if not cfg.has_mask or cfg.opens_blocks:
        run = model.denoise(every.tokens[:1, :5] % 500, length=LENGTH, steps=LENGTH)
        with pytest.raises(ValueError, match=r"no \[MASK\] to write over|writes block after block"):
            remask_effect(model, run)
        return
    run = model.denoise(every.tokens[:1, :5] % 500, length=LENGTH, steps=3)
    found = remask_effect(model, run, step=canvas, others=others)
    index = canvas % len(run.canvases)
    own, kl, change = one_at_a_time(model, run, min(index, run.n_steps - 1), index, others)
    torch.testing.assert_close(found.own, own, rtol=1e-4, atol=1e-5)
    for ours, theirs in ((found.kl, kl), (found.change, change)):
        torch.testing.assert_close(ours, theirs.reshape(ours.shape), rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.filterwarnings("ignore:the trajectory was written by another network")
def test_without_attention_nothing_changes_elsewhere(model, run):
    """A law: what no position can see has no effect on it, and the own token is as unlikely as without any context."""
    blind = [(f"blocks.{i}.attn.hook_z", lambda z, hook: z * 0) for i in range(model.cfg.n_layers)]
    with model.hooks(fwd_hooks=blind):
        found = remask_effect(model, run)
    assert found.kl.nan_to_num().abs().max() < 1e-5
    assert found.change.nan_to_num().abs().max() < 1e-4
    assert (remask_effect(model, run).own > found.own).any()


def test_some_positions_and_small_batches_are_parts(model, run):
    whole = remask_effect(model, run, row=1)
    some = remask_effect(model, run, row=1, positions=[whole.masked[2], whole.masked[0]])
    torch.testing.assert_close(some.kl, whole.kl[[2, 0]], atol=1e-5, rtol=1e-4, equal_nan=True)
    assert some.masked == [whole.masked[2], whole.masked[0]]
    alone = remask_effect(model, run.row(1))
    torch.testing.assert_close(alone.kl, whole.kl, atol=1e-5, rtol=1e-4, equal_nan=True)


def test_what_cannot_be_masked_again_is_said(model, run):
    for options, message in [
        ({"positions": [0]}, "position 0 was given, or is padding; mask positions again that the run has written"),
        ({"positions": [99]}, r"positions=\[99\]"),
        ({"positions": [-2], "step": 0}, "is masked on this canvas"),
        ({"step": 0}, "nothing is written on this canvas"),
        ({"step": 9}, r"step=\[9\]"),
        ({"row": 2}, r"row=\[2\]"),
        ({"others": "all"}, "others='all'"),
        ({"max_bytes": 1000}, "max_bytes is 1,000"),
    ]:
        with pytest.raises(ValueError, match=message):
            remask_effect(model, run, **options)
    assert not model.list_hooks()


def test_the_table_and_the_picture(model, run):
    found = remask_effect(model, run)
    frame = found.to_dataframe()
    assert len(frame) == found.kl.numel()
    pair = frame[(frame.masked == found.masked[1]) & (frame.read == found.read[0])].iloc[0]
    assert pair.kl == pytest.approx(float(found.kl[1, 0]))
    assert pair.masked_token == found.str_tokens[found.masked[1]]
    torch.testing.assert_close(found.collateral, found.kl.nan_to_num().sum(dim=1))
    assert len(found.plot().get_yticklabels()) == len(found.masked)
