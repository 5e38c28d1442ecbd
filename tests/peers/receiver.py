"""A scripted receiver of callbacks: it answers as it is told, and keeps what came."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from polar.config import DELIVERY_HEADER


class Receiver:
    """`script` has the statuses of the next answers ("hang": none at all; "half": it reads half of what comes and
    closes; "cut": it closes within its answer); after them every answer is 200.

    `pause`: seconds before each answer; `before_answer` is called then. `elsewhere`: where a redirect leads.
    `most_at_once`: callbacks that were here at one time."""

    def __init__(self, *script: int | str, port: int = 0) -> None:
        self.script = list(script)
        self.bodies: list[bytes] = []
        self.deliveries: list[str] = []
        self.types: list[str] = []
        self.pause = 0.0
        self.before_answer: Callable[[], None] = lambda: None
        self.elsewhere = ""
        self.answered = self.most_at_once = 0
        self._here = 0
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.port = self._server.server_address[1]
        self.url = callback_url(self.port)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._here += 1
                receiver.most_at_once = max(receiver.most_at_once, receiver._here)
                try:
                    self.take(receiver.script.pop(0) if receiver.script else 200)
                finally:
                    receiver._here -= 1

            def take(self, answer: int | str) -> None:
                size = int(self.headers["Content-Length"])
                body = self.rfile.read(size // 2 if answer == "half" else size)
                receiver.deliveries.append(self.headers[DELIVERY_HEADER])
                receiver.types.append(self.headers["Content-Type"])
                receiver.bodies.append(body)
                self.close_connection = isinstance(answer, str)
                if answer == "hang":
                    receiver._released.wait(60)
                elif answer == "cut":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Le")
                elif isinstance(answer, int):
                    time.sleep(receiver.pause)
                    receiver.before_answer()
                    self.send_response(answer)
                    self.send_header("Content-Length", "0")
                    self.send_header("Location", receiver.elsewhere)
                    self.end_headers()
                    receiver.answered += 1

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


def callback_url(port: int) -> str:
    return f"http://127.0.0.1:{port}/callback/task_result?token=t"


@contextmanager
def nobody() -> Iterator[int]:
    """A port at which nobody listens, and that nobody gets who does not ask for it: a receiver may, meanwhile."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextmanager
def receiving(*script: int | str, port: int = 0) -> Iterator[Receiver]:
    receiver = Receiver(*script, port=port)
    try:
        yield receiver
    finally:
        receiver.stop()
