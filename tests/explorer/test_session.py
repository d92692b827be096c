"""Every run and every view of a session equals what the library's own calls return; its code repeats them."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import numpy as np
import pytest
import torch
from page_reader import as_selected, predicted_at, ran, unpack

from diffusion_lens import Fact
from diffusion_lens.analysis import logit_lens, noise_scale, trace_trajectory
from diffusion_lens.explorer import Session, Spec
from diffusion_lens.explorer.session import RequestCancelledError
from diffusion_lens.interventions import at_steps, mean_ablate, on_branch, replace, swap, zero_ablate

PROMPT, ANSWER = "Gustav Geisser is the", " brave drummer of Rolsen."
PLAIN = dict(prompt=PROMPT, steps=6, seed=4, temperature=0.3)
ASKED = dict(PLAIN, answer=ANSWER, subject=[0, 2])
SHARE = 0.51 / 65534


@pytest.fixture(scope="module")
def session(tiny):
    return Session([tiny])


def denoise(model, spec, **more):
    keywords = {name: spec[name] for name in ("steps", "seed", "temperature", "cfg_scale") if name in spec}
    return model.denoise(spec["prompt"], **keywords, **more)


def cached(model, spec, name):
    keywords = {key: spec[key] for key in ("steps", "seed", "temperature", "cfg_scale") if key in spec}
    return model.denoise_with_cache(spec["prompt"], name, **keywords)[1]


def texts(run, indices):
    return [None if index in (-1, 65535) else run["words"][index] for index in indices]


def same_canvases(run, trajectory):
    shown = [texts(run, canvas) for canvas in run["canvases"]]
    blank = trajectory.blank
    return shown == [
        [None if token == blank else trajectory.words[token] for token in canvas]
        for canvas in trajectory.canvases[:, 0].tolist()
    ]


def test_a_run_is_that_of_denoise(tiny, session):
    run, trajectory = session.run(PLAIN), denoise(tiny, PLAIN)
    assert same_canvases(run, trajectory)
    np.testing.assert_allclose(run["confidence"], trajectory.confidence[0].numpy(), atol=2e-6)
    assert run["revealed_at"] == trajectory.revealed_at[0].tolist()
    assert run["text"] == trajectory.text[0]
    assert run["spec"] == Spec.of(PLAIN).to_json()
    assert Spec.of(run["spec"]) == Spec.of(PLAIN)
    assert session.run(PLAIN)["id"] == run["id"] != session.run({**PLAIN, "seed": 5})["id"]


def network(tiny, what):
    """An intervention as plain data, and the hook that it stands for."""
    source = dict(PLAIN, seed=8, prompt="Gustav Geisser the is")
    reached = 4 if tiny.cfg.is_autoregressive else None

    def taken(point):
        cache = cached(tiny, PLAIN if what == "mean" else source, point)
        if what != "mean" or reached is None:
            return cache
        return {s: {n: x[:, : reached + s] for n, x in cache[s].items()} for s in cache}

    if what == "zero":
        return dict(what="zero", site="head", layer=2, head=1, positions=[1, 3], steps=[0, 2]), (
            "blocks.2.attn.hook_z",
            at_steps(zero_ablate([1, 3], heads=[1]), [0, 2]),
        )
    if what == "mean":
        point = "blocks.1.hook_mlp_out"
        return dict(what="mean", site="mlp", layer=1), (point, mean_ablate(taken(point)))
    given = dict(what="patch", site="resid", layer=0, positions=[0, 1], source="other", steps=[1, 2, 3])
    point = "blocks.0.hook_resid_post"
    return given, (point, at_steps(swap(taken(point), [0, 1]), [1, 2, 3]))


@pytest.mark.parametrize(
    ("tiny", "what"), [("tiny-mdm", "zero"), ("tiny-mdm", "patch"), ("tiny-ar", "mean")], indirect=["tiny"]
)
def test_an_intervention_is_a_hook_of_the_library(tiny, session, what):
    given, hook = network(tiny, what)
    if given.get("source"):
        given["source"] = session.run(dict(PLAIN, seed=8, prompt="Gustav Geisser the is"))["id"]
    spec = {**ASKED, "interventions": [given], "base": session.run(ASKED)["id"]}
    run, trajectory = session.run(spec), denoise(tiny, PLAIN, fwd_hooks=[hook])
    assert same_canvases(run, trajectory)
    np.testing.assert_allclose(run["confidence"], trajectory.confidence[0].numpy(), atol=2e-6)
    assert run["base"] == session.run(ASKED)["id"]
    assert f"block {given['layer']}" in run["label"]

    step = 2
    _, arrays = unpack(session.chunk(run["id"], f"lens/{step}"))
    lens = logit_lens(tiny, trajectory, steps=[step], fwd_hooks=[hook])
    np.testing.assert_allclose(arrays["entropy"], lens.entropy[0, :, 0].numpy(), rtol=1e-5)
    again = ran(as_selected(run["python"]["lens"], step=step, position=5), tiny)[0]
    assert torch.equal(again["trajectory"].canvases, trajectory.canvases)
    np.testing.assert_allclose(arrays["entropy"], again["lens"].entropy[:, 0].numpy(), rtol=1e-5)
    assert tiny.list_hooks() == {}


def test_a_forced_token_goes_on_from_its_step(tiny, session):
    step, position = 2, 4
    token = tiny.to_single_token("drummer")
    run = session.run({**PLAIN, "interventions": [dict(what="force", step=step, position=position, token="drummer")]})
    plain = session.run(PLAIN)
    hook = ("denoise.hook_tokens", at_steps(replace(torch.tensor(token), [position]), [step]))
    trajectory = denoise(tiny, PLAIN, fwd_hooks=[hook])
    as_texts = [[texts(x, canvas) for canvas in x["canvases"]] for x in (run, plain)]
    assert as_texts[0][:step] == as_texts[1][:step]
    assert as_texts[0][step][position] == "drummer"  # the canvas that the step reads
    assert same_canvases(run, trajectory)
    # The lens reads that canvas too, and so does the code.
    _, arrays = unpack(session.chunk(run["id"], f"lens/{step}"))
    again = ran(as_selected(run["python"]["lens"], step=step, position=5), tiny)[0]
    assert again["trajectory"].str_canvases()[step][position] == "drummer"
    np.testing.assert_allclose(arrays["entropy"], again["lens"].entropy[:, 0].numpy(), rtol=1e-5)


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_a_masked_position_is_written_again(tiny, session):
    plain = session.run(PLAIN)
    revealed = plain["revealed_at"]
    position = revealed.index(min(at for at in revealed if at >= 0))
    step = revealed[position] + 2
    run = session.run({**PLAIN, "interventions": [dict(what="force", step=step, position=position, token=None)]})
    as_texts = [[texts(x, canvas) for canvas in x["canvases"]] for x in (run, plain)]
    assert as_texts[0][:step] == as_texts[1][:step]
    assert as_texts[0][step][position] is None
    assert run["revealed_at"][position] >= step
    assert None not in as_texts[0][-1]


def test_a_run_with_other_steps_is_refused_as_a_source(tiny, session):
    source = session.run({**PLAIN, "steps": PLAIN["steps"] + 1})["id"]
    spec = {**PLAIN, "interventions": [dict(what="patch", site="resid", layer=1, source=source)]}
    if tiny.cfg.is_autoregressive:  # whose steps are its tokens
        assert session.run(spec)["id"] != source
        return
    with pytest.raises(ValueError, match="run both with the same number of steps"):
        session.run(spec)


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_the_code_of_a_patch_repeats_the_changes_of_its_source(tiny, session):
    other = dict(PLAIN, prompt="Gustav Geisser the is", interventions=[dict(what="mean", site="mlp", layer=1)])
    source = session.run(other)
    run = session.run({**PLAIN, "interventions": [dict(what="patch", site="resid", layer=2, source=source["id"])]})
    again = ran(as_selected(run["python"]["run"]), tiny)[0]
    assert same_canvases(run, again["trajectory"])
    np.testing.assert_allclose(run["confidence"], again["trajectory"].confidence[0].numpy(), atol=2e-6)


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_under_guidance_a_patch_acts_in_the_branch_of_its_cache(tiny, session):
    guided = dict(PLAIN, cfg_scale=0.7)
    source = session.run({**guided, "seed": 9})
    given = dict(what="patch", site="mlp", layer=1, source=source["id"])
    run = session.run({**guided, "interventions": [given]})
    cache = cached(tiny, {**guided, "seed": 9}, "blocks.1.hook_mlp_out")
    trajectory = denoise(tiny, guided, fwd_hooks=[("blocks.1.hook_mlp_out", on_branch(swap(cache), "conditional"))])
    assert same_canvases(run, trajectory)
    again = ran(as_selected(run["python"]["run"]), tiny)[0]
    assert torch.equal(again["trajectory"].canvases, trajectory.canvases)
    # Likeliest tokens are those after guidance.
    again = ran(as_selected(run["python"]["predictions"], step=1, position=6), tiny)[0]
    arrays = predicted_at(unpack(session.chunk(run["id"], "predictions"))[1], 1)
    p = again["p"][1, arrays["position"]]
    np.testing.assert_allclose(arrays["top_probabilities"], p.numpy(), atol=SHARE + 2e-6)


def test_views_are_those_of_the_library(tiny, session):
    run, trajectory = session.run(ASKED), denoise(tiny, PLAIN)
    for step in (3,):
        lens = logit_lens(tiny, trajectory, steps=[step], targets=torch.tensor([targets(tiny, run, trajectory)]))
        header, arrays = unpack(session.chunk(run["id"], f"lens/{step}"))
        words = run["words"] + header.get("words", [])
        assert [words[i] if i < 65535 else None for i in arrays["top_tokens"].flatten().tolist()] == [
            lens.words[token] if token >= 0 else None for token in lens.top_tokens[0, :, 0].flatten().tolist()
        ]
        np.testing.assert_array_equal(arrays["rank"], lens.target_ranks[0, :, 0, :, 0].numpy())
        np.testing.assert_allclose(arrays["probability"], lens.target_probabilities[0, :, 0, :, 0].numpy(), atol=2e-5)

        cache = cached(tiny, PLAIN, "blocks.1.attn.hook_pattern")
        _, arrays = unpack(session.chunk(run["id"], f"attention/1/{step}"))
        np.testing.assert_allclose(arrays["pattern"], cache[step]["pattern", 1][0].numpy(), atol=SHARE + 1e-6)
        again = ran(as_selected(run["python"]["attention"], step=step, layer=1, head=2), tiny)[0]
        np.testing.assert_allclose(arrays["pattern"][2], again["pattern"].numpy(), atol=SHARE + 1e-6)

    fact = Fact(PROMPT, "Gustav Geisser", ANSWER)
    settings = dict(trajectory=trajectory, noise=noise_scale(tiny, [fact.to_query(tiny)]), window=1)
    for kind in ("attn",):
        trace = trace_trajectory(tiny, fact, steps=[1], kind=kind, **settings)
        header, arrays = unpack(session.chunk(run["id"], f"trace/{kind}/1"))
        np.testing.assert_allclose(arrays["scores"], trace.scores[0].numpy(), atol=1e-6)
        assert (header["clean"], header["corrupted"]) == (
            pytest.approx(trace.clean.item(), abs=1e-6),
            pytest.approx(trace.corrupted.item(), abs=1e-6),
        )
        again = ran(as_selected(run["python"]["trace"], step=1, name=kind), tiny)[0]
        np.testing.assert_allclose(arrays["scores"], again["scores"].numpy(), atol=1e-6)
    assert [entry["lazy"] for entry in run["traces"]] == [True] * 3
    assert tiny.list_hooks() == {}


def targets(tiny, run, trajectory):
    """The answer's tokens at its positions, elsewhere the final tokens."""
    final = trajectory.tokens[0].tolist()
    answer = tiny.to_tokens(ANSWER, prepend_bos=False)[0].tolist()
    for position, token in zip(run["answer"]["positions"], answer, strict=True):
        final[position] = token
    shown = [final[position] for position in run["lens"]["positions"]]
    assert texts(run, run["lens"]["targets"]) == tiny.words(shown)
    return shown


