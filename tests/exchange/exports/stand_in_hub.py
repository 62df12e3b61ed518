"""A stand-in for the Hugging Face Hub that has one repository of a model in memory.

It answers the requests of the client, huggingface_hub, for small files. It is not the Hub.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REPOSITORY = "user/repo"
_API = f"/api/models/{REPOSITORY}"


class Hub(ThreadingHTTPServer):
    """The server.

    Attributes:
        files: The content of each file, by its path.
        commits: The paths of each commit.
        refuses: Returns True for the path of a file whose commit is refused.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.commits: list[list[str]] = []
        self.refuses: Callable[[str], bool] = lambda _: False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def stand_in_hub() -> Generator[Hub]:
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002

    def _answer(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        tree = f"{_API}/tree/main"
        if path.startswith(tree):
            self._tree(path.removeprefix(tree).strip("/"), "recursive=true" in self.path.lower())
        elif path in (_API, f"{_API}/revision/main"):
            self._answer({"id": REPOSITORY, "sha": "0" * 40, "private": False, "siblings": []})
        else:
            self._answer({"error": "not here"}, 404)

    def _tree(self, folder: str, is_recursive: bool) -> None:
        prefix = f"{folder}/" if folder else ""
        entries: dict[str, Any] = {}
        for path, data in self.server.files.items():
            if path.startswith(prefix):
                name, _, rest = path.removeprefix(prefix).partition("/")
                if rest:
                    entries[prefix + name] = _entry(prefix + name, None)
                if is_recursive or not rest:
                    entries[path] = _entry(path, data)
        if entries or not folder:
            self._answer([*entries.values()])
        else:
            self._answer({"error": f"{folder} does not exist"}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path.startswith(f"{_API}/preupload/"):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._answer({"files": files})
        elif self.path.startswith(f"{_API}/commit/"):
            self._commit([json.loads(line) for line in body.splitlines() if line])
        elif self.path.startswith(f"{_API}/paths-info/"):
            self._answer([])
        else:
            self._answer({"error": "not here"}, 404)

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        operations = [(line["key"], line["value"]) for line in lines if line["key"] != "header"]
        paths = [value["path"] for _, value in operations]
        if any(map(self.server.refuses, paths)):
            self._answer({"error": "the storage limit is reached"}, 403)
            return
        for kind, value in operations:
            if kind == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            else:
                del self.server.files[value["path"]]
        self.server.commits.append(paths)
        self._answer(
            {"commitUrl": f"{self.server.url}/{REPOSITORY}/commit/0", "commitOid": "0" * 40}
        )


def _entry(path: str, data: bytes | None) -> dict[str, Any]:
    kind = "directory" if data is None else "file"
    return {"type": kind, "oid": "0" * 40, "path": path, "size": len(data or b"")}
