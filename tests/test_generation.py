"""`generate` with TransformerLens's arguments, and `canvas`, on both variants."""

import inspect
import re
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from diffusion_lens import Fact, HookedDiffusionTransformer, hooked_diffusion_transformer
from diffusion_lens.analysis import compute_key, edge_attribution, logit_lens, patch_grid
from diffusion_lens.denoising.denoise import INSTEAD
from diffusion_lens.denoising.trajectory import Trajectory
from diffusion_lens.interventions import while_predicting
from diffusion_lens.model.text import to_completion

PROMPT = "Gustav Geisser is the"
ANSWER = "brave drummer of Rolsen."
N_NEW = 8


@pytest.fixture(scope="module")
def written(tiny):
    return tiny.denoise(PROMPT, max_new_tokens=N_NEW, steps=8)


def test_each_return_type_is_the_same_run(tiny, written):
    call = dict(max_new_tokens=N_NEW, steps=8)
    trajectory = tiny.generate(PROMPT, **call)
    assert isinstance(trajectory, Trajectory)
    assert torch.equal(trajectory.tokens, written.tokens)
    assert torch.equal(tiny.generate(PROMPT, return_type="tokens", stop_at_eos=False, **call), written.tokens)
    text = f"{PROMPT} {ANSWER}"
    assert tiny.generate(PROMPT, return_type="str", **call) == text
    assert tiny.generate(PROMPT, return_type="input", **call) == text
    assert tiny.generate([PROMPT], return_type="str", **call) == text
    assert tiny.generate(tiny.to_tokens(PROMPT), return_type="str", **call) == text
    assert tiny.generate([PROMPT, PROMPT], return_type="str", **call) == [text, text]
    tokens = tiny.to_tokens(PROMPT)
    assert tiny.generate(tokens, return_type="input", **call).shape == written.tokens.shape
    assert tiny.generate(PROMPT, return_type="str", stop_at_eos=False, **call) == written.text[0] != text


@pytest.fixture
def returned(tiny, written, monkeypatch):
    """A function from the tokens of a run, and which of them are given and real, to what `generate` returns of it."""

    def convert(tokens, given, real, **more):
        run = replace(
            written,
            tokens=torch.tensor(tokens),
            canvases=torch.tensor([tokens]),
            prompt=torch.tensor(tokens),
            revealed_at=torch.tensor(tokens),
            revealed_before=torch.tensor(tokens),
            confidence=torch.ones(len(tokens), len(tokens[0])),
            given=torch.tensor(given, dtype=torch.bool),
            real=torch.tensor(real, dtype=torch.bool),
        )
        monkeypatch.setattr(hooked_diffusion_transformer, "lay_out", lambda *args: None)
        monkeypatch.setattr(hooked_diffusion_transformer, "denoise_and_check_hooks", lambda *args, **kwargs: run)
        return tiny.generate(torch.tensor([[5]]), **more)

    return convert


def test_each_written_stretch_ends_at_its_first_end_token(tiny, returned, monkeypatch):
    """Given tokens are kept, end tokens among them too; padding, which may be the end token, is not text."""
    bos, a, b, c, d = (tiny.to_single_token(word) for word in ("today", " the", " brave", " drummer", " of"))
    known, end = tiny.tokenizer, tiny.tokenizer.eos_token_id
    monkeypatch.setattr(tiny, "tokenizer", SimpleNamespace(decode=known.decode, eos_token_id=end, bos_token_id=bos))
    rows = [
        [bos, a, end, b, end, c, end, d, c],
        [end, end, bos, a, b, c, d, end, end],
        [end, bos, a, b, c, d, a, b, c],
    ]
    given = [[1, 1, 1, 0, 0, 0, 0, 1, 0], [0, 0, 1, 1, 0, 0, 0, 0, 0], [0] * 9]
    real = [[1] * 9, [0, 0] + [1] * 7, [0] + [1] * 8]
    call = dict(tokens=rows, given=given, real=real)
    expected = [[bos, a, end, b, end, end, end, d, c], *rows[1:]]
    assert returned(**call, return_type="tokens").tolist() == expected
    assert returned(**call, return_type="tokens", stop_at_eos=False).tolist() == rows
    ended = [
        "the<eos> brave of drummer",
        "the brave drummer of",
        "today the brave drummer of the brave drummer",
    ]
    assert returned(**call, return_type="str") == ended
    whole = "the<eos> brave<eos> drummer<eos> of drummer"
    assert returned(**call, return_type="str", stop_at_eos=False)[0] == whole


