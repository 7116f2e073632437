"""A real HTTP server of one file that answers range requests, and counts what was read of it.

python http_files.py FILE HOST: serves it, prints the port, and answers GET /readers with how many
ranges each address has read, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class FileServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, data: bytes, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), _Handler)
        self.data = data
        self.reads: Counter[tuple[int, int]] = Counter()  # of each range, by start and end
        self.readers: Counter[str] = Counter()  # ranges that each address has read
        self.refused = 0  # how many of the next requests are answered with 503
        self.ranges = True  # else each request gets the whole file
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}/data.bin"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/readers":
            with self.server.lock:
                readers = dict(self.server.readers)
            self._answer(200, json.dumps(readers).encode())
            return
        with self.server.lock:
            refused, self.server.refused = self.server.refused, max(self.server.refused - 1, 0)
        if refused:
            self._answer(503, b"later")
        elif not self.server.ranges or "Range" not in self.headers:
            self._answer(200, self.server.data)
        else:
            start, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            with self.server.lock:
                self.server.reads[start, end + 1] += 1
                self.server.readers[str(self.client_address[0])] += 1
            self._answer(206, self.server.data[start : end + 1])

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def served(data: bytes) -> Iterator[FileServer]:
    """A server in threads of this process."""
    with FileServer(data) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    made = FileServer(Path(sys.argv[1]).read_bytes(), sys.argv[2])
    print(made.server_address[1], flush=True)
    made.serve_forever()
