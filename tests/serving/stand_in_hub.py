"""A hub on this machine: what huggingface_hub asks of one, answered from a folder, with faults on request."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Repository:
    """What stands under a name. large: names of files that are in large-file storage, told by their SHA-256.

    token: who asks for a file without it is refused, as a gated repository does.
    cut: by name of a large file the bytes after which the connection ends, once for each item; 0 at once.
    wrong: names of files whose bytes are not those of the hash.
    answers: what is said of it in place of what a hub says, a value of JSON; it comes alone in a list.
    """

    files: dict[str, bytes]
    large: frozenset[str] = frozenset()
    token: str | None = None
    cut: dict[str, list[int]] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    answers: list[object] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def etag(self, name: str) -> str:
        data = self.files[name]
        if name in self.large:
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def fetched(self) -> list[str]:
        """Large files whose bytes were asked for, and from where."""
        return [asked for asked in self.asked if " from " in asked]


class StandInHub:
    """The server. `repositories` may be changed while it runs."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        hub = self

        class Handler(_Handler):
            repositories = hub.repositories

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def add(self, name: str, folder: Path) -> Repository:
        """The files of a folder under `name`; those that end in .safetensors are large."""
        files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        large = frozenset(file for file in files if file.endswith(".safetensors"))
        self.repositories[name] = Repository(files, large)
        return self.repositories[name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repositories: dict[str, Repository]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.strip("/").split("/")
        if path[:2] == ["api", "models"]:
            self._api("/".join(path[2:4]), path[4:])
        elif path[0] == "blobs":
            repository, file = self.repositories["/".join(path[1:3])], "/".join(path[3:])
            self._bytes(repository, file, {"ETag": f'"{repository.etag(file)}"'})
        elif len(path) > 4 and path[2] == "resolve":
            self._resolve("/".join(path[:2]), path[3], "/".join(path[4:]))
        else:
            self._answer(404)

    def _api(self, name: str, rest: list[str]) -> None:
        repository = self.repositories.get(name)
        if repository is None:
            self._answer(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif repository.answers:
            self._json(repository.answers[0])
        elif rest and rest[1] not in ("main", COMMIT):
            self._answer(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {rest[1]}"})
        elif rest and rest[0] == "tree":
            self._json([self._leaf(repository, file) for file in sorted(repository.files)])
        else:
            siblings = [{"rfilename": file} for file in sorted(repository.files)]
            self._json({"id": name, "modelId": name, "sha": COMMIT, "tags": [], "siblings": siblings})

    def _leaf(self, repository: Repository, file: str) -> dict[str, object]:
        size = len(repository.files[file])
        leaf: dict[str, object] = {"type": "file", "path": file, "size": size, "oid": "0" * 40}
        if file in repository.large:
            leaf["lfs"] = {"oid": repository.etag(file), "size": size, "pointerSize": 134}
        return leaf

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repository = self.repositories[name]
        if repository.token and self.headers.get("authorization") != f"Bearer {repository.token}":
            status = 403 if "authorization" in self.headers else 401
            self._answer(status, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
            return
        repository.asked.append(file)
        headers = {"X-Repo-Commit": COMMIT}
        if file not in repository.large:
            self._bytes(repository, file, {**headers, "ETag": f'"{repository.etag(file)}"'})
            return
        headers |= {"X-Linked-Etag": f'"{repository.etag(file)}"', "X-Linked-Size": str(len(repository.files[file]))}
        storage = self.headers["host"].replace("127.0.0.1", "localhost")  # another host than the hub's, as it is there
        self._answer(302, {**headers, "Location": f"http://{storage}/blobs/{name}/{file}"})

    def _bytes(self, repository: Repository, file: str, headers: dict[str, str]) -> None:
        """A file or the range of it that is asked for."""
        data = repository.files[file]
        if file in repository.wrong:
            data = bytes(byte ^ 1 for byte in data)
        start = int(self.headers.get("range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if self.command == "GET" and file in repository.large:
            repository.asked.append(f"{file} from {start}")
        self.send_response(206 if "range" in self.headers else 200)
        if "range" in self.headers:
            headers = {**headers, "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        for key, value in {**headers, "Content-Length": str(len(data) - start), "Accept-Ranges": "bytes"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if repository.cut.get(file):
            self.wfile.write(data[start : start + repository.cut[file].pop(0)])
            self.close_connection = True
            return
        self.wfile.write(data[start:])

    def _json(self, value: object) -> None:
        self._answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _answer(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
