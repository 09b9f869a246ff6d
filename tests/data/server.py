"""A file server on this machine that misbehaves as it is told."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Server:
    """Serves the files of a folder; `faults[name]` are what its next GETs come to, one each."""

    folder: Path
    url: str = ""
    faults: dict[str, list[str]] = field(default_factory=dict)
    """`fail`: status 503; `truncate`: half of it; `stall`: half of it, then nothing; `drop`: the connection ends."""
    gets: Counter[str] = field(default_factory=Counter)
    """Downloads asked for, by name."""
    silent: threading.Event = field(default_factory=threading.Event)
    """Set when the server ends, so that what stalls ends as well."""


class Handler(BaseHTTPRequestHandler):
    def __init__(self, server: Server, *arguments: object) -> None:
        self.state = server
        super().__init__(*arguments)  # pyright: ignore[reportArgumentType]

    def do_HEAD(self) -> None:
        self._begin(self.path.strip("/"))

    def do_GET(self) -> None:
        name = self.path.strip("/")
        self.state.gets[name] += 1
        faults = self.state.faults.get(name, [])
        fault = faults.pop(0) if faults else ""
        if fault == "fail":
            self.send_error(503)
            return
        if fault == "drop":
            self.connection.close()
            return
        raw = self._begin(name)
        half = fault in ("truncate", "stall")
        self.wfile.write(raw[: len(raw) // 2] if half else raw)
        self.wfile.flush()
        if fault == "stall":
            self.state.silent.wait()

    def _begin(self, name: str) -> bytes:
        path = self.state.folder / name
        if not path.is_file():
            self.send_error(404)
            return b""
        raw = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.end_headers()
        return raw

    def log_message(self, format: str, *_: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server of a folder, on a free port."""
    state = Server(folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, state)) as server:
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue] - readers give up
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01), daemon=True)
        thread.start()
        try:
            yield state
        finally:
            state.silent.set()
            server.shutdown()
            thread.join()
