"""Relays between a client and a server that lose what their test says: whole requests going there and answers coming
back (Relay), or the connection in the middle of either (CuttingRelay)."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

KEPT_HEADERS = {"content-type", "accept", "x-polar-control-token"}


class Relay:
    """`lose_request(path, number)` and `lose_answer(path, number)`: whether to; `number` counts a path's calls from 0.
    `rewrite(body)` may change a body on the way there; `answer_instead(path)` may be the status of an answer that is
    given in the server's place. Both losses close the connection without an answer."""

    def __init__(self, target: str) -> None:
        self.lose_request: Callable[[str, int], bool] = lambda path, number: False
        self.lose_answer: Callable[[str, int], bool] = lambda path, number: False
        self.rewrite: Callable[[bytes], bytes] = lambda body: body
        self.answer_instead: Callable[[str], int | None] = lambda path: None
        self.calls: list[str] = []
        self._target = httpx.Client(base_url=target, timeout=40, trust_env=False)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        relay = self

        class Handler(BaseHTTPRequestHandler):
            def _pass(self) -> None:
                path = self.path.split("?")[0]
                number = relay.calls.count(path)
                relay.calls.append(path)
                self.close_connection = True
                body = relay.rewrite(self.rfile.read(int(self.headers.get("content-length") or 0)))
                if relay.lose_request(path, number):
                    return
                if (status := relay.answer_instead(path)) is not None:
                    self.send_error(status)
                    return
                headers = {name: value for name, value in self.headers.items() if name.lower() in KEPT_HEADERS}
                answer = relay._target.request(self.command, self.path, content=body, headers=headers)
                if relay.lose_answer(path, number):
                    return
                self.send_response(answer.status_code)
                self.send_header("Content-Type", answer.headers.get("content-type", "application/json"))
                self.send_header("Content-Length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

            def do_GET(self) -> None:
                self._pass()

            def do_POST(self) -> None:
                self._pass()

            def do_DELETE(self) -> None:
                self._pass()

            def log_message(self, *args: object) -> None:
                """Silent."""

        return Handler


class CuttingRelay:
    """Passes bytes on and counts those going there; cuts the connection whenever the count reaches one of `cuts`."""

    def __init__(self, target: str, *cuts: int) -> None:
        host, port = target.removeprefix("http://").split(":")
        self.cuts = list(cuts)
        self.sent = 0
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._target)
                threading.Thread(target=self._there, args=(client, server), daemon=True).start()
                threading.Thread(target=self._back, args=(server, client), daemon=True).start()

    def _there(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                room = self.cuts[0] - self.sent if self.cuts else len(data)
                server.sendall(data[:room])
                self.sent += len(data[:room])
                if self.cuts and self.sent >= self.cuts[0]:
                    self.cuts.pop(0)
                    break
        _cut(client, server)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)
        _cut(client, server)


def _cut(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