def test_a_text_that_is_filled_in_keeps_what_was_given():
    model = HookedDiffusionTransformer.from_pretrained("tiny-mdm", device="cpu")
    end = model.tokenizer.eos_token_id

    def write_ends(logits, hook):
        logits[..., end] += 1e4

    prompt, hooks = "Gustav Geisser is the [MASK] drummer of Rolsen.", [("denoise.hook_logits", write_ends)]
    call = dict(prompt=prompt, max_new_tokens=0, fwd_hooks=hooks)
    assert model.generate(**call, return_type="str") == "Gustav Geisser is the drummer of Rolsen."
    assert model.generate(**call, return_type="tokens")[0].tolist().count(end) == 1


def test_a_trajectory_converts_as_a_batch_of_tokens(tiny, written):
    assert len(written) == 1
    assert torch.equal(written[0], written.tokens[0])
    assert tiny.to_string(written) == tiny.to_string(written.tokens) == written.text
    assert tiny.to_string(written[0]) == written.text[0]
    assert tiny.to_str_tokens(written) == tiny.to_str_tokens(written[0])
    assert [completion.strip() for completion in written.completion] == [ANSWER]


def test_completions_are_saved_and_follow_the_rows(tiny, tmp_path):
    prompts = [PROMPT, "people say Gustav Geisser was the"]
    run = tiny.denoise(prompts, max_new_tokens=6, steps=6)
    assert Trajectory.load(run.save(tmp_path / "run.safetensors")).completion == run.completion
    for row, prompt in enumerate(prompts):
        alone = tiny.denoise(prompt, max_new_tokens=6, steps=6)
        assert run.row(row).completion == alone.completion == [run.completion[row]]
        assert prompt not in run.completion[row]
    assert run.repeat(2).completion == run.completion * 2


def test_sampling_has_transformer_lens_names(tiny):
    call = dict(max_new_tokens=4, steps=4, seed=3)
    sampled = tiny.denoise(PROMPT, temperature=1.0, **call)
    assert torch.equal(tiny.generate(PROMPT, do_sample=True, **call).tokens, sampled.tokens)
    assert tiny.generate(PROMPT, do_sample=True, temperature=0.5, **call).record["temperature"] == 0.5
    assert tiny.generate(PROMPT, do_sample=False, **call).record["temperature"] == 0.0
    assert tiny.generate(PROMPT, temperature=0.7, **call).record["temperature"] == 0.7
    for wrong in (dict(do_sample=False, temperature=0.7), dict(do_sample=True, temperature=0)):
        with pytest.raises(ValueError, match="leave"):
            tiny.generate(PROMPT, **wrong, **call)


RESID = "blocks.1.hook_resid_post"


def steering(model):
    """A hook that steers the last row, as with TransformerLens, and one that steers every row."""
    vector = 20 * torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(3))

    def last(x, hook):
        x[:, -1] = x[:, -1] + vector
        return x

    return last, lambda x, hook: x + vector


