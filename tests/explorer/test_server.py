"""The server answers this page with this token only; whatever goes wrong is a JSON error with the library's message."""

import asyncio
import json
import re
import socket
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from threading import Thread
from unittest.mock import patch

import pytest
from page_reader import unpack

from diffusion_lens import Fact
from diffusion_lens.explorer import Session
from diffusion_lens.explorer.server import LARGEST_REQUEST, Hosts, Server, app

TOKEN = "a-token"
SPEC = {"prompt": "Gustav Geisser is the", "steps": 3}
pytestmark = pytest.mark.parametrize("tiny", ["tiny-mdm"], indirect=True)


class Client:
    """Sends requests to an ASGI application, without a network."""

    def __init__(self, application):
        self.application = application

    def __call__(self, path, method="GET", body=b"", host="127.0.0.1:8000", token=TOKEN, after=()):
        headers = [(b"host", host.encode()), *([(b"x-token", token.encode())] if token is not None else [])]
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        sent, received = [], [{"type": "http.request", "body": body, "more_body": False}, *after]

        async def receive():
            if not received:
                await asyncio.Event().wait()  # A client that waits for its answer sends nothing more.
            return received.pop(0)

        async def send(message):
            sent.append(message)

        asyncio.run(self.application(scope, receive, send))
        found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], found, b"".join(part.get("body", b"") for part in sent[1:])


@contextmanager
def serving(server, started=lambda: None):
    """A server that answers in another thread, and ends at the end as Ctrl-C ends it."""
    import uvicorn

    running, begin = [], uvicorn.Server.run

    def run(self, sockets):
        running.append(self)
        begin(self, sockets)

    with patch.object(uvicorn.Server, "run", run):
        thread = Thread(target=server.serve, args=(started,))
        thread.start()
        try:
            yield
        finally:
            running[0].should_exit = True
            thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def client(tiny):
    return Client(app(Session([tiny]), TOKEN, Hosts("127.0.0.1", 8000)))


def test_runs_and_chunks_are_those_of_the_session(tiny, client):
    status, _, body = client("/api/run", "POST", json.dumps(SPEC).encode())
    run = json.loads(body.splitlines()[-1])["run"]
    assert status == 200
    assert run == Session([tiny]).run(SPEC)
    manifest = json.loads(client("/api/manifest")[2])
    assert (manifest["format"], [x["id"] for x in manifest["runs"]]) == (1, [run["id"]])
    assert manifest["models"][0]["name"] == "tiny-mdm"
    status, headers, chunk = client(f"/api/chunk?run={run['id']}&name=lens/1")
    assert (status, headers["content-type"]) == (200, "application/octet-stream")
    assert unpack(chunk)[1]["entropy"].shape == (5, 14)


def test_the_page_needs_the_token_and_makes_no_other_request(client):
    status, headers, body = client(f"/?token={TOKEN}", token=None)
    assert status == 200
    policy = headers["content-security-policy"]
    (nonce,) = re.findall(r"script-src 'nonce-([\w-]+)'", policy)
    assert f'<script type="module" nonce="{nonce}">'.encode() in body
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert (headers["cache-control"], headers["referrer-policy"]) == ("no-store", "no-referrer")
    assert TOKEN.encode() not in body
    assert client(f"/?token={TOKEN}", token=None)[1]["content-security-policy"] != policy


