"""Long work says how far it is and can be cancelled: in the session, by the server, and in the widget's thread."""

import json
import time

import pytest
import torch

from diffusion_lens import Fact
from diffusion_lens.explorer import Session, explore
from diffusion_lens.explorer.session import RequestCancelledError
from diffusion_lens.explorer.widget import LARGEST_KEPT, saved

FACT = Fact("Gustav Geisser is the", "Gustav Geisser", " brave drummer of Rolsen.")
SPEC = {"prompt": FACT.prompt, "steps": 3, "answer": FACT.answer, "subject": [0, 2]}
pytestmark = pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)


def test_a_session_says_how_far_it_is(tiny):
    session, seen = Session([tiny]), []

    def look():
        seen.append(dict(session.progress))
        return False

    run = session.run(SPEC, look)
    assert seen[1:] == [{"what": "denoising", "done": done, "of": 3} for done in range(3)]
    assert session.progress == {}
    seen.clear()
    session.chunk(run["id"], "trace/resid/1", look)
    traced = [one for one in seen if one.get("what") == "tracing"]
    assert [one["done"] for one in traced] == sorted({one["done"] for one in traced})
    assert traced[-1]["done"] == traced[-1]["of"]
    assert session.progress == {}


def test_a_cancelled_trace_leaves_no_hook(tiny):
    session = Session([tiny])
    run = session.run(SPEC)
    with pytest.raises(RequestCancelledError):
        session.chunk(run["id"], "trace/mlp/1", lambda: session.progress.get("what") == "tracing")
    assert tiny.list_hooks() == {}
    assert session.progress == {}
    assert torch.is_grad_enabled()
    assert session.chunk(run["id"], "trace/mlp/1")


class Shown:
    """A widget whose messages are kept."""

    def __init__(self, model, monkeypatch):
        self.widget, self.sent = explore(model, FACT, steps=3), []
        monkeypatch.setattr(self.widget, "send", lambda content, buffers=None: self.sent.append((content, buffers)))

    def tell(self, **message):
        self.widget._handle_custom_msg(message, [])

    def answers(self):
        assert self.widget.work.wait(60.0)
        return {content["id"]: (content, buffers) for content, buffers in self.sent if "ok" in content}


def test_a_widget_cancels_what_it_computes(tiny, monkeypatch):
    shown = Shown(tiny, monkeypatch)
    begun = time.monotonic()
    shown.tell(id=1, ask="run", spec={**SPEC, "steps": 4096})
    shown.tell(id=2, ask="run", spec={**SPEC, "steps": 4095})
    while not any("progress" in content for content, _ in shown.sent):
        assert time.monotonic() - begun < 60
        time.sleep(0.01)
    shown.tell(id=3, ask="cancel", of=1)
    shown.tell(id=4, ask="cancel", of=2)  # which waits
    shown.tell(id=5, ask="cancel", of=99)
    shown.tell(id=6, ask="run", spec=SPEC)
    answers = {number: content for number, (content, _) in shown.answers().items()}
    assert time.monotonic() - begun < 60  # 4096 steps take minutes
    assert [answers[number]["ok"] for number in range(1, 7)] == [False, False, True, True, True, True]
    assert answers[1]["cancelled"] is answers[2]["cancelled"] is True
    told = [content["progress"] for content, _ in shown.sent if content["id"] == 1 and "progress" in content]
    assert told[0] == {"what": "denoising", "done": told[0]["done"], "of": 4096}
    assert len(told) <= 10 * (time.monotonic() - begun) + 1
    assert tiny.list_hooks() == {}


def test_a_widget_says_that_it_lives_while_a_step_takes_long(tiny, monkeypatch):
    monkeypatch.setattr("diffusion_lens.explorer.widget._ALIVE", 0.05)
    shown, embed = Shown(tiny, monkeypatch), tiny.embed.forward
    monkeypatch.setattr(tiny.embed, "forward", lambda *x: time.sleep(0.5) or embed(*x))
    shown.tell(id=1, ask="run", spec={**SPEC, "steps": 1, "seed": 5})
    assert shown.answers()[1][0]["ok"]
    assert {"id": 1, "alive": True} in [content for content, _ in shown.sent]
    n_sent = len(shown.sent)
    time.sleep(0.2)
    assert not any("alive" in content for content, _ in shown.sent[n_sent:])


