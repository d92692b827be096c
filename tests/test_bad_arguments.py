"""Public functions refuse bad arguments at the door, in words that name the argument, and leave the model as it was."""

import inspect
import math
from functools import partial

import numpy as np
import pytest
import torch
from bad_arguments import doors, tried

from diffusion_lens import Fact, HookedDiffusionTransformer
from diffusion_lens.analysis import causal_trace, logit_lens, noise_scale, patch_grid
from diffusion_lens.analysis.signatures import correlation_of_frequencies
from diffusion_lens.data import toy_facts
from diffusion_lens.denoising import lay_out
from diffusion_lens.denoising.samplers import sdar
from diffusion_lens.evaluation import recall_by_steps
from diffusion_lens.settings import CHECKED, checked_arguments, plain_number
from diffusion_lens.training import TrainingConfig


@pytest.fixture
def query(tiny):
    return toy_facts.load().facts("p2d", "p2d")[0].to_query(tiny)


def test_public_functions_are_checked():
    functions = {name: door for name, (door, _) in doors().items() if inspect.isroutine(door)}
    unchecked = {
        name for name, function in functions.items() if CHECKED not in vars(getattr(function, "__func__", function))
    }
    # Without arguments, for any, or on the way of every pass with hooks, and checked in the body.
    assert unchecked == {"acts_by_step", "in_loop_only", "lay_out", "model.add_hook", "model.hooks", "smdm"}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of prompts without [MASK]
