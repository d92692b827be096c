"""Reads explorer pages as their module does, independently of the code that writes them: struct, gzip, HTML parser."""

import base64
import contextlib
import gzip
import io
import json
import re
import struct
import warnings
from html.parser import HTMLParser
from typing import Any

import numpy as np

FORMATS = {"u1": "B", "u2": "H", "i4": "i", "f4": "f"}
LARGEST = {"u1": 255, "u2": 65535}


def unpack(chunk: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and arrays of a chunk; NaN where a scaled integer is the largest one."""
    (n,) = struct.unpack_from("<I", chunk)
    header = json.loads(chunk[4 : 4 + n].decode("utf-8"))
    offset = -(-(4 + n) // 8) * 8
    arrays = {}
    for entry in header.pop("arrays"):
        count = int(np.prod(entry["shape"]))
        code = FORMATS[entry["dtype"]]
        stored = struct.unpack_from(f"<{count}{code}", chunk, offset)
        offset = -(-(offset + count * struct.calcsize(code)) // 8) * 8
        values = np.array(stored, dtype=np.float64 if code == "f" or "scale" in entry else np.int64)
        if "scale" in entry:
            values = np.where(values == LARGEST[entry["dtype"]], np.nan, values * entry["scale"])
        arrays[entry["name"]] = values.reshape(entry["shape"])
    assert offset == len(chunk)
    return header, arrays


def predicted_at(arrays: dict[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
    """The entries of the predictions' chunk that belong to a step."""
    return {name: x[arrays["step"] == step] for name, x in arrays.items() if name != "step"}


class Scripts(HTMLParser):
    """The script elements of a document, as a browser would end them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.found.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.found and self.lasttag == "script" and self.cdata_elem == "script":
            attributes, text = self.found[-1]
            self.found[-1] = (attributes, text + data)


class PageFile:
    """The manifest, the chunks and the elements of a page."""

    def __init__(self, text: str) -> None:
        self.text = text
        parsed = Scripts(text)
        self.elements = parsed.elements
        (manifest,) = (body for attributes, body in parsed.found if attributes.get("id") == "manifest")
        assert "<" not in manifest
        self.manifest = json.loads(manifest)
        self.chunks = {
            (attributes["data-run"], attributes["data-chunk"]): gzip.decompress(base64.b64decode(body, validate=True))
            for attributes, body in parsed.found
            if attributes.get("type") == "application/octet-stream;base64"
        }
        (self.module,) = (body for attributes, body in parsed.found if attributes.get("type") == "module")

    def run(self, index: int = 0) -> dict[str, Any]:
        return self.manifest["runs"][index]

    def read(self, name: str, index: int = 0) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return unpack(self.chunks[self.run(index)["id"], name])

    def texts(self, indices: np.ndarray | list[Any], index: int = 0) -> Any:
        """The words of indices, in their shape; None where there is none."""
        words = self.run(index)["words"]
        return [
            self.texts(x, index) if isinstance(x, list) else (None if x in (-1, 65535) else words[x])
            for x in (indices.tolist() if isinstance(indices, np.ndarray) else indices)
        ]

    def requests(self) -> list[str]:
        """Attributes through which an element would fetch something."""
        return [
            f"{tag} {name}={value}"
            for tag, attributes in self.elements
            for name, value in attributes.items()
            if name in ("src", "href", "srcset", "action", "data")
        ]


def ran(code: str, model: Any) -> tuple[dict[str, Any], str]:
    """The variables of a page's code that was run, and what it printed. The code loads `model` by its name."""
    variables: dict[str, Any] = {"loaded": model}
    printed = io.StringIO()
    quoted = re.escape(repr(model.cfg.model_name))
    code, n_loads = re.subn(rf"HookedDiffusionTransformer\.from_pretrained\({quoted}\)", "loaded", code)
    assert n_loads == 1
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a forced token is the work of a hook that is gone afterwards
        exec(code, variables)
    return variables, printed.getvalue()


def as_selected(code: str, **selection: Any) -> str:
    """Code as the page shows it for a selection."""
    for name, value in selection.items():
        code = code.replace(f"{{{name}}}", str(value))
    assert not re.search(r"\{(step|layer|head|position|name)\}", code)
    return code
