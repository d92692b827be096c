"""`explore`: the explorer of a model, as a file or as a widget in a notebook.

The widget computes beside the kernel, and keeps what it shows in the notebook's file.

The module in the browser sends messages {id, ask, ...}:

    ask       also                         answer
    run       spec                         {id, ok: true, run}
    fact      fact: its id, model, effect  {id, ok: true, fact}
    suggest   prompt                       {id, ok: true, suggestions: {subjects, answers}}
    chunk     run, name                    {id, ok: true}, with the chunk as a buffer
    page      runs, state, attention, facts {id, ok: true}, with the HTML as a buffer
    cancel    of: the id of a message      {id, ok: true}; the message `of` is answered with `cancelled`

Work is done in a thread, one message after the other, so that a message that cancels is read meanwhile. While one is
worked on, {id, progress: {what, done, of}} is sent at most ten times a second, and {id, alive: true} every few seconds,
which tells a long step from a kernel that has gone. An error is {id, ok: false, error}, with unknown: true where there
is no such run, chunk or fact, and cancelled: true where the message was cancelled.

Hooks of the explorer are attached to the model while it computes, so a cell that is run meanwhile waits until it has
finished.

The widget requires the extra `explore`.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread, Timer
from typing import Any

from diffusion_lens.explorer.prompts import first_specs
from diffusion_lens.explorer.session import Cancelled, RequestCancelledError, Session, never
from diffusion_lens.explorer.spec import PageRequest, Spec, SuggestionRequest
from diffusion_lens.facts.fact import Fact
from diffusion_lens.hooked_diffusion_transformer import HookedDiffusionTransformer
from diffusion_lens.pages.page import LARGEST_PAGE, explorer_files, html_path, write_page
from diffusion_lens.settings import Whole, whole_numbers

Models = HookedDiffusionTransformer | Sequence[HookedDiffusionTransformer]


def explore(
    model: Models,
    prompt: str | Fact | Spec | Sequence[Fact],
    path: str | Path | None = None,
    *,
    results: Any = (),
    attention: Iterable[Whole] = (),
    state: Mapping[str, Any] | None = None,
    max_bytes: int = LARGEST_PAGE,
    **settings: Any,
) -> Any:
    """Explore a run of a prompt: canvases, likeliest tokens, logit lens, attention and causal traces by step.

    Without a path, in a notebook, this is a widget that computes what is looked at, and new runs: with other settings,
    with a token forced or masked again, or with heads, MLPs and states changed. With a path it is an HTML file that
    contains the numbers and needs neither a network nor the model.

    Args:
        model: A model, or several to compare, such as `load_pair("site-mdm")`.
        prompt: Text; a `Fact`, whose subject and answer are then traced; a `Spec`; or several facts, of which the first
            is shown and all are in a table. A file contains the canvas of each.
        path: File to write, ending in .html.
        results: Saved results of a study of these facts, a `Recall` or an `AverageEffect` or several, which fill in the
            table.
        attention: Layers whose patterns a file contains, at every step. A widget computes any.
        state: What a file shows at first, as the front end writes it.
        max_bytes: Largest size of a file; a larger one is refused.
        settings: Settings of the runs as in `denoise`: length, steps (one for each position to write by default, 16 at
            most), sampler, cfg_scale, temperature, seed.

    Returns:
        The widget, or the path.

    Raises:
        ValueError: A setting that does not fit the model, results of other facts, or a page that is too large.
        TypeError: An unknown setting.
    """
    if path is not None:
        html_path(path)
    models = [model] if isinstance(model, HookedDiffusionTransformer) else list(model)
    facts = [] if isinstance(prompt, str | Fact | Spec) else list(prompt)
    if not isinstance(prompt, str | Fact | Spec):
        if not facts:
            raise ValueError("there is no fact to explore: the list is empty")
        prompt = facts[0]
    given = results if isinstance(results, list | tuple) else [results]
    session = Session(models, facts=facts, results=given, settings=settings)
    runs = [session.run(spec) for spec in first_specs(models, prompt, **settings)]
    if path is None:
        return widget(session)
    compute_facts(session)
    page = session.page([run["id"] for run in runs], whole_numbers("attention", attention), state)
    return write_page(page, path, max_bytes)


def compute_facts(session: Session) -> None:
    """Compute the run of every fact of a session's table on every model; the table says why there is none."""
    for index in range(len(session.table.facts)):
        for model in range(len(session.models)):
            try:
                session.fact({"id": index, "model": model})
            except ValueError as error:
                session.table.fail(index, model, error)


