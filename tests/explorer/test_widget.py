"""The widget answers the browser's messages, and `explore` writes the same numbers to a file."""

import pytest
import torch
from page_reader import PageFile, unpack

from diffusion_lens import Fact, load_pair
from diffusion_lens.analysis import logit_lens
from diffusion_lens.explorer import Session, Spec, explore
from diffusion_lens.explorer.widget import answer

FACT = Fact("Gustav Geisser is the", "Gustav Geisser", " brave drummer of Rolsen.")


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_messages_are_answered(tiny, monkeypatch):
    shown = explore(tiny, FACT, steps=3)
    (run,) = shown.manifest["runs"]
    assert (shown.live, run["spec"]["answer"], run["spec"]["subject"]) == (True, FACT.answer, [0, 2])
    assert "mountFile" in shown._esm
    sent = []
    monkeypatch.setattr(shown, "send", lambda content, buffers=None: sent.append((content, buffers)))

    def ask(**message):
        sent.clear()
        shown._handle_custom_msg(message, [])
        assert shown.work.wait(20.0)
        ((content, buffers),) = [one for one in sent if "ok" in one[0]]
        return content, buffers

    content, (chunk,) = ask(id=7, ask="chunk", run=run["id"], name="lens/1")
    assert content == {"id": 7, "ok": True}
    assert unpack(chunk)[1]["entropy"].shape == (5, 14)
    content, buffers = ask(id=8, ask="run", spec={**run["spec"], "seed": 3, "base": run["id"]})
    assert (content["id"], content["ok"], buffers) == (8, True, [])
    assert content["run"]["base"] == run["id"]
    assert ask(id=9, ask="run", spec={"steps": 0})[0] == {
        "id": 9,
        "ok": False,
        "error": "steps=0; it must be at least 1",
    }
    assert "no run 'x'" in ask(id=10, ask="chunk", run="x", name="lens/0")[0]["error"]
    assert "must be one of 'run', 'fact', 'suggest'" in ask(id=11)[0]["error"]


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_any_message_is_answered(tiny):
    sent = []
    for message in (None, [], "run", {"ask": "run", "spec": 3}, {"ask": "chunk"}):
        answer(Session([tiny]), message, lambda content, buffers: sent.append(content["ok"]))
    assert sent == [False] * 5


@pytest.mark.usefixtures("few_samples")
def test_a_file_contains_the_runs_of_a_pair(tmp_path):
    pair = load_pair("tiny-mdm")
    path = explore(pair, FACT, tmp_path / "pair.html", steps=2, sampler="ancestral", attention=[1])
    page = PageFile(path.read_text(encoding="utf-8"))
    assert [model["name"] for model in page.manifest["models"]] == ["tiny-mdm", "tiny-ar"]
    assert [run["model"] for run in page.manifest["runs"]] == [0, 1]
    for index, model in enumerate(pair):
        run = page.run(index)
        sampler = None if model.cfg.is_autoregressive else "ancestral"
        trajectory = model.denoise(FACT.prompt, steps=2, sampler=sampler)
        assert run["text"] == trajectory.text[0]
        assert (run["spec"], run["attention"]["layers"]) == (None, [1])
        lens = logit_lens(model, trajectory, steps=[1])
        _, arrays = page.read("lens/1", index)
        torch.testing.assert_close(
            torch.tensor(arrays["entropy"]).float(), lens.entropy[0, :, 0].float(), equal_nan=True, rtol=1e-4, atol=1e-5
        )
        assert {name.split("/")[0] for id_, name in page.chunks if id_ == run["id"]} == {
            "predictions",
            "lens",
            "attention",
            "trace",
        }
        assert {trace["kind"] for trace in run["traces"]} == {"resid", "mlp", "attn"}
        for trace in run["traces"]:
            header, _ = page.read(f"trace/{trace['name']}/{trace['steps'][0]}", index)
            assert header["highest"] is not None


@pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)
def test_bad_requests_are_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"should end in \.html"):
        explore(tiny, FACT, tmp_path / "page.txt")
    with pytest.raises(TypeError, match="unexpected keyword argument 'stepz'"):
        explore(tiny, FACT, tmp_path / "page.html", stepz=3)
    without = explore(tiny, FACT.prompt, tmp_path / "page.html", steps=1)
    assert PageFile(without.read_text(encoding="utf-8")).run()["missing"]["trace"].startswith("Give a Fact")
    without.unlink()
    with pytest.raises(ValueError, match="attention takes"):
        explore(
            tiny, Spec(prompt=FACT.prompt), tmp_path / "page.html", attention=[0, 1, 2, 3], max_bytes=10_000, steps=2
        )
    with pytest.raises(ValueError, match="attention="):
        explore(tiny, FACT.prompt, tmp_path / "page.html", attention=[4], steps=2)
    assert list(tmp_path.iterdir()) == []
