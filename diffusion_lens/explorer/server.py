"""The live page: a session behind a small web server on this machine.

    GET  /            the page, with ?token=
    GET  api/manifest the models, the facts and the runs so far
    GET  api/chunk    ?run=ID&name=NAME, the bytes of a chunk
    GET  api/progress {"what", "done", "of"} of what the session computes now, or {}; it waits for nothing
    POST api/run      a spec as JSON; {"run": its entry}
    POST api/fact     {"id", "model", "effect"}; {"fact": the values of a fact of the table on a model}
    POST api/suggest  {"prompt", "model"}; {"subjects", "answers"}
    POST api/page     {"runs", "state", "attention"}; a page with these runs, as HTML

api/run and api/fact answer with lines of JSON: {"progress": {"what", "done", "of"}} while they compute, and at the end
the result, or {"error", "unknown"}, where unknown says that there is no such run. An error before the first line is
JSON with a status of its own, as everywhere.

Whoever reaches the server can make the models compute, so it listens on 127.0.0.1 unless another address is asked for,
and every request needs the session's random token: the page in its address, the others in the header X-Token. A request
whose Host is not this server's is refused, since a web page elsewhere may point its own name to 127.0.0.1 (DNS
rebinding). No other origin may read an answer (no CORS), and the page may send requests to this server only.

What nobody waits for is not computed: a request ends when its client leaves. A connection is closed if it does not send
a whole request in time.

Requires the extra `explore`.
"""

import asyncio
import ipaddress
import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from logging import getLogger
from threading import Event
from typing import Any, TypeVar

from diffusion_lens.explorer.session import RequestCancelledError, Session
from diffusion_lens.explorer.spec import PageRequest, SuggestionRequest
from diffusion_lens.pages.page import document, explorer_files

LARGEST_REQUEST = 2**20
SECONDS = 10.0  # in which a request has to be sent
REFUSED = (ValueError, TypeError, OverflowError, FloatingPointError)  # errors of the library that say what does not fit
T = TypeVar("T")
_MOMENT = 0.1  # seconds between two lines of progress
_EVERYWHERE = ("0.0.0.0", "::", "")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Hosts:
    """The values of the header Host that a server accepts.

    Args:
        host: Address on which it listens.
        port: Its port.
    """

    def __init__(self, host: str, port: int) -> None:
        self.port = port
        self._everywhere = host in _EVERYWHERE
        self._names = {*_LOOPBACK, host.lower()} - {""}
        if self._everywhere:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    def __contains__(self, header: object) -> bool:
        name, _, port = str(header).lower().rpartition(":")
        if not name or not port.isdigit():  # Browsers leave out the port 80.
            name, port = str(header).lower(), "80"
        name = name.removeprefix("[").removesuffix("]")
        # A server that listens everywhere is reached by any of its addresses; a number cannot be rebound, a name can.
        return port == str(self.port) and (name in self._names or (self._everywhere and _is_address(name)))