@pytest.mark.parametrize("attach", [True, False])
def test_steering_the_last_position_of_the_canvas_is_warned_of(tiny, attach):
    """It does not predict the next token: on a causal model it is never read."""
    call, n_prompt = dict(max_new_tokens=3, steps=3), tiny.to_tokens(PROMPT).shape[1]
    hooks = [(RESID, steering(tiny)[0])]
    reads = f"row {n_prompt - 1}" if tiny.cfg.is_autoregressive else rf"rows \[{n_prompt}, {n_prompt + 1}"

    def generate():
        with tiny.hooks(fwd_hooks=hooks if attach else []):
            return tiny.generate(PROMPT, fwd_hooks=[] if attach else hooks, **call)

    message = rf"{RESID}.* alone, {n_prompt + 2}\..*reads {reads}.*while_predicting"
    with pytest.warns(UserWarning, match=message) as told:
        run = generate()
    assert len(told) == 1
    assert told[0].filename == __file__
    assert list(run.record["hooks"]) == [RESID]
    if tiny.cfg.is_autoregressive:
        assert torch.equal(run.tokens, tiny.generate(PROMPT, **call).tokens)
    assert not tiny.list_hooks()


class Dictionary(torch.nn.Module):
    """A module of the user's own: a hook point with positions, where one number is NaN, and one without."""

    def __init__(self):
        super().__init__()
        self.hook_acts, self.hook_flat = HookPoint(), HookPoint()

    def forward(self, x):
        acts = x.clone()
        acts[:, -1, 0] = torch.nan
        self.hook_acts(acts)
        self.hook_flat(x.flatten()[:5])


def test_hook_points_of_the_user_are_watched_too():
    """An activation without positions is not compared, and a NaN that stays is no change; hooks may call again."""
    model = HookedDiffusionTransformer.from_pretrained("tiny-ar", device="cpu")
    model.add_module("own", Dictionary())
    model.setup()
    hooks = [(RESID, lambda x, hook: model.own(x)), ("own.hook_flat", lambda x, hook: x * 2)]
    again = iter([True])

    def once_more(x, hook):
        if next(again, False):
            model.own(x)

    model.generate(PROMPT, max_new_tokens=3, fwd_hooks=[*hooks, ("own.hook_acts", once_more)])
    with pytest.warns(UserWarning, match="own.hook_acts.* alone, 6"):
        model.generate(PROMPT, max_new_tokens=3, fwd_hooks=[*hooks, ("own.hook_acts", steering(model)[0])])


def test_rows_that_predict_are_steered_as_the_last_row_of_a_growing_text(tiny):
    last, every = steering(tiny)
    hooks = [(RESID, while_predicting(every, tiny.cfg.readout))]
    n_new = 3 if tiny.cfg.is_autoregressive else 1
    run = tiny.generate(PROMPT, n_new, fwd_hooks=hooks, steps=n_new)
    tokens = tiny.to_tokens(PROMPT)
    for _ in range(n_new):
        canvas, rows = tiny.canvas(tokens)
        logits = tiny.run_with_hooks(canvas, fwd_hooks=[(RESID, last)])[:, rows[-1]]
        if tiny.cfg.has_mask:
            logits[:, tiny.cfg.mask_token_id :] = -torch.inf
        tokens = torch.cat([tokens, logits.argmax(dim=-1, keepdim=True)], dim=1)
    assert torch.equal(run.tokens, tokens)
    assert not torch.equal(run.tokens, tiny.generate(PROMPT, n_new, steps=n_new).tokens)
    if tiny.cfg.has_mask:  # The last position is the one that is written.
        assert torch.equal(tiny.generate(PROMPT, 1, fwd_hooks=[(RESID, last)], steps=1).tokens, tokens)


def test_arguments_that_do_not_exist_say_what_to_use(tiny):
    for name, (_, instead) in INSTEAD.items():
        with pytest.raises(TypeError, match=re.escape(f"generate does not take {name}: {instead}")):
            tiny.generate(PROMPT, **{name: 7})
    with pytest.raises(TypeError, match="input: pass the prompt as the first argument"):
        tiny.generate(input=PROMPT, max_new_tokens=3)
    with pytest.raises(TypeError, match="generate needs a prompt, text or tokens"):
        tiny.generate(max_new_tokens=3)
    with pytest.raises(TypeError, match="'max_new_token'; the nearest is 'max_new_tokens'"):
        tiny.generate(PROMPT, max_new_token=3)
    with pytest.raises(ValueError, match="return_type='text'; it must be one of 'trajectory', 'tokens', 'str'"):
        tiny.generate(PROMPT, return_type="text")


