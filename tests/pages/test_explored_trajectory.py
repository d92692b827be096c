"""A trajectory's page contains the numbers of the results that it was given, and code that gives them again."""

import re
from html import unescape

import numpy as np
import pytest
import torch
from page_reader import PageFile, as_selected, predicted_at, ran

from diffusion_lens import Fact
from diffusion_lens.analysis import causal_trace, logit_lens, trace_trajectory
from diffusion_lens.denoising import TrajectoryCache
from diffusion_lens.denoising.samplers import Confidence, Proposal
from diffusion_lens.interventions import zero_ablate

FACT = Fact("Gustav Geisser is the", "Gustav Geisser", " brave drummer of Rolsen.")
STEPS = 5
SHARE = 0.51 / 65534


def names(name):
    return name.endswith("hook_pattern") or name == "denoise.hook_logits"


@pytest.fixture(scope="module")
def made(tiny):
    """A run, and everything that its page can show."""
    run, cache = tiny.denoise_with_cache(FACT.prompt, names, steps=STEPS, seed=3)
    lens = logit_lens(tiny, run, top_k=4)
    settings = dict(trajectory=run, noise=0.5, samples=2)
    traces = [
        trace_trajectory(tiny, FACT, **settings),
        trace_trajectory(tiny, FACT, **settings, kind="mlp", window=2, seed=5),
    ]
    results = dict(lens=lens, trace=traces, attention=cache, predictions=run.predictions(tiny))
    return dict(run=run, cache=cache, lens=lens, traces=traces, results=results)