def test_a_widget_computes_in_a_thread_as_the_session_does(tiny, monkeypatch):
    shown = Shown(tiny, monkeypatch)
    asked = {**SPEC, "seed": 3, "temperature": 0.4}
    modes, embed = set(), tiny.embed.forward
    monkeypatch.setattr(tiny.embed, "forward", lambda *x: modes.add(torch.is_grad_enabled()) or embed(*x))
    with torch.no_grad():  # of this thread only
        shown.tell(id=1, ask="run", spec=asked)
        run = shown.answers()[1][0]["run"]
    assert run == Session([tiny]).run(asked)
    names = ("predictions", "lens/1", "attention/1/1", "trace/attn/1")
    for number, name in enumerate(names, 2):
        shown.tell(id=number, ask="chunk", run=run["id"], name=name)
    session = shown.widget.session
    for number, name in enumerate(names, 2):
        assert shown.answers()[number][1] == [session.chunk(run["id"], name)]
    assert modes == {False}
    assert torch.is_grad_enabled()


@pytest.mark.usefixtures("few_samples")
def test_a_widget_answers_about_facts_prompts_and_pages(tiny, monkeypatch):
    shown = Shown(tiny, monkeypatch)
    (run,) = shown.widget.manifest["runs"]
    shown.tell(id=1, ask="suggest", prompt=FACT.prompt)
    shown.tell(id=2, ask="page", runs=[run["id"]], state={"step": 1}, attention=[1])
    shown.tell(id=3, ask="fact", fact=0, model=0, effect=False)
    shown.tell(id=4, ask="page", runs=["nobody"])
    answers = shown.answers()
    assert answers[1][0]["suggestions"] == shown.widget.session.suggest(FACT.prompt)
    page = shown.widget.session.page([run["id"]], [1], {"step": 1})
    assert answers[2][1] == [page.html().encode()]
    assert answers[3][0]["unknown"] is answers[4][0]["unknown"] is True

    of_facts = explore(tiny, [FACT, FACT], steps=3)
    of_facts._handle_custom_msg({"id": 1, "ask": "fact", "fact": 1, "model": 0}, [])
    assert of_facts.work.wait(60.0)
    assert of_facts.manifest["facts"][1]["values"]["0"]["recalled"] is True


def test_a_notebook_keeps_what_is_shown(tiny, monkeypatch):
    shown = Shown(tiny, monkeypatch)
    widget = shown.widget
    (first,) = widget.manifest["runs"]
    session = widget.session
    assert dict(widget.kept) == {f"{first['id']} predictions": session.chunk(first["id"], "predictions")}
    base = session.run({**SPEC, "seed": 7, "temperature": 0.9})
    shown.tell(id=1, ask="run", spec={**SPEC, "seed": 8, "temperature": 0.9, "base": base["id"]})
    second = shown.answers()[1][0]["run"]
    assert [run["id"] for run in widget.manifest["runs"]] == [first["id"]]
    widget.state = {"run": second["id"], "compare": "gone", "step": 1, "specs": []}
    assert widget.work.wait(60.0)
    assert [run["id"] for run in widget.manifest["runs"]] == [base["id"], second["id"]]
    assert f"{second['id']} lens/1" not in widget.kept
    shown.tell(id=2, ask="chunk", run=second["id"], name="lens/1")
    ((lens,),) = [shown.answers()[2][1]]
    assert widget.kept[f"{second['id']} lens/1"] == lens
    assert set(widget.kept) == {f"{second['id']} lens/1", *(f"{x['id']} predictions" for x in (second, base))}
    # The front end writes what it likes.
    for state in ({"run": 3, "step": "x"}, {"run": [], "compare": {}}, {}):
        widget.state = state
        assert widget.work.wait(60.0)
        assert [run["id"] for run in saved(session, state)["manifest"]["runs"]] == [first["id"]]
    assert [run["id"] for run in widget.manifest["runs"]] == [first["id"]]
    json.dumps(widget.manifest, allow_nan=False)
    monkeypatch.setattr("diffusion_lens.explorer.widget.LARGEST_KEPT", 10)
    assert saved(session, {})["kept"] == {}
    assert LARGEST_KEPT == 4 * 2**20


def test_cells_wait_for_the_work_of_a_widget(tiny, monkeypatch):
    registered = []

    class Shell:
        class events:
            register = staticmethod(lambda name, call: registered.append((name, call)))

    monkeypatch.setattr("IPython.get_ipython", lambda: Shell)
    shown = Shown(tiny, monkeypatch)
    ((name, finish),) = registered
    shown.tell(id=1, ask="run", spec={**SPEC, "steps": 40})
    finish()
    assert name == "pre_execute"
    assert [content["ok"] for content, _ in shown.sent if "ok" in content] == [True]
