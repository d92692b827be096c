"""The live page: a session behind a small web server on this machine.

    GET  /            the page, with ?token=
    GET  api/manifest the models and the runs so far
    GET  api/chunk    ?run=ID&name=NAME, the bytes of a chunk
    POST api/run      a spec as JSON; the run's entry

Whoever reaches the server can make the models compute, so it listens on 127.0.0.1 unless another address is asked for,
and every request needs the session's random token: the page in its address, the others in the header X-Token. A
request whose Host is not this server's is refused, since a web page elsewhere may point its own name to 127.0.0.1 (DNS
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
from collections.abc import Awaitable, Callable
from logging import getLogger
from threading import Event
from typing import Any, TypeVar

from diffusion_lens.explorer.session import RequestCancelledError, Session
from diffusion_lens.pages.page import document

LARGEST_REQUEST = 2**20
SECONDS = 10.0  # in which a request has to be sent
T = TypeVar("T")
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
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.requests import ClientDisconnect, Request
        from starlette.responses import HTMLResponse, JSONResponse, Response
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
            except KeyError as error:
                return refusal(404, str(error.args[0] if error.args else error))
            except (ValueError, TypeError, OverflowError, FloatingPointError) as error:
                return refusal(400, str(error))
            except (RequestCancelledError, ClientDisconnect):
                return refusal(408, "the client has left")
            except Exception as error:
                getLogger("uvicorn.error").exception("a request failed")
                return refusal(500, f"{type(error).__name__}: {error}")
            response.headers.update(_HEADERS)
            return response

        return endpoint

    async def computed(request: Request, work: Callable[..., T], *arguments: Any) -> T:
        """The result of `work` in a thread; its last argument tells it whether the client has left."""
        left = Event()

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            left.set()

        watching = asyncio.ensure_future(watch())
        try:
            return await run_in_threadpool(work, *arguments, left.is_set)
        finally:
            watching.cancel()

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

    async def run(request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > LARGEST_REQUEST:
                return refusal(413, f"a spec has at most {LARGEST_REQUEST:,} bytes")
        try:
            spec = json.loads(body)
        except (ValueError, RecursionError) as error:
            return refusal(400, f"a spec is a JSON object: {error}")
        return JSONResponse(await computed(request, session.run, spec))

    return Starlette(
        routes=[
            Route("/", guarded(page, in_url=True)),
            Route("/api/manifest", guarded(manifest)),
            Route("/api/chunk", guarded(chunk)),
            Route("/api/run", guarded(run), methods=["POST"]),
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


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