@pytest.fixture(scope="module")
def page(made, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "run.html"
    assert made["run"].explore(path, **made["results"]) == path
    return PageFile(path.read_text(encoding="utf-8"))


def test_without_a_path_the_same_page_shows_itself(made, page):
    shown = made["run"].explore(**made["results"])
    (frame,) = re.findall(r'^<iframe title="[^"]+" srcdoc="([^"]+)"', shown._repr_html_())
    assert PageFile(unescape(frame)).run() == page.run()


def test_canvases_have_the_order_and_the_confidence(made, page):
    run, shown = made["run"], page.run()
    assert shown["steps"] == list(range(run.n_steps + 1))
    for canvas, words in zip(run.canvases[:, 0].tolist(), page.texts(shown["canvases"]), strict=True):
        assert words == [None if token == run.blank else run.words[token] for token in canvas]
    assert shown["revealed_at"] == run.revealed_at[0].tolist()
    assert shown["given"] == run.given[0].tolist()
    np.testing.assert_allclose(shown["confidence"], run.confidence[0].numpy(), atol=1e-6)
    assert (shown["prompt"], shown["text"]) == (FACT.prompt, run.text[0])
    assert shown["missing"] == {}
    assert page.manifest["models"][0]["grows"] is (run.blank == -1)


def test_the_lens_is_that_of_the_result(made, page):
    lens = made["lens"]
    assert page.run()["lens"]["labels"] == lens.labels
    assert page.texts(page.run()["lens"]["targets"]) == [lens.words[token] for token in lens.targets[0, :, 0].tolist()]
    for i, step in enumerate(lens.steps):
        _, arrays = page.read(f"lens/{step}")
        for layer in range(len(lens.layers)):
            tokens = lens.top_tokens[i, layer, 0].tolist()
            words = [[lens.words[t] if t >= 0 else None for t in top] for top in tokens]
            assert page.texts(arrays["top_tokens"][layer]) == words
        for name, table in (("top_probabilities", lens.top_probabilities), ("probability", lens.target_probabilities)):
            expected = table[i, :, 0] if name == "top_probabilities" else table[i, :, 0, :, 0]
            np.testing.assert_allclose(arrays[name], expected.numpy(), atol=SHARE)
        np.testing.assert_array_equal(arrays["entropy"].astype(np.float32), lens.entropy[i, :, 0].numpy())
        np.testing.assert_array_equal(arrays["rank"], lens.target_ranks[i, :, 0, :, 0].numpy())


def test_attention_and_traces_are_those_of_the_results(made, page):
    cache, run = made["cache"], made["run"]
    shown = page.run()["attention"]
    assert (shown["layers"], shown["steps"], shown["n_heads"]) == ([0, 1, 2, 3], list(cache.steps), 4)
    for layer in shown["layers"]:
        for step in shown["steps"]:
            _, arrays = page.read(f"attention/{layer}/{step}")
            np.testing.assert_allclose(arrays["pattern"], cache[step]["pattern", layer][0].numpy(), atol=0.51 / 254)
    for trace, entry in zip(made["traces"], page.run()["traces"], strict=True):
        assert (entry["name"], entry["steps"], entry["clean"]) == (
            trace.record["kind"],
            trace.steps,
            trace.clean.tolist(),
        )
        for i, step in enumerate(trace.steps):
            header, arrays = page.read(f"trace/{entry['name']}/{step}")
            np.testing.assert_array_equal(arrays["scores"].astype(np.float32), trace.scores[i].numpy())
            assert header["corrupted"] == trace.corrupted[i].item()
    answer = page.run()["answer"]
    assert page.texts(answer["words"]) == traces_answer(made)
    assert all(not run.given[0, position] for position in answer["positions"])


def traces_answer(made):
    return made["traces"][0].record["answer"]


def test_predictions_follow_from_the_loops_logits(made, page):
    run, cache = made["run"], made["cache"]
    for step in page.run()["predictions"]["steps"]:
        arrays = predicted_at(page.read("predictions")[1], step)
        masked = run.is_masked(run.canvases[step, 0])
        if run.blank == -1:  # a text that grows proposes the next token only
            masked = masked & (masked.cumsum(0) == 1)
        assert arrays["position"].tolist() == masked.nonzero().flatten().tolist()
        p = cache[step]["denoise.hook_logits"][0, masked].double().softmax(-1)
        np.testing.assert_allclose(arrays["entropy"], torch.special.entr(p).sum(-1).numpy(), rtol=1e-5, atol=2e-6)
        if run.blank != -1 and run.blank < p.shape[-1]:
            p[:, run.blank] = 0
        np.testing.assert_allclose(arrays["top_probabilities"], p.topk(5).values.numpy(), atol=SHARE)
        for position, _, words, shares in zip(*arrays.values(), strict=True):
            if run.revealed_at[0, position] == step:
                assert page.texts(words)[0] == run.words[int(run.tokens[0, position])]
                assert shares[0] == pytest.approx(float(run.confidence[0, position]), abs=SHARE + 1e-6)


def test_the_code_gives_the_numbers_that_are_shown(tiny, made, page):
    code, run, step, position = page.run()["python"], made["run"], 2, 6
    again, _ = ran(as_selected(code["canvas"], step=step), tiny)
    assert torch.equal(again["trajectory"].canvases, run.canvases)
    assert again["words"] == run.str_canvases()[step + 1]

    lens, printed = ran(as_selected(code["lens"], step=step, position=position), tiny)
    _, arrays = page.read(f"lens/{step}")
    np.testing.assert_allclose(lens["lens"].entropy[:, 0].numpy(), arrays["entropy"], rtol=1e-5)
    assert len(printed.splitlines()) == 5

    attention, _ = ran(as_selected(code["attention"], step=step, layer=1, head=3), tiny)
    _, arrays = page.read(f"attention/1/{step}")
    np.testing.assert_allclose(attention["pattern"].numpy(), arrays["pattern"][3], atol=0.51 / 254)

    arrays = predicted_at(page.read("predictions")[1], step)
    masked = arrays["position"].tolist()
    predicted, printed = ran(as_selected(code["predictions"], step=step, position=masked[0]), tiny)
    np.testing.assert_allclose(predicted["p"][step, masked].numpy(), arrays["top_probabilities"], atol=SHARE + 1e-6)
    np.testing.assert_allclose(predicted["entropy"][step, masked].numpy(), arrays["entropy"], atol=2e-6)
    assert predicted["committed"].tolist() == page.run()["predictions"]["committed"]
    assert repr(page.texts(arrays["top_tokens"])[0][0]) in printed

    for name in ("resid", "mlp"):
        step = page.run()["traces"][0]["steps"][-1]
        trace, _ = ran(as_selected(code["trace"], step=step, name=name), tiny)
        _, arrays = page.read(f"trace/{name}/{step}")
        np.testing.assert_allclose(trace["scores"].numpy(), arrays["scores"], atol=1e-6)


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_the_trace_of_one_canvas_is_shown_at_its_step(tiny, made, tmp_path):
    trace = causal_trace(tiny, FACT, noise=0.5, samples=2, layers=[1, 3], positions=[0, 2])
    page = PageFile(made["run"].explore(tmp_path / "page.html", trace=trace).read_text(encoding="utf-8"))
    (entry,) = page.run()["traces"]
    assert (entry["steps"], entry["layers"], entry["positions"]) == ([0], [1, 3], [0, 2])
    header, arrays = page.read("trace/resid/0")
    np.testing.assert_array_equal(arrays["scores"].astype(np.float32), trace.scores.numpy())
    assert (header["clean"], header["corrupted"]) == (trace.clean, trace.corrupted)
    again, _ = ran(as_selected(page.run()["python"]["trace"], step=0, name="resid"), tiny)
    torch.testing.assert_close(again["scores"], trace.scores)


def test_without_results_the_page_says_what_to_pass(made, tmp_path):
    page = PageFile(made["run"].explore(tmp_path / "plain.html").read_text(encoding="utf-8"))
    assert page.chunks == {}
    assert {view: page.run()[view] for view in ("lens", "attention", "predictions")} == dict.fromkeys(
        ("lens", "attention", "predictions")
    )
    assert set(page.run()["missing"]) == {"predictions", "lens", "attention", "trace"}
    assert "denoise(..., predictions=5)" in page.run()["missing"]["predictions"]
    assert "lens=logit_lens(model, trajectory)" in page.run()["missing"]["lens"]
    assert page.requests() == []


def test_logits_give_no_predictions_any_more(made):
    with pytest.deprecated_call(match=r"pass predictions=trajectory\.predictions\(model, top_k=5\)"):
        shown = made["run"].explore(logits=made["cache"])
    assert shown.runs[0].entry["predictions"] is None


def test_without_guidance_a_lens_of_the_last_layer_gives_the_predictions(made, page, tmp_path):
    alone = PageFile(made["run"].explore(tmp_path / "lens.html", lens=made["lens"]).read_text(encoding="utf-8"))
    run, step = made["run"], 3
    arrays, others = (predicted_at(x.read("predictions")[1], step) for x in (alone, page))
    assert set(arrays["position"].tolist()) >= set(others["position"].tolist())
    for position, _, words, shares in zip(*arrays.values(), strict=True):
        if run.revealed_at[0, position] == step:
            assert alone.texts(words)[0] == run.words[int(run.tokens[0, position])]
            assert shares[0] == pytest.approx(float(run.confidence[0, position]), abs=1e-4)


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_code_of_other_settings_repeats_the_run(tiny, tmp_path):
    """Guidance, a sampler with settings, a batch with padding and infilling."""
    sampler = Confidence(scope="row", proposal=Proposal(score="margin", top_k=4))
    texts = ["Gustav Geisser is the", "Gustav Geisser is"]
    settings = dict(length=11, steps=4, temperature=0.7, seed=9, cfg_scale=0.5, sampler=sampler)
    for run in (tiny.denoise(texts, max_new_tokens=6, **{**settings, "length": None}), tiny.denoise(texts, **settings)):
        page = PageFile(run.explore(tmp_path / "page.html", row=1).read_text(encoding="utf-8"))
        again, _ = ran(page.run()["python"]["run"], tiny)
        assert torch.equal(again["trajectory"].canvases[:, 0], run.canvases[:, 1])
    later = run.from_step(2)
    page = PageFile(later.explore(tmp_path / "page.html", row=-1).read_text(encoding="utf-8"))
    again, _ = ran(as_selected(page.run()["python"]["canvas"], step=3), tiny)
    assert again["canvas"].tolist() == run.canvases[4, 1].tolist()
    assert page.run()["steps"] == [2, 3, 4]
    assert page.run()["times"] == pytest.approx([0.5, 0.25, 0.0], abs=1e-4)


@pytest.mark.parametrize("tiny", ["tiny-ar"], indirect=True)
def test_code_of_a_shorter_row_writes_as_many_tokens(tiny, tmp_path):
    run = tiny.denoise(["Gustav Geisser is the", "Gustav Geisser is"], max_new_tokens=4)
    page = PageFile(run.explore(tmp_path / "page.html", row=1).read_text(encoding="utf-8"))
    again, _ = ran(page.run()["python"]["run"], tiny)
    assert torch.equal(again["trajectory"].canvases[:, 0], run.canvases[:, 1, run.real[1]])


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_a_run_under_hooks_is_read_from_its_file(tiny, tmp_path, monkeypatch):
    run = tiny.denoise(FACT.prompt, steps=4, fwd_hooks=[("blocks.1.hook_attn_out", zero_ablate())])
    page = PageFile(run.explore(tmp_path / "page.html").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    run.save("trajectory.safetensors")
    again, _ = ran(page.run()["python"]["run"], tiny)
    assert torch.equal(again["trajectory"].canvases, run.canvases)


def test_results_of_another_run_are_refused(tiny, made, tmp_path):
    run, cache = made["run"], made["cache"]
    other = tiny.denoise("Gustav Geisser the is", steps=STEPS, seed=3)
    hooks = [("blocks.1.hook_attn_out", zero_ablate())]
    first = cache[0]["pattern", 0]

    def refused(message, **results):
        with pytest.raises(ValueError, match=message):
            run.explore(tmp_path / "page.html", **results)

    refused("other canvases than those of row 0", lens=logit_lens(tiny, other))
    guided = tiny.denoise(FACT.prompt, steps=2, cfg_scale=0.5) if tiny.cfg.has_mask else None
    if guided is not None:
        with pytest.raises(ValueError, match="the lens read the unconditional branch"):
            guided.explore(tmp_path / "page.html", lens=logit_lens(tiny, guided, branch="unconditional"))
    refused("input that is no trajectory", lens=logit_lens(tiny, FACT.prompt))
    refused("lens is of another network .*hooks: blocks.1.hook_attn_out", lens=logit_lens(tiny, run, fwd_hooks=hooks))
    elsewhere = Fact("Gustav Geisser the is", FACT.subject, FACT.answer)
    refused("none of the trajectory's", trace=causal_trace(tiny, elsewhere, noise=0.5, samples=1))
    with tiny.hooks(fwd_hooks=hooks), pytest.warns(UserWarning, match="another network"):
        hooked = trace_trajectory(tiny, FACT, trajectory=run, noise=0.5, samples=1)
    refused("trace is of another network", trace=hooked)
    refused("pattern", attention=TrajectoryCache({0: {"hook_embed": torch.zeros(1, 14, 8)}}, run.n_steps))
    refused("is of a run of 99 steps", attention=TrajectoryCache({0: {"blocks.0.attn.hook_pattern": first}}, 99))
    short = TrajectoryCache({0: {"blocks.0.attn.hook_pattern": first[:, :, :3]}}, run.n_steps)
    refused(r"pos_slice must be left out", attention=short)
    refused("row=1, but the trajectory has 1 rows", row=1)
    refused("max_bytes is 9,000: .*attention takes", attention=cache, max_bytes=9000)
    patterns = tiny.denoise_with_cache("Gustav Geisser the is", "blocks.0.attn.hook_pattern", steps=STEPS, seed=3)[1]
    saved = TrajectoryCache.load(patterns.save(tmp_path / "cache.safetensors"))
    refused("attention= is of another run", attention=saved)
    (tmp_path / "cache.safetensors").unlink()
    with pytest.raises(ValueError, match=r"should end in \.html"):
        run.explore(tmp_path / "page.txt")
    assert list(tmp_path.iterdir()) == []


def test_a_large_run_stays_small(tmp_path):
    """A run of 52 positions, 32 steps and 20 layers with five tokens a cell, whose numbers do not compress."""
    from dataclasses import replace

    from diffusion_lens import HookedDiffusionTransformer

    tiny = HookedDiffusionTransformer.from_pretrained("tiny-mdm")
    run = tiny.denoise(FACT.prompt, length=14, steps=2)
    lens = logit_lens(tiny, run, top_k=5)
    n_steps, n_layers, n_pos = 32, 20, 52
    generator = torch.Generator().manual_seed(0)

    def rand(*tail):
        return torch.rand(n_steps, n_layers, 1, n_pos, *tail, generator=generator)

    tokens = torch.randint(0, 438, (n_steps + 1, 1, n_pos), generator=generator)
    words = {token: f" word{token}" for token in range(439)}
    wide = dict(given=torch.zeros(1, n_pos).bool(), real=torch.ones(1, n_pos).bool(), words=words)
    large_run = replace(
        run,
        tokens=tokens[-1],
        canvases=tokens,
        revealed_at=tokens[-1] % n_steps,
        revealed_before=torch.full((1, n_pos), -1),
        confidence=torch.rand(1, n_pos),
        record={**run.record, "times": [0.0] * (n_steps + 1)},
        **wide,
    )
    large_lens = replace(
        lens,
        top_tokens=torch.randint(0, 438, (n_steps, n_layers, 1, n_pos, 5), generator=generator),
        top_probabilities=rand(5),
        entropy=rand(),
        kl=rand(),
        target_ranks=torch.randint(0, 438, (n_steps, n_layers, 1, n_pos, 1), generator=generator),
        target_probabilities=rand(1),
        targets=tokens[-1][..., None],
        tokens=tokens[:-1],
        positions=list(range(n_pos)),
        layers=list(range(n_layers)),
        labels=[f"{layer}_pre" for layer in range(n_layers)],
        steps=list(range(n_steps)),
        words=words,
    )
    assert large_run.explore(tmp_path / "large.html", lens=large_lens).stat().st_size < 3_000_000