Send = Callable[[dict[str, Any], list[bytes]], None]
LARGEST_KEPT = 4 * 2**20  # bytes
_MOMENT = 0.1  # seconds between two messages with progress
_ALIVE = 5.0  # seconds between two signs of life; the browser gives up after four of them without one
_QUIET = 1.0  # seconds without a change after which the notebook takes it over
SHOWN = ("run", "compare", "step")  # entries of the state on which it depends what the notebook keeps
ASKS = ("run", "fact", "suggest", "chunk", "page")


def widget(session: Session) -> Any:
    """The widget of a session, an `anywidget.AnyWidget`; Jupyter shows it where it is the last value of a cell.

    A notebook that is saved with the state of its widgets contains three traits, from which the front end draws without
    a kernel:

        manifest  as of a page, with the runs that are shown, those with the ids `state["run"]` and `state["compare"]`,
                  or else the first one of each model; and those with which they are compared
        state     what is shown, which the front end writes
        kept      the chunks of these runs by "{run} {name}": predictions, and the lens at `state["step"]` where it was
                  asked for, at most 4 MB together

    `manifest` and `kept` are set anew a second after something was computed or these entries of `state` have changed,
    since a notebook takes over the whole of a trait.
    """
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise ImportError("the widget needs anywidget: pip install 'diffusion-lens[explore]'") from error
    module, style = explorer_files()

    class Explorer(anywidget.AnyWidget):
        """The explorer of a session."""

        _esm = module
        _css = style
        manifest = traitlets.Dict().tag(sync=True)
        live = traitlets.Bool(True).tag(sync=True)
        state = traitlets.Dict().tag(sync=True)
        kept = traitlets.Dict().tag(sync=True)

        def __init__(self) -> None:
            self.session = session
            self.work = Work(session, lambda content, buffers: self.send(content, buffers), self.keep)
            super().__init__(**saved(session, {}))
            self.on_msg(lambda _, message, buffers: self.work.take(message))
            self.observe(self.state_changed, "state")

        def keep(self) -> None:
            """Set the traits that the notebook keeps."""
            for name, value in saved(session, self.state).items():
                setattr(self, name, value)

        def state_changed(self, change: Any) -> None:
            """Keep what is shown now."""
            if any(_of(change.old, name) != _of(change.new, name) for name in SHOWN):
                self.work.soon()

        def close(self) -> None:
            self.work.cancel()
            super().close()

        def __repr__(self) -> str:
            return f"Explorer({session.title})"

    return Explorer()


def saved(session: Session, state: Any) -> dict[str, Any]:
    """The traits `manifest` and `kept` for a state of the front end."""
    ids = [_of(state, name) for name in ("run", "compare")]
    manifest = session.described(shown=[run for run in ids if isinstance(run, str)])
    runs = manifest["runs"]
    names = ["predictions", f"lens/{_of(state, 'step')}"]
    kept: dict[str, bytes] = {}
    for name, run in ((name, run) for name in names for run in runs):
        chunk = session.kept_chunk(run["id"], name)
        if chunk is not None and sum(map(len, kept.values())) + len(chunk) <= LARGEST_KEPT:
            kept[f"{run['id']} {name}"] = chunk
    return {"manifest": manifest, "kept": kept}