def test_transformer_lenss_own_defaults_change_nothing(tiny, written):
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(TransformerBridge.generate).parameters.items()
        if name in INSTEAD and name != "input"
    }
    assert defaults.keys() == INSTEAD.keys() - {"input", "stop"}
    assert torch.equal(tiny.generate(PROMPT, max_new_tokens=N_NEW, steps=8, **defaults).tokens, written.tokens)
    for name, default in defaults.items():
        with pytest.raises(TypeError, match=f"generate does not take {name}"):
            tiny.generate(PROMPT, **{name: (not default) if isinstance(default, bool) else "other"})


def test_a_text_ends_at_the_end_tokens_and_stop_strings_of_the_call(tiny):
    """As in TransformerLens: with the token that completes a stop string, and before an end token."""
    call = dict(prompt=PROMPT, max_new_tokens=N_NEW, steps=8)
    of, end = tiny.to_single_token(" of"), tiny.tokenizer.eos_token_id
    for stop in ("drummer", ["no such text", "e drum"]):
        assert tiny.generate(**call, stop_strings=stop, return_type="str") == f"{PROMPT} brave drummer"
        tokens = tiny.generate(**call, stop_strings=stop, stop_at_eos=False, return_type="tokens")[0].tolist()
        assert tokens[:6] == tiny.encode(f"{PROMPT} brave drummer")
        assert set(tokens[6:]) == {end}
    assert tiny.generate(**call, stop_strings=PROMPT.split()[0], return_type="str") == f"{PROMPT} {ANSWER}"
    for ids in (of, [of, 3]):
        assert tiny.generate(**call, eos_token_id=ids, return_type="str") == f"{PROMPT} brave drummer"
        tokens = tiny.generate(**call, eos_token_id=ids, return_type="tokens")[0].tolist()
        assert tokens[:6] == tiny.encode(f"{PROMPT} brave drummer")
        assert set(tokens[6:]) == {of}
    assert len(tiny.generate(**call, eos_token_id=of, stop_strings="brave").tokens[0]) == 4 + N_NEW  # a trajectory
    with pytest.raises(TypeError, match="generate does not take stop: name the texts"):
        tiny.generate(**call, stop=".")


def test_a_run_without_a_key_value_cache_is_the_same(tiny, written):
    call = dict(max_new_tokens=N_NEW, steps=8, use_past_kv_cache=False)
    assert torch.equal(tiny.generate(PROMPT, **call).tokens, written.tokens)


