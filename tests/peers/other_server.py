"""Another implementation of the rollout server's API, scripted: JSON alone, and only the fields and routes that every
implementation has. One task, which is over at the third look at it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NODE = {
    "node_id": "gpu-1",
    "gateway_url": "http://gpu-1:8100",
    "max_init_workers": 4,
    "max_run_workers": 2,
    "max_postrun_workers": 4,
    "heartbeat_interval_seconds": 5.0,
    "metrics": dict.fromkeys(
        ("init_queue_depth", "init_inflight", "ready_depth", "run_inflight", "postrun_queue_depth", "postrun_inflight"),
        0,
    ),
    "healthy": True,
    "draining": False,
    "last_heartbeat": 1700000000.0,
}
TIMING = {"register_to_init_queue_ms": 1.0, "init_ms": 2.0, "run_ms": 3.0, "postrun_ms": 4.0}
SESSION = {"session_id": "s-1", "task_id": "t", "status": "COMPLETED", "node_id": "gpu-1", "timing": TIMING}
TRACE = {
    "prompt_ids": [1, 2],
    "response_ids": [3, 4],
    "loss_mask": [1, 1],
    "prompt_messages": [{"role": "user", "content": "hi"}],
    "response_messages": [{"role": "assistant", "content": "ho"}],
    "tools": None,
    "finish_reason": "stop",
    "response_logprobs": [-0.5, -1],
    "reward": 1,
    "metadata": {},
}
TRAJECTORY = {"status": "COMPLETED", "metadata": {}, "traces": [TRACE], "error": None}
RESULT = SESSION | {"trajectory": TRAJECTORY, "error": None, "metadata": {}}
SUMMARY = {
    "task_id": "t",
    "status": "completed",
    "harness": "shell",
    "model": "policy",
    "num_samples": 1,
    "completed_sessions": 1,
    "errored_sessions": 0,
    "mean_reward": 1.0,
    "mean_traces": 1.0,
    "mean_completions": None,
    "created_at": 1700000000.0,
    "updated_at": 1700000001.0,
    "source": None,
}
STREAM = "".join(
    f"event: {kind}\ndata: {json.dumps({'type': kind, 'ts': 1700000000.0, 'data': data})}\n\n: a comment\n\n"
    for kind, data in (("hello", {}), ("task.created", {"task_id": "t"}), ("task.completed", {"task_id": "t"}))
)
FAULTS = {
    "html": b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>Sign in</html>",
    "bad gateway": b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\n\r\n<h1>Bad\n gateway</h1>",
    "redirect": b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n",
    "half": b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"status":',
    "nothing": b"",
    "noise": b"\x00\x01 what?\r\n\r\n",
    "other document": b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{"ok": true}',
    "no event": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {\n\n",
}


class OtherServer:
    """`fault`: one of FAULTS, in place of every answer; "hang": none comes. `seen`: the bodies of submits."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self.seen: list[dict[str, Any]] = []
        self.looks = 0
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    def document(self, method: str, path: str) -> dict[str, Any] | None:
        match method, path:
            case "GET", "/health":
                return {"status": "ok", "nodes": 1}
            case ("GET", "/rollout/task/t") | ("DELETE", "/rollout/task/t"):
                return self._task()
            case "GET", "/rollout/status":
                return {"tasks": {"t": "running"}, "pipeline": {"pending_sessions": 0}, "nodes": {"nodes": [NODE]}}
            case "GET", "/tasks":
                return {"tasks": [SUMMARY]}
            case "GET", "/tasks/t/sessions":
                return {"task_id": "t", "sessions": [SESSION | {"reward": 1.0, "error": None}]}
            case "GET", "/nodes":
                return {"nodes": [NODE]}
            case ("GET", "/nodes/gpu-1") | ("DELETE", "/nodes/gpu-1"):
                return NODE
        return None

    def _task(self) -> dict[str, Any]:
        self.looks += 1
        over = self.looks >= 3
        return {
            "task_id": "t",
            "status": "completed" if over else "running",
            "total_sessions": 1,
            "completed_sessions": int(over),
            "results": [RESULT] if over else [],
            "result_paths": ["/data/t/s-1.json"] if over else [],
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                if server.fault is not None:
                    self.fail(server.fault)
                elif path == "/events":
                    self.say(200, STREAM.encode(), "text/event-stream")
                elif (document := server.document(self.command, path)) is not None:
                    self.say(200, json.dumps(document).encode(), "application/json; charset=utf-8")
                else:
                    name = "Task not found" if re.match("/(rollout/task|tasks)/", path) else "Not Found"
                    self.say(404, json.dumps({"detail": name}).encode(), "application/json")

            def do_DELETE(self) -> None:
                self.do_GET()

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                if server.fault is not None or self.path != "/rollout/task/submit":
                    self.do_GET()
                    return
                server.seen.append(body)
                accepted = {"task_id": body["task_id"], "status": "running"}
                self.say(200, json.dumps(accepted).encode(), "application/json")

            def fail(self, fault: str) -> None:
                self.close_connection = True
                if fault == "hang":
                    server._released.wait(60)
                else:
                    self.wfile.write(FAULTS[fault])

            def say(self, status: int, body: bytes, media: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", media)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


@contextmanager
def other_server() -> Iterator[OtherServer]:
    server = OtherServer()
    try:
        yield server
    finally:
        server.stop()