def test_an_exception_leaves_no_hook(tiny, session):
    run = session.run(ASKED)

    def refused(message, **changes):
        with pytest.raises((ValueError, KeyError, TypeError), match=message):
            session.run({**ASKED, **changes})
        assert tiny.list_hooks() == {}

    def intervention(**entries):
        return dict(interventions=[dict(dict(what="zero", site="mlp", layer=1), **entries)])

    refused(r"at_steps was given the steps \[40\]", **intervention(steps=[40]))
    refused("positions .* outside", **intervention(positions=[40]))
    refused("layer=9 is not one of", **intervention(layer=9))
    refused("head=9 is not one of", **intervention(site="head", head=9))
    refused("'head' needs the index", **intervention(site="head"))
    refused("site='embed'", **intervention(site="embed"))
    refused("what='boost'", **intervention(what="boost"))
    refused("needs the entry .what.", interventions=[dict(site="mlp", layer=1)])
    refused("no run 'r0'", **intervention(what="patch", source="r0"))
    refused("has no entry 'laier'; the nearest is 'layer'", **intervention(laier=1))
    refused("no run 'r1'", base="r1")
    refused("unknown sampler 'confidnce'", sampler="confidnce")
    refused("steps=0", steps=0)
    refused("at most 4096 steps", steps=10**9)
    many = [dict(what="zero", site="mlp", layer=1)] * 20_000
    refused("20,000 entries; a run takes at most 128 interventions", interventions=many)
    refused("has no entry 'step'; the nearest is 'steps'", step=3)
    refused("model=1, but the session has 1", model=1)
    refused("the canvas has only 6 positions", length=6)
    refused("subject=", subject=[2, 1])
    refused(r"subject \[0, 9\] is not within", subject=[0, 9])
    refused("step=40 and position=1", interventions=[dict(what="force", step=40, position=1, token="drummer")])
    refused("step=.* must be a whole number", interventions=[dict(what="force", step="1", position=1)])
    with pytest.raises(TypeError, match="described by a JSON object"):
        session.run([])
    for name in (
        "lens/99",
        "lens",
        "trace/head/0",
        "attention/0",
        "attention/9/0",
        "predictions/0",
        "../x",
        "lens/-1",
        "lens/" + "9" * 5000,
    ):
        with pytest.raises(KeyError, match="has no chunk"):
            session.chunk(run["id"], name)
    with pytest.raises(KeyError, match="no run 'nobody'"):
        session.chunk("nobody", "lens/0")
    plain = session.run(PLAIN)
    with pytest.raises(ValueError, match="Give the answer and the subject"):
        session.chunk(plain["id"], "trace/resid/0")