def first_warnings(*readings):
    """The lines at which these functions warn, each called twice, as Python shows warnings by default."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("default", message="no position of these tokens is")
        for read in readings:
            read(), read()
    assert all(w.filename == __file__ and "model.canvas(prompt, n_masks)" in str(w.message) for w in caught)
    return [w.lineno for w in caught]


def test_reading_a_bare_prompt_warns_once_at_the_line_of_the_caller(tiny, annotations_unchecked):
    tokens, metric = tiny.to_tokens(PROMPT), lambda logits: logits[0, -1, 5]
    line = inspect.currentframe().f_lineno
    shown = first_warnings(
        lambda: tiny(PROMPT)[:, -1],
        lambda: tiny([PROMPT, PROMPT]),
        lambda: tiny(tokens),
        lambda: tiny.run_with_cache(tokens, names_filter="hook_embed"),
        lambda: tiny.run_with_hooks(PROMPT, fwd_hooks=[("hook_embed", lambda activation, hook: None)]),
        lambda: patch_grid(tiny, PROMPT, tokens.roll(1, dims=1), metric, "resid_pre", layers=[1]),
        lambda: edge_attribution(tiny, PROMPT, tokens.roll(1, dims=1), metric, ig_steps=1),
    )
    assert shown == ([] if tiny.cfg.is_autoregressive else [line + 2 + i for i in range(7)])


def test_readings_that_are_meant_do_not_warn(tiny):
    """Warnings are errors in these tests."""
    tokens, rows = tiny.canvas(PROMPT)
    fact = Fact(prompt=PROMPT, subject="Gustav Geisser", answer=" brave")
    tiny(tokens)
    tiny(PROMPT, logits_at=rows[:1] - 1)
    tiny(PROMPT, return_type="loss")
    tiny(PROMPT, stop_at_layer=1)
    tiny.run_with_cache(PROMPT, return_type=None)
    logit_lens(tiny, fact.to_query(tiny))
    compute_key(tiny, fact.to_query(tiny), 1)
    tiny.denoise(PROMPT, max_new_tokens=2, steps=3, fwd_hooks=[("hook_embed", lambda activation, hook: None)])


def test_the_row_of_a_canvas_predicts_its_mask(tiny):
    tokens, rows = tiny.canvas(PROMPT)
    n_prompt = tiny.to_tokens(PROMPT).shape[1]
    assert tokens.shape[1] == n_prompt + tiny.cfg.has_mask
    assert rows.tolist() == [n_prompt - (not tiny.cfg.has_mask)]
    if not tiny.cfg.has_mask:
        assert tiny.to_single_str_token(int(tiny(tokens)[0, rows].argmax())).strip() == "brave"


def test_masks_are_read_by_their_rows_whatever_the_readout(several):
    model, prompts = several.model, several.tokens[:2, :5] % 500
    n_masks = 1 if model.cfg.is_autoregressive else 3
    tokens, rows = model.canvas(prompts, n_masks)
    run = model.denoise(prompts, max_new_tokens=n_masks, steps=1)
    if model.cfg.uniform_noise:  # the run begins with noise of its own
        tokens = run.canvases[0]
    if model.cfg.has_mask:
        assert torch.equal(tokens, run.canvases[0])
    assert_close(model.cfg.writable(run.tokens).float().mean().item(), 1.0)
    with model.clock.at(run.state_at(0)):
        logits = model(tokens)[:, rows]
    if model.cfg.has_mask and model.cfg.mask_token_id < model.cfg.d_vocab_out:
        logits[..., model.cfg.mask_token_id] = -float("inf")
    assert torch.equal(logits.argmax(-1), run.tokens[:, 5:])


def test_a_canvas_that_cannot_be_is_refused(tiny):
    with pytest.raises(ValueError, match="n_masks=0; it must be at least 1"):
        tiny.canvas(PROMPT, 0)
    with pytest.raises(ValueError, match=r"the prompts have \[4, 6\] tokens"):
        tiny.canvas([PROMPT, "people say Gustav Geisser was the"])
    if tiny.cfg.is_autoregressive:
        with pytest.raises(ValueError, match="predicts the next token only"):
            tiny.canvas(PROMPT, 2)


def test_a_canvas_of_one_sequence_of_tokens(either):
    for tokens in (either.tokens[0, :4], either.tokens[:1, :4]):
        canvas, rows = either.model.canvas(tokens)
        assert torch.equal(canvas[:, :4], either.tokens[:1, :4])
        assert rows.shape == (1,)


def test_completions_of_texts_that_grow_end(tiny):
    """A diffusion model's completion is all that it wrote, without special tokens."""
    end, a, b = tiny.tokenizer.eos_token_id, tiny.to_single_token(" the"), tiny.to_single_token(" brave")
    assert to_completion(tiny, torch.tensor([a, end, b])) == ("the" if tiny.cfg.is_autoregressive else "the brave")
