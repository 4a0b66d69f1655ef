"""A hub on this machine: the part of the Hugging Face HTTP API that a download uses."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "c0ffee" + "0" * 34


class FakeHub(ThreadingHTTPServer):
    """``repositories``: files by name. ``gets`` has ``(path, Range header)`` of every file that was sent. A file in
    ``stalls`` is sent up to this many bytes, then nothing more until ``go_on`` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.errors: dict[str, tuple[int, str]] = {}
        self.commit = COMMIT
        self.gets: list[tuple[str, str | None]] = []
        self.stalls: dict[str, int] = {}
        self.is_stalled, self.go_on = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self) -> list[str]:
        """Names of the files that were sent."""
        return [path.partition(f"/resolve/{self.commit}/")[2] for path, _ in self.gets]


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Keep quiet."""

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        path = unquote(self.path.partition("?")[0])
        if match := re.fullmatch(r"/api/models/(.+?)(?:/revision/(.+))?", path):
            return self._describe(match[1], match[2])
        if match := re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", path):
            data = self.server.repositories.get(match[1], {}).get(match[3])
            if data is not None:
                return self._send_file(path, match[3], data, has_body)
        self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def _describe(self, name: str, revision: str | None) -> None:
        if name in self.server.errors:
            status, code = self.server.errors[name]
            return self._send(status, b'{"error": "no"}', {"X-Error-Code": code})
        files = self.server.repositories.get(name)
        if files is None:
            return self._send(404, b'{"error": "no"}', {"X-Error-Code": "RepoNotFound"})
        if revision not in (None, "main", "v2", self.server.commit):
            return self._send(404, b'{"error": "no"}', {"X-Error-Code": "RevisionNotFound"})
        siblings = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
        self._send(200, json.dumps(
            {"_id": "1", "id": name, "modelId": name, "sha": self.server.commit, "siblings": siblings, "tags": [],
             "private": False, "downloads": 0, "likes": 0}
        ).encode(), {"Content-Type": "application/json"})

    def _send_file(self, path: str, name: str, data: bytes, has_body: bool) -> None:
        start = 0
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": self.server.commit,
            "Accept-Ranges": "bytes"
        }
        wanted = self.headers.get("Range")
        if wanted:
            start = int(re.match(r"bytes=(\d+)-", wanted)[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if has_body:
            self.server.gets.append((path, wanted))
        self._send(206 if wanted else 200, data[start:], headers, has_body, self.server.stalls.get(name))

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], has_body: bool = True, stall: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD" or not has_body:
            return
        self.wfile.write(body[:stall])
        self.wfile.flush()
        if stall is not None:
            self.server.is_stalled.set()
            self.server.go_on.wait(60)
            self.wfile.write(body[stall:])


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        hub.shutdown()
        hub.server_close()