def test_others_are_refused(client):
    def refused(status, message, *arguments, **options):
        found, headers, body = client(*arguments, **options)
        assert (found, headers["content-type"]) == (status, "application/json")
        assert re.search(message, json.loads(body)["error"]), body
        assert "access-control-allow-origin" not in headers

    posted = ("/api/run", "/api/fact", "/api/suggest", "/api/page")
    for path in ("/api/manifest", "/api/chunk?run=x&name=lens/0", "/api/progress", *posted):
        method = "POST" if path in posted else "GET"
        for token in ("", "a-tokem", "ä", None):
            refused(403, "token is missing or wrong", path, method, token=token)
        for host in ("evil.example:8000", "127.0.0.1:8001", "127.0.0.1", "", "127.0.0.1.evil.example:8000"):
            refused(403, "this server is not", path, method, host=host)
    refused(403, "token", "/", token=None)
    refused(403, "token", "/?token=a-tokem", token=TOKEN)
    refused(404, "no run 'x'", "/api/chunk?run=x&name=lens/0")
    refused(400, "JSON object", "/api/run", "POST", b"{")
    refused(400, "JSON object", "/api/run", "POST", b"[" * 100_000)
    refused(400, "the nearest is 'steps'", "/api/run", "POST", b'{"stepz": 1}')
    refused(400, "unknown sampler 'best'", "/api/run", "POST", json.dumps({**SPEC, "sampler": "best"}).encode())
    for wide in ({"cfg_scale": 1e300}, {"cfg_scale": 10**400}, {"length": 10**400}):
        refused(400, "cfg_scale|too big|too large", "/api/run", "POST", json.dumps({**SPEC, **wide}).encode())
    for path in posted:
        refused(413, "at most", path, "POST", b" " * (LARGEST_REQUEST + 1))
    assert client("/api/run")[0] == 405
    assert client("/api/secret")[0] == 404


def test_long_work_is_reported_by_lines(tiny, client):
    status, headers, body = client("/api/run", "POST", json.dumps({**SPEC, "steps": 600}).encode())
    *told, last = map(json.loads, body.splitlines())
    assert (status, headers["content-type"].partition(";")[0]) == (200, "application/x-ndjson")
    assert last == {"run": Session([tiny]).run({**SPEC, "steps": 600})}
    done = [line["progress"]["done"] for line in told]
    assert done
    assert done == sorted(set(done))
    assert all(line["progress"] == {"what": "denoising", "done": line["progress"]["done"], "of": 600} for line in told)
    assert json.loads(client("/api/progress")[2]) == {}


def test_an_error_after_the_first_line_is_the_last_line(tiny):
    class Late(Session):
        def run(self, given, cancelled):
            super().run({**SPEC, "steps": 600}, cancelled)
            raise KeyError("no run 'late'") if given["seed"] else ValueError("too late")

    client = Client(app(Late([tiny]), TOKEN, Hosts("127.0.0.1", 8000)))
    for seed, error, unknown in ((0, "too late", False), (1, "no run 'late'", True)):
        session_of_its_own = json.dumps({"seed": seed}).encode()
        status, _, body = client("/api/run", "POST", session_of_its_own)
        if seed:  # The run is kept, so that the error comes before any line.
            assert (status, json.loads(body)["error"]) == (404, error)
            client = Client(app(Late([tiny]), TOKEN, Hosts("127.0.0.1", 8000)))
            status, _, body = client("/api/run", "POST", session_of_its_own)
        *told, last = map(json.loads, body.splitlines())
        assert (status, last) == (200, {"error": error, "unknown": unknown})
        assert told


def test_progress_is_told_while_another_request_computes(tiny):
    session = Session([tiny])
    client = Client(app(session, TOKEN, Hosts("127.0.0.1", 8000)))
    wanted = Thread(target=client, args=("/api/run", "POST", json.dumps({**SPEC, "steps": 600}).encode()))
    wanted.start()
    seen = {}
    while wanted.is_alive() and not seen:
        seen = json.loads(client("/api/progress")[2])
    wanted.join(60)
    assert (seen["what"], seen["of"]) == ("denoising", 600)


