"""The explorer as a notebook widget. Requires the extra `explore`.

The module in the browser asks with {id, ask: "chunk", run, name} or {id, ask: "run", spec}. The answer is {id, ok} with
the chunk as a buffer or the entry as `run`, or {id, ok: false, error}.
"""

from collections.abc import Callable, Mapping
from typing import Any

from diffusion_lens.explorer.session import Session
from diffusion_lens.pages.page import explorer_files


def answer(session: Session, message: Any, send: Callable[[dict[str, Any], list[bytes]], None]) -> None:
    """Answer one message of the browser.

    Args:
        send: Function that takes the answer and its buffers.
    """
    asked: Mapping[str, Any] = message if isinstance(message, Mapping) else {}
    try:
        if asked.get("ask") == "chunk":
            chunk = session.chunk(str(asked.get("run")), str(asked.get("name")))
            send({"id": asked.get("id"), "ok": True}, [chunk])
        elif asked.get("ask") == "run":
            send({"id": asked.get("id"), "ok": True, "run": session.run(asked.get("spec") or {})}, [])
        else:
            raise ValueError(f"ask={asked.get('ask')!r}; it must be 'chunk' or 'run'")
    except Exception as error:  # The page shows its text; without an answer it would wait.
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        send({"id": asked.get("id"), "ok": False, "error": text}, [])


def widget(session: Session) -> Any:
    """The widget of a session, an `anywidget.AnyWidget`; Jupyter shows it where it is the last value of a cell."""
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

        def __init__(self) -> None:
            super().__init__(manifest=session.manifest)
            self.session = session
            self.on_msg(lambda _, message, buffers: answer(session, message, self.send))

        def __repr__(self) -> str:
            return f"Explorer({session.title})"

    return Explorer()