@pytest.mark.parametrize("tiny", ["tiny-ar"], indirect=True)
def test_a_text_that_grows_is_changed_where_it_is_written(tiny, session):
    with pytest.raises(ValueError, match="no position is masked again"):
        session.run({**PLAIN, "interventions": [dict(what="force", step=3, position=5, token=None)]})
    with pytest.raises(ValueError, match=r"position 8 is not yet written at step 3: .* has 7 tokens there"):
        session.run({**PLAIN, "interventions": [dict(what="force", step=3, position=8, token="drummer")]})


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_what_does_not_fit_in_memory_is_computed_again(tiny):
    small, large = Session([tiny], max_bytes=1), Session([tiny])
    runs = [session.run(ASKED) for session in (small, large)]
    assert runs[0] == runs[1]
    for name in ("predictions", "lens/1", "attention/2/3"):
        first = small.chunk(runs[0]["id"], name)
        assert first == small.chunk(runs[0]["id"], name) == large.chunk(runs[1]["id"], name)
    assert small._memory.n_bytes == 0 < large._memory.n_bytes


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_requests_of_several_threads_do_not_mix(tiny):
    session, failures = Session([tiny], max_bytes=1), []
    specs = [{**PLAIN, "seed": seed, "interventions": [dict(what="zero", site="mlp", layer=seed)]} for seed in range(4)]
    alone = [Session([tiny]).run(spec) for spec in specs]

    def ask(spec, expected):
        if session.run(spec) != expected:
            failures.append(spec)

    threads = [Thread(target=ask, args=pair) for pair in zip(specs, alone, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert {run["id"] for run in session.manifest["runs"]} == {run["id"] for run in alone}


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_a_cancelled_request_computes_no_further(tiny):
    session, asked = Session([tiny]), []

    def cancelled_at(n):
        asked.clear()
        return lambda: asked.append(None) or len(asked) == n

    mean = {**PLAIN, "interventions": [dict(what="mean", site="mlp", layer=1)]}
    for spec, n in ((PLAIN, 1), (PLAIN, 4), (mean, 4)):
        with pytest.raises(RequestCancelledError):
            session.run(spec, cancelled_at(n))
        assert len(asked) == n
        assert tiny.list_hooks() == {}
    assert session.manifest["runs"] == []
    run = session.run(PLAIN)
    assert run == Session([tiny]).run(PLAIN)
    with pytest.raises(RequestCancelledError):
        session.chunk(run["id"], "lens/0", lambda: True)

    # A request that is cancelled while another computes does not wait for it.
    with ThreadPoolExecutor(1) as pool:
        waits = iter([False, True]).__next__

        def other_is_refused():
            assert isinstance(pool.submit(session.run, PLAIN, waits).exception(timeout=20), RequestCancelledError)

        at_steps_of_run = iter([None, other_is_refused])
        session.run({**PLAIN, "seed": 9}, lambda: (next(at_steps_of_run, None) or (lambda: None))())


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_the_oldest_specs_are_dropped(tiny):
    session = Session([tiny], max_runs=3)
    source = session.run({**PLAIN, "seed": 0})["id"]
    patch = [dict(what="patch", site="mlp", layer=1, source=source)]
    runs = [session.run({**PLAIN, "seed": seed, "interventions": patch})["id"] for seed in range(1, 7)]
    # The source stays while another run needs it.
    assert [run["id"] for run in session.manifest["runs"]] == [source, *runs[-2:]]
    with pytest.raises(KeyError, match=f"no run '{runs[0]}' in this session, which keeps the last 3"):
        session.chunk(runs[0], "lens/0")
    base = session.run({**PLAIN, "seed": 8, "base": runs[-1]})
    for seed in range(9, 12):
        session.run({**PLAIN, "seed": seed, "steps": 1})
    assert len(session.manifest["runs"]) == 3
    with pytest.raises(KeyError, match=f"no run '{source}'"):
        session.chunk(source, "lens/0")
    # A run that is asked for again is what it was.
    assert session.run({**base["spec"], "base": None}) == {
        **base,
        "base": None,
        "spec": {**base["spec"], "base": None},
    }


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_runs_patched_from_one_another_are_planned_once(tiny):
    session, begun = Session([tiny]), time.process_time()
    source = session.run({**PLAIN, "steps": 1})["id"]
    for _ in range(18):  # 2**18 plans, if each patch made those of its source again
        patches = [dict(what="patch", site="mlp", layer=layer, source=source) for layer in (0, 1)]
        source = session.run({**PLAIN, "steps": 1, "interventions": patches})["id"]
    assert time.process_time() - begun < 30


def test_every_placeholder_of_the_code_is_one_of_the_selection(session):
    run = session.run(ASKED)
    found = {name for code in run["python"].values() for name in re.findall(r"\{(\w+)\}", code)}
    assert found <= {"step", "layer", "head", "position", "name"}


def test_a_run_says_what_the_library_warns_of(tiny):
    session = Session([tiny])
    assert session.run({"prompt": PROMPT, "steps": 2})["warnings"] == []
    (warning,) = session.run({"prompt": "Xylo is the", "steps": 2})["warnings"]
    assert "does not know 'Xylo'" in warning