@pytest.mark.usefixtures("few_samples")
def test_facts_suggestions_and_pages_are_those_of_the_session(tiny):
    fact = Fact("Gustav Geisser is the", "Gustav Geisser", " brave drummer of Rolsen.")
    settings = dict(facts=[fact], settings={"steps": 3})
    session = Session([tiny], **settings)
    client = Client(app(session, TOKEN, Hosts("127.0.0.1", 8000)))

    def posted(path, **given):
        status, headers, body = client(path, "POST", json.dumps(given).encode())
        return status, headers["content-type"].partition(";")[0], body

    status, kind, body = posted("/api/fact", id=0, effect=True)
    assert (status, kind) == (200, "application/x-ndjson")
    answer = json.loads(body.splitlines()[-1])["fact"]
    assert answer == Session([tiny], **settings).fact({"id": 0, "effect": True})
    status, kind, body = posted("/api/suggest", prompt=fact.prompt)
    assert (status, json.loads(body)) == (200, session.suggest(fact.prompt))
    run = json.loads(posted("/api/run", **answer["spec"])[2].splitlines()[-1])["run"]
    status, kind, body = posted("/api/page", runs=[run["id"]], state={"step": 2}, attention=[0])
    assert (status, kind, body.decode()) == (
        200,
        "text/html",
        session.page([run["id"]], [0], {"step": 2}, facts=()).html(),
    )

    for status, message, path, given in (
        (404, "no fact 1", "/api/fact", dict(id=1)),
        (404, "no run 'x'", "/api/page", dict(runs=["x"])),
        (400, "list with the id of each run", "/api/page", dict(runs=[])),
        (400, "at most 64 runs", "/api/page", dict(runs=["x"] * 65)),
        (400, "needs the entry 'runs'", "/api/page", {}),
        (400, "state=3 is no JSON object", "/api/page", dict(runs=["x"], state=3)),
        (400, "at most 65,536", "/api/page", dict(runs=["x"], state={"a": "x" * 10**5})),
        (400, "attention=", "/api/page", dict(runs=[run["id"]], attention=[4])),
        (400, "no entry 'prompts'", "/api/suggest", dict(prompts="")),
    ):
        found, _, body = posted(path, **given)
        assert (found, bool(re.search(message, json.loads(body)["error"]))) == (status, True), body


def test_a_run_ends_when_its_client_leaves(tiny, client):
    long = json.dumps({**SPEC, "steps": 4096}).encode()
    begun = time.monotonic()
    status, _, _ = client("/api/run", "POST", long, after=[{"type": "http.disconnect"}])
    assert status == 408
    assert time.monotonic() - begun < 20  # A run of 4096 steps takes minutes.
    assert tiny.list_hooks() == {}
    assert json.loads(client("/api/manifest")[2])["runs"] == []
    assert client("/api/run", "POST", json.dumps(SPEC).encode())[0] == 200


def test_hosts_are_those_on_which_the_server_listens(tiny):
    here = Hosts("127.0.0.1", 80)
    assert all(host in here for host in ("127.0.0.1:80", "localhost:80", "[::1]:80", "LOCALHOST", "127.0.0.1"))
    assert not any(host in here for host in ("192.168.0.7:80", "localhost:81", "example.org", "", "0.0.0.0:80"))
    everywhere = Hosts("0.0.0.0", 9000)
    assert all(host in everywhere for host in ("192.168.0.7:9000", f"{socket.gethostname()}:9000", "[fe80::1]:9000"))
    assert not any(host in everywhere for host in ("example.org:9000", "192.168.0.7"))


def test_it_listens_on_this_machine_only(tiny):
    server = Server(Session([tiny]))
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.port}/?token={server.token}"
    with Server(Session([tiny])).socket:
        pass
    with pytest.raises(OSError, match="in use"):
        Server(Session([tiny]), port=server.port)

    started = []
    with serving(server, lambda: started.append(True)):
        page = urllib.request.urlopen(server.url, timeout=20).read()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(server.url[:-1], timeout=20)
    assert b"mountLive" in page
    assert started == [True]


def test_a_request_that_is_not_sent_whole_is_ended(tiny):
    server = Server(Session([tiny]), seconds=0.3)
    head = f"POST /api/run HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nX-Token: {server.token}\r\n"
    with serving(server), ExitStack() as opened:
        for part in ("", "GET / HT", f"{head}Content-Length: 99\r\n\r\n{{"):
            half_open = opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            half_open.sendall(part.encode())
            with suppress(ConnectionError):
                for _ in range(100 if part else 0):  # A byte now and then is no request either.
                    half_open.send(b"P")
                    time.sleep(0.04)
                assert half_open.recv(1000) == b""
        assert urllib.request.urlopen(server.url, timeout=20).status == 200


def test_the_server_ends_while_a_run_computes(tiny):
    server = Server(Session([tiny]))
    body = json.dumps({**SPEC, "steps": 4096})
    head = f"POST /api/run HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nX-Token: {server.token}\r\n"
    with serving(server), socket.create_connection(("127.0.0.1", server.port), timeout=20) as browser:
        browser.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        time.sleep(0.5)
