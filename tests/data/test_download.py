"""Fetching: from a server of our own on this machine, whole or not at all, and only once."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

from diffusion_lens.data import download
from diffusion_lens.data.download import fetch_from_hub, fetch_from_web

CONTENT = b"[" + b"1, 2, 345\n," * 4545 + b"12 ]"


class Answers(BaseHTTPRequestHandler):
    """The file, half of it, another one, or an error, by path."""

    requests: list[str]

    def do_GET(self):
        self.requests.append(self.path)
        if self.path.endswith("missing.json"):
            self.send_error(404)
            return
        self.send_response(200)
        if self.path.endswith("login.json"):
            self.end_headers()
            self.wfile.write(b"<html>log in first</html>")
            return
        if "unmeasured" not in self.path:
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        half = self.path.endswith(("half.json", "unmeasured_half.json"))
        self.wfile.write(CONTENT[: len(CONTENT) // 2] if half else CONTENT)

    def log_message(self, *words):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server's address and the paths that were requested; the cache is empty and the network allowed."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    handler = type("Handler", (Answers,), {"requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/data", handler.requests
        running.shutdown()
        thread.join()


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_file_is_fetched_once(server, tmp_path):
    url, requests = server
    digest = hashlib.sha256(CONTENT).hexdigest()
    path = fetch_from_web(f"{url}/facts.json", by_hand="pass its path", sha256=digest)
    assert path.read_bytes() == CONTENT
    assert fetch_from_web(f"{url}/facts.json", by_hand="pass its path") == path
    assert requests == ["/data/facts.json"]
    assert kept(tmp_path) == ["facts.json"]
    other = fetch_from_web(f"{url}/other/facts.json", by_hand="pass its path")
    assert other != path
    assert fetch_from_web(f"{url}/unmeasured.json", by_hand="pass its path").read_bytes() == CONTENT


def test_what_is_in_the_cache_is_given_offline_too(server, monkeypatch):
    url, requests = server
    path = fetch_from_web(f"{url}/facts.json", by_hand="pass its path")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_from_web(f"{url}/facts.json", by_hand="pass its path") == path
    with pytest.raises(
        FileNotFoundError, match=r"other\.json is not in the cache .* HF_HUB_OFFLINE is set.*pass its path"
    ):
        fetch_from_web(f"{url}/other.json", by_hand="pass its path")
    assert requests == ["/data/facts.json"]


@pytest.mark.parametrize(
    ("name", "reason"), [("half.json", r"the connection broke after 25,000 of 50,000 bytes"), ("missing.json", "404")]
)
def test_a_broken_download_leaves_nothing(server, tmp_path, name, reason):
    url, _ = server
    with pytest.raises(FileNotFoundError, match=rf"{name} is not in the cache.*{reason}.*Fetch {url}/{name}") as caught:
        fetch_from_web(f"{url}/{name}", by_hand="pass its path")
    assert caught.value.__suppress_context__
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "sha256"),
    [("login.json", None), ("login.json", "0" * 64), ("unmeasured_half.json", None), ("facts.json", "0" * 64)],
)
def test_another_file_than_the_published_one_is_not_kept(server, tmp_path, name, sha256):
    url, _ = server
    reason = "expected 0{64}" if sha256 else "it is not JSON"
    with pytest.raises(ValueError, match=rf"{name} answers with another.*{reason}.*Nothing was kept.*pass its path"):
        fetch_from_web(f"{url}/{name}", by_hand="pass its path", sha256=sha256)
    assert kept(tmp_path) == []


def test_a_damaged_file_in_the_cache_is_fetched_anew(server, monkeypatch):
    url, requests = server
    digest = hashlib.sha256(CONTENT).hexdigest()
    path = fetch_from_web(f"{url}/facts.json", by_hand="")
    path.write_bytes(b"<html>log in first</html>")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"is not the published http.*expected .*connected machine and pass its path"):
        fetch_from_web(f"{url}/facts.json", by_hand="pass its path", sha256=digest)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert fetch_from_web(f"{url}/facts.json", by_hand="", sha256=digest).read_bytes() == CONTENT
    assert len(requests) == 2


def test_a_damaged_data_set_is_taken_out_of_the_hubs_cache(monkeypatch, tmp_path):
    snapshot = tmp_path / "datasets--a--b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "blob").write_bytes(b"<html>")
    (snapshot / "facts.json").symlink_to(tmp_path / "blob")
    monkeypatch.setattr(download, "hf_hub_download", lambda *args, **settings: str(snapshot / "facts.json"))
    with pytest.raises(ValueError, match=r"it is not JSON.*removed from the cache: call again"):
        fetch_from_hub("a/b", "facts.json", revision="abc", by_hand="")
    assert kept(tmp_path) == []
    monkeypatch.setattr(download, "hf_hub_download", lambda *args, **settings: str(tmp_path / "mine.json"))
    (tmp_path / "mine.json").write_bytes(b"<html>")
    with pytest.raises(ValueError, match=r"Delete .*mine\.json and fetch it again"):
        fetch_from_hub("a/b", "facts.json", revision="abc", by_hand="")
    assert kept(tmp_path) == ["mine.json"]


def test_nobody_answers(server):
    url, _ = server
    nobody = url.replace(url.split(":")[2].split("/")[0], "1")
    with pytest.raises(FileNotFoundError, match=r"facts\.json is not in the cache.*[Rr]efused"):
        fetch_from_web(f"{nobody}/facts.json", by_hand="pass its path")


def test_a_data_set_is_fetched_at_a_commit(tmp_path, monkeypatch):
    calls = []

    def stand_in(repo, file, **settings):
        calls.append((repo, file, settings))
        path = tmp_path / "facts.jsonl"
        path.write_bytes(b"[1]\n[2]\n")
        return str(path)

    monkeypatch.setattr(download, "hf_hub_download", stand_in)
    fetch_from_hub("someone/facts", "a/facts.jsonl", revision="abc", by_hand="")
    assert calls == [("someone/facts", "a/facts.jsonl", {"repo_type": "dataset", "revision": "abc"})]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (LocalEntryNotFoundError("a stack of things"), "HF_HUB_OFFLINE is set"),
        (EntryNotFoundError("404"), r"the hub refuses it \(EntryNotFoundError\)"),
        (HfHubHTTPError.__bases__[0]("no route"), "HTTPError: no route"),
        (OSError("Consistency check failed"), "OSError: Consistency check failed"),
    ],
)
def test_the_hubs_errors_become_one(monkeypatch, error, reason):
    def refuse(*args, **settings):
        raise error

    monkeypatch.setattr(download, "hf_hub_download", refuse)
    with pytest.raises(
        FileNotFoundError, match=rf"facts\.jsonl is not in the cache.*{reason}.*resolve/abc/a/facts"
    ) as caught:
        fetch_from_hub("someone/facts", "a/facts.jsonl", revision="abc", by_hand="pass folder=")
    assert caught.value.__suppress_context__
    assert str(caught.value).endswith("and pass folder=")