class Work:
    """Answers messages of the browser in a thread, one after the other.

    Args:
        session: Models and runs.
        send: Takes an answer and its buffers.
        keep: Called in the thread some time after something was computed, and after `soon`.
    """

    def __init__(self, session: Session, send: Send, keep: Callable[[], None] = lambda: None) -> None:
        self.session, self.send, self.keep = session, send, keep
        self._pool = ThreadPoolExecutor(1, "explorer")
        self._unwanted: dict[Any, Event] = {}  # by the id of each message that is not answered yet
        self._futures: set[Future[None]] = set()
        self._timer: Timer | None = None
        _let_cells_wait(self)

    def take(self, message: Any) -> None:
        """Answer a message, later if it takes work."""
        asked: Mapping[str, Any] = message if isinstance(message, Mapping) else {}
        number = asked.get("id")
        if asked.get("ask") == "cancel":
            if (unwanted := self._unwanted.get(_key(asked.get("of")))) is not None:
                unwanted.set()
            self.send({"id": number, "ok": True}, [])
            return
        unwanted = self._unwanted[_key(number)] = Event()
        self._later(lambda: self._answer(asked, unwanted))

    def soon(self) -> None:
        """Call `keep` in a moment, once for several calls that follow one another."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = Timer(_QUIET, self._keep_now)
        self._timer.daemon = True
        self._timer.start()

    def wait(self, timeout: float = 600.0) -> bool:
        """Wait until everything is answered and kept; whether it was within `timeout` seconds."""
        answered = not wait(list(self._futures), timeout).not_done
        if answered and (timer := self._timer) is not None:
            timer.cancel()
            self._keep_now()
            return not wait(list(self._futures), timeout).not_done
        return answered

    def cancel(self) -> None:
        """Cancel all messages."""
        for unwanted in list(self._unwanted.values()):
            unwanted.set()

    def _later(self, do: Callable[[], None]) -> None:
        future = self._pool.submit(do)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)

    def _keep_now(self) -> None:
        self._timer = None
        with suppress(RuntimeError):  # The program ends.
            self._later(self.keep)

    def _answer(self, asked: Mapping[str, Any], unwanted: Event) -> None:
        number, said = asked.get("id"), time.monotonic()

        def cancelled() -> bool:
            nonlocal said
            if (progress := self.session.progress) and time.monotonic() - said >= _MOMENT:
                said = time.monotonic()
                self.send({"id": number, "progress": progress}, [])
            return unwanted.is_set()

        done = Event()

        def tell() -> None:
            while not done.wait(_ALIVE):
                self.send({"id": number, "alive": True}, [])

        alive = Thread(target=tell, daemon=True)
        alive.start()
        try:
            answer(self.session, asked, self.send, cancelled)
        finally:
            done.set()
            alive.join()
        self._unwanted.pop(_key(number), None)
        if asked.get("ask") in ("run", "fact", "chunk"):
            self.soon()


def answer(session: Session, message: Any, send: Send, cancelled: Cancelled = never) -> None:
    """Answer one message of the browser that takes work; `send` takes the answer and its buffers."""
    asked: Mapping[str, Any] = message if isinstance(message, Mapping) else {}
    number, ask = asked.get("id"), asked.get("ask")
    entries = {name: x for name, x in asked.items() if name not in ("id", "ask")}
    said: tuple[dict[str, Any], list[bytes]]
    try:
        if ask == "run":
            said = {"run": session.run(asked.get("spec") or {}, cancelled)}, []
        elif ask == "fact":
            said = {"fact": session.fact({"id": entries.pop("fact", None), **entries}, cancelled)}, []
        elif ask == "suggest":
            prompt = SuggestionRequest.of(entries)
            said = {"suggestions": session.suggest(prompt.prompt, cancelled)}, []
        elif ask == "chunk":
            said = {}, [session.chunk(str(asked.get("run")), str(asked.get("name")), cancelled)]
        elif ask == "page":
            said = {}, [session.page_to_send(PageRequest.of(entries), cancelled).encode()]
        else:
            raise ValueError(f"ask={ask!r:.60}; it must be one of {', '.join(map(repr, (*ASKS, 'cancel')))}")
    except RequestCancelledError as error:
        send({"id": number, "ok": False, "error": str(error), "cancelled": True}, [])
    except Exception as error:  # The page shows its text; without an answer it would wait.
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        unknown = {"unknown": True} if isinstance(error, KeyError) else {}
        send({"id": number, "ok": False, "error": text, **unknown}, [])
    else:
        send({"id": number, "ok": True, **said[0]}, said[1])


def _let_cells_wait(work: Work) -> None:
    """Let every cell that is run wait until the work is done, so that it does not meet the hooks of the explorer."""
    try:
        from IPython import get_ipython
    except ImportError:
        return
    if (shell := get_ipython()) is None:
        return
    mine = weakref.ref(work)

    def finish() -> None:
        if (alive := mine()) is None:
            return
        try:
            alive.wait()
        except KeyboardInterrupt:
            alive.cancel()
            alive.wait()
            raise

    shell.events.register("pre_execute", finish)


def _key(number: Any) -> Any:
    """An id as a key; anything else than a number or a text is none."""
    return number if isinstance(number, int | str) else None


def _of(state: Any, name: str) -> Any:
    return state.get(name) if isinstance(state, Mapping) else None