def app(session: Session, token: str, hosts: Hosts) -> Any:
    """The web application of a session, for an ASGI server.

    Args:
        token: Text that every request must contain.
        hosts: Accepted values of the header Host.
    """
    try:
        from anyio import CancelScope
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.requests import ClientDisconnect, Request
        from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
        from starlette.routing import Route
    except ImportError as error:
        raise ImportError("the live explorer needs starlette: pip install 'diffusion-lens[explore]'") from error

    def refusal(status: int, message: str) -> Response:
        return JSONResponse({"error": message}, status, _HEADERS)

    def guarded(answer: Callable[[Request], Awaitable[Response]], *, in_url: bool = False) -> Any:
        """An endpoint that checks host and token first, and answers errors of the library as JSON."""

        async def endpoint(request: Request) -> Response:
            if request.headers.get("host", "") not in hosts:
                return refusal(403, f"this server is not {request.headers.get('host', '')!r}; open the printed address")
            given = request.query_params.get("token", "") if in_url else request.headers.get("x-token", "")
            if not secrets.compare_digest(given.encode(), token.encode()):
                return refusal(403, "the token is missing or wrong; open the address that the command printed")
            try:
                response = await answer(request)
            except ClientDisconnect:
                return refusal(408, "the client has left")
            except Exception as error:
                return refusal(*said_of(error))
            response.headers.update(_HEADERS)
            return response

        return endpoint

    @asynccontextmanager
    async def watched(request: Request) -> AsyncIterator[Event]:
        """An event that is set when the client leaves, or nobody waits inside the block any more."""
        left = Event()

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            left.set()

        watching = asyncio.ensure_future(watch())
        try:
            yield left
        finally:
            left.set()
            watching.cancel()

    async def computed(request: Request, work: Callable[..., T], *arguments: Any) -> T:
        """The result of `work` in a thread; its last argument tells it whether the client has left."""
        async with watched(request) as left:
            return await run_in_threadpool(work, *arguments, left.is_set)

    async def reported(request: Request, name: str, work: Callable[..., Any], *arguments: Any) -> Response:
        """The result of `work` as the last line of JSON, after lines with the progress of the session."""

        async def lines() -> AsyncIterator[dict[str, Any]]:
            async with watched(request) as left:
                working = asyncio.ensure_future(run_in_threadpool(work, *arguments, left.is_set))
                said: dict[str, Any] = {}
                try:
                    while not (await asyncio.wait({working}, timeout=_MOMENT))[0]:
                        if (progress := session.progress) != said and progress:
                            said = progress
                            yield {"progress": said}
                    yield {name: await working}
                finally:
                    left.set()
                    with CancelScope(shield=True):  # The model keeps the hooks of the work until it has ended.
                        await asyncio.wait({working})
                    _ = working.cancelled() or working.exception()  # asyncio reports errors that nobody reads

        async def text(first: dict[str, Any]) -> AsyncIterator[str]:
            yield _line(first)
            try:
                async for line in rest:
                    yield _line(line)
            except Exception as error:
                status, message = said_of(error)
                yield _line({"error": message, "unknown": status == 404})

        rest = lines()
        return StreamingResponse(text(await anext(rest)), media_type="application/x-ndjson")

    async def sent(request: Request) -> Any:
        """The JSON that a request brings; a `ValueError` if it is too long or is none."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > LARGEST_REQUEST:
                raise _TooLargeError(f"a request has at most {LARGEST_REQUEST:,} bytes")
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a request brings a JSON object: {error}") from None

    async def page(request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        )
        text = document(session.title, "", 'mountLive(document.getElementById("explorer"));', policy, nonce)
        return HTMLResponse(text, headers={"Content-Security-Policy": f"{policy}; frame-ancestors 'none'"})

    async def manifest(request: Request) -> Response:
        return JSONResponse(await computed(request, session.described))

    async def chunk(request: Request) -> Response:
        run, name = (request.query_params.get(key, "") for key in ("run", "name"))
        return Response(await computed(request, session.chunk, run, name), media_type="application/octet-stream")

    async def progress(request: Request) -> Response:
        return JSONResponse(session.progress)

    async def run(request: Request) -> Response:
        return await reported(request, "run", session.run, await sent(request))

    async def fact(request: Request) -> Response:
        return await reported(request, "fact", session.fact, await sent(request))

    async def suggest(request: Request) -> Response:
        asked = SuggestionRequest.of(await sent(request))
        return JSONResponse(await computed(request, session.suggest, asked.prompt))

    async def whole_page(request: Request) -> Response:
        asked = PageRequest.of(await sent(request))
        return HTMLResponse(await computed(request, session.page_to_send, asked))

    return Starlette(
        routes=[
            Route("/", guarded(page, in_url=True)),
            Route("/api/manifest", guarded(manifest)),
            Route("/api/chunk", guarded(chunk)),
            Route("/api/progress", guarded(progress)),
            Route("/api/run", guarded(run), methods=["POST"]),
            Route("/api/fact", guarded(fact), methods=["POST"]),
            Route("/api/suggest", guarded(suggest), methods=["POST"]),
            Route("/api/page", guarded(whole_page), methods=["POST"]),
        ]
    )


class Server:
    """A session on an address of this machine; `serve` answers until Ctrl-C.

    Args:
        session: Models and runs.
        host: Address to listen on; others than 127.0.0.1 let other machines in, if they know the token.
        port: Port; 0 takes a free one.
        seconds: Time in which a connection has to send a whole request.

    Raises:
        OSError: The port is in use, or the address is not of this machine.
    """

    def __init__(self, session: Session, host: str = "127.0.0.1", port: int = 0, seconds: float = SECONDS) -> None:
        explorer_files()  # A page that cannot be made ends the command, not the first request.
        is_ipv6 = ":" in host
        self.socket = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
            dualstack_ipv6=is_ipv6 and socket.has_dualstack_ipv6(),
        )
        self.host, self.port, self.token = host, int(self.socket.getsockname()[1]), secrets.token_urlsafe(24)
        self.app = app(session, self.token, Hosts(host, self.port))
        self.seconds = seconds

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        host = "127.0.0.1" if self.host in _EVERYWHERE else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/?token={self.token}"

    def serve(self, started: Callable[[], None] = lambda: None) -> None:
        """Answer requests until the program is interrupted.

        Args:
            started: Called when the server begins to listen.
        """
        try:
            import uvicorn
        except ImportError as error:
            raise ImportError("the live explorer needs uvicorn: pip install 'diffusion-lens[explore]'") from error
        # The access log would contain the token.
        config = uvicorn.Config(
            self.app,
            http=_timely_protocol(self.seconds),
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
        )
        started()
        with self.socket:
            uvicorn.Server(config).run(sockets=[self.socket])


def _timely_protocol(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's connections, which wait for a request no longer than some seconds, and at the end for no answer."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Timely(H11Protocol):
        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self.stop()
            super().connection_lost(exc)

        def shutdown(self) -> None:
            super().shutdown()
            self.transport.close()

        def wait(self) -> None:
            if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):  # The request is complete.
                self.stop()
            elif self.timer is None:
                self.timer = self.loop.call_later(seconds, self.transport.close)

        def stop(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

    return Timely


class _TooLargeError(ValueError):
    """A request that brings more than is read."""


def said_of(error: Exception) -> tuple[int, str]:
    """The status and the text with which the server answers where a request fails."""
    if isinstance(error, KeyError):
        return 404, str(error.args[0] if error.args else error)
    if isinstance(error, _TooLargeError):
        return 413, str(error)
    if isinstance(error, REFUSED):
        return 400, str(error)
    if isinstance(error, RequestCancelledError):
        return 408, "the client has left"
    getLogger("uvicorn.error").error("a request failed", exc_info=error)
    return 500, f"{type(error).__name__}: {error}"


def _line(data: dict[str, Any]) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":")) + "\n"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