@pytest.mark.usefixtures("annotations_unchecked")
def test_bad_arguments_are_refused_and_leave_no_trace():
    """A few of the calls of `make arguments`."""
    faults: list[str] = []
    outcomes = tried(150, seed=6, n_doors=30, report=faults.append)
    known = ("raw", "unnamed", "refused", "taken", "calls")
    assert not [outcome for outcome in outcomes if outcome not in known], "\n".join(faults)
    assert outcomes["raw"] <= 0.01 * outcomes["calls"], "\n".join(faults)


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, q: logit_lens(m, q, max_bytes=math.nan), "max_bytes=nan is a float; it must be a whole number"),
        (lambda m, q: causal_trace(m, q, noise=1e308, samples=1), "noise=1e.308; it must be a finite .* at most 1e.38"),
        (lambda m, q: noise_scale(m, ["Gustav"], factor=-1), "factor=-1.0; it must be a finite number above 0"),
        (lambda m, q: noise_scale(m, ["Gustav"], factor=1j), "factor=1j is a complex; it must be a number"),
        (
            lambda m, q: m.to_string(torch.tensor([1j])),
            r"tokens=<torch.complex64 \[1\]> is a Tensor; give ids of tokens",
        ),
        (lambda m, q: noise_scale(m, ["Gustav"], factor=math.nan), "factor=nan; it must be a finite number"),
        (lambda m, q: HookedDiffusionTransformer.from_pretrained("tiny-mdm", fold_ln="no"), "fold_ln='no' is a str"),
        (lambda m, q: TrainingConfig(steps=1, betas=(2, 3)), r"betas=\(2, 3\); each must be from 0 to below 1"),
        (lambda m, q: TrainingConfig(steps=1, decay_norms="no"), "decay_norms='no' is a str; it must be True or False"),
        (lambda m, q: Fact(1j, object(), [3]), "Fact: prompt=1j is a complex; it must be a text"),
        (lambda m, q: causal_trace(m, q, noise=0.5, layers={1: 2}), "layers=.* is a dict; it must be a whole number"),
        (lambda m, q: recall_by_steps(m, {"a": q}), "facts={'a': .* is a dict; it must be a sequence"),
        (lambda m, q: causal_trace(m, q, noise=0.5, positions=1), r"positions=1 is one number; give .*positions=\[1\]"),
        (lambda m, q: causal_trace(m, q, noise=0.5, positions=1j), "positions=1j is a complex; it must be a sequence"),
        (lambda m, q: causal_trace(m, q, noise=0.5, positions=slice(2)), "positions=slice.* is a slice; it must be a"),
        (lambda m, q: causal_trace(m, q, seed=2**32), "seed=4294967296; numpy.random.RandomState takes seeds below"),
        (lambda m, q: correlation_of_frequencies(torch.empty(0), 1, 2), "frequencies is empty; give model.positions"),
        (lambda m, q: sdar(eb_threshold=math.nan), "eb_threshold=nan; it must be a finite number, 0 or more"),
        (lambda m, q: m.run_with_hooks(q.tokens, reset_hooks_end="no"), "reset_hooks_end='no' is a str"),
        (lambda m, q: m.run_with_cache(q.tokens, incl_bwd="no"), "incl_bwd='no' is a str; it must be True or False"),
        (lambda m, q: m.hooks([], reset_hooks_end="no").__enter__(), "reset_hooks_end='no' is a str"),
        (lambda m, q: m.add_hook("hook_embed", torch.relu, is_permanent="no"), "is_permanent='no' is a str"),
        (lambda m, q: m.reset_hooks(including_permanent="no"), "including_permanent='no' is a str"),
        (lambda m, q: m.reset_hooks(direction="sideways"), "direction='sideways'"),
        (lambda m, q: m(q.tokens, past_kv_cache=5), "past_kv_cache is an int; it must be a KeyValueCache"),
        (lambda m, q: causal_trace("tiny", q, noise=0.5), "model='tiny' is a str; it must be a DiffusionTransformer"),
        (lambda m, q: lay_out(m, "the", length=10**400), "length=1000.* is too large for a number of 64 bits"),
        (lambda m, q: plain_number("noise", 10**400), "noise=1000.* is too large for a number of 64 bits"),
    ],
)
def test_what_was_once_taken_or_raised_raw_is_refused_by_name(tiny, query, call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(tiny, query)


@pytest.mark.usefixtures("annotations_unchecked")
def test_scalars_arrays_and_lists_are_taken_where_numbers_are_meant(tiny, query):
    one = causal_trace(tiny, query, noise=0.5, samples=1)
    for number in (np.int64(1), torch.tensor(1)):
        assert torch.equal(causal_trace(tiny, query, noise=np.float32(0.5), samples=number).scores, one.scores)
    for layers in ([0, 1], (0, 1), np.array([0, 1]), torch.tensor([0, 1]), range(2), iter([0, 1])):
        assert logit_lens(tiny, query, layers=layers).layers == [0, 1]


def test_an_entry_of_a_list_is_named(tiny, query):
    @checked_arguments
    def wanted(names: list[str], pair: tuple[int, int] = (0, 1)) -> None: ...

    wanted(["a", "b"], [2, 3])
    with pytest.raises(TypeError, match=r"wanted: names\[1\]=3 is an int; it must be a text"):
        wanted(["a", 3])
    with pytest.raises(TypeError, match=r"wanted: pair=\[1, 2, 3\] is a list; it must be a tuple"):
        wanted(["a"], [1, 2, 3])
    with pytest.raises(TypeError, match=r"patch_grid: clean\[1\]='x' is a str; it must be a Query or a Fact"):
        patch_grid(tiny, [query, "x"], query, partial(torch.sum), "resid_pre")


@pytest.mark.usefixtures("annotations_unchecked")
def test_refusals_of_unusual_values_are_sentences(tiny):
    with pytest.raises(TypeError, match="missing a required argument: 'answer'"):
        Fact("a b", None)
    with pytest.raises(TypeError, match=r"causal_trace: model=.* is a type"):
        causal_trace(np.float64, 1)
    assert HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu", fold_ln=np.True_).cfg.mask_token_id
    tokens = tiny.to_tokens("Gustav Geisser is the")
    for rows in (-1, slice(0, 2), [0.5], [None], "ab"):
        with pytest.raises((TypeError, ValueError), match="logits_at"):
            tiny(tokens, logits_at=rows)
    for layer in (True, 1.0, "1"):
        with pytest.raises(TypeError, match="stop_at_layer"):
            tiny(tokens, stop_at_layer=layer)
    with pytest.raises(TypeError, match="loss_per_token"):
        tiny(tokens, return_type="loss", loss_per_token="no")
    with pytest.raises(ValueError, match="contains an empty text"):
        tiny.generate("Gustav Geisser is the", max_new_tokens=2, stop_strings="", return_type="str")
    with pytest.raises(ValueError, match="eos_token_id=99999 is not among"):
        tiny.generate("Gustav Geisser is the", max_new_tokens=2, eos_token_id=99999)
