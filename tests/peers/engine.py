"""The scripted engine: SGLang's /generate or chat completions, each answer and each fault written down beforehand.

A script is a list of steps, one a generation; when it is used up, the engine says "ok", or with `numbered` "answer 1",
"answer 2", …, so that no two answers are alike. A step is a dict:
  ids or text      what is sampled (text is encoded, and the end of turn appended unless finish is length or abort)
  finish           stop (default), length or abort;  matched: what stopped it
  logprobs         one a token; else -0.5 each. A shorter list is a misaligned answer; null, NaN and infinities are sent
  version          policy version of the answer;  fault: see FAULTS;  after: tokens handed over before the fault or hold
  hold             stays silent (after `after` tokens) until POST /control/release
  pace             seconds between two tokens of a stream
  drift            [[ids], [ids]]: chat only, the first replaced by the second in the prompt that the engine claims
  message          chat only: the message instead of one with the text
  probe            this step is for a gateway's probe
  without          names of fields that a router in between has dropped
Runs in a thread (`scripted_engine`) or as a process of its own (`python engine.py --port N --tokenizer FOLDER`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jinja2
from aiohttp import web
from tokenizers import Tokenizer

FAULTS = ("500", "overflow", "hang", "drop", "error_event", "no_ids")
CONTEXT = 4096


class Machine:
    def __init__(self, tokenizer: Path | None, incremental: bool, numbered: bool = False) -> None:
        self.numbers = itertools.count(1) if numbered else None
        self.script: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.incremental = incremental
        self.context = CONTEXT
        self.released = asyncio.Event()
        self.stopped: dict[str, asyncio.Event] = {}
        self.tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json")) if tokenizer else None
        config = json.loads((tokenizer / "tokenizer_config.json").read_text()) if tokenizer else {}
        self.end = self.tokenizer.token_to_id(config["eos_token"]) if self.tokenizer else 9
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        self.template = environment.from_string(config.get("chat_template", ""))
        self.folder = str(tokenizer) if tokenizer else None

    def step(self, body: dict[str, Any]) -> dict[str, Any]:
        """The script's next step. A gateway's probe, whenever it comes, takes only a step that says it is for one."""
        probe = body.get("input_ids") == [1] or (body.get("max_tokens") == 1 and len(body["messages"]) == 1)
        if self.script and bool(self.script[0].get("probe")) == probe:
            return self.script.pop(0)
        if self.numbers is not None and not probe:
            return {"text": f"answer {next(self.numbers)}"}
        return {"text": "ok"} if self.tokenizer else {"ids": [7, 9]}

    def ids(self, step: dict[str, Any]) -> list[int]:
        if "ids" in step:
            return step["ids"]
        ids = self.tokenizer.encode(step["text"], add_special_tokens=False).ids
        return ids if step.get("finish") in ("length", "abort") else [*ids, self.end]

    def render(self, body: dict[str, Any]) -> list[int]:
        text = self.template.render(
            messages=body["messages"], tools=body.get("tools"), add_generation_prompt=True, bos_token=""
        )
        return self.tokenizer.encode(text, add_special_tokens=False).ids


class Answer:
    """One generation, in the words of one API."""

    def __init__(self, machine: Machine, step: dict[str, Any], body: dict[str, Any]) -> None:
        self.machine, self.step, self.body = machine, step, body
        self.all_ids = machine.ids(step)
        limit = (body.get("sampling_params") or {}).get("max_new_tokens") or body.get("max_tokens")
        self.ids = self.all_ids[:limit]
        default = "length" if len(self.ids) < len(self.all_ids) else "stop"
        self.finish = default if default == "length" else step.get("finish", default)
        self.logprobs = step.get("logprobs", [-0.5] * len(self.ids))

    def matched(self, default: Any = None) -> Any:
        return self.step.get("matched", self.ids[-1] if self.finish == "stop" and self.ids else default)

    def done(self, document: dict[str, Any]) -> dict[str, Any]:
        for name in self.step.get("without", []):
            document.pop(name, None)
        return document


class Generate(Answer):
    """SGLang's /generate."""

    def whole(self) -> dict[str, Any]:
        return self.event(0, len(self.ids), last=True, cumulative=True)

    def start(self) -> list[dict[str, Any]]:
        return []

    def event(self, start: int, end: int, *, last: bool, cumulative: bool | None = None) -> dict[str, Any]:
        repeats = not self.machine.incremental if cumulative is None else cumulative
        first = 0 if repeats else start
        meta: dict[str, Any] = {
            "id": self.body.get("rid"),
            "finish_reason": {"type": self.finish, "matched": self.matched()} if last else None,
            "prompt_tokens": len(self.body["input_ids"]),
            "completion_tokens": end,
            "weight_version": self.step.get("version", "1"),
        }
        if self.step.get("fault") != "no_ids":
            pairs = zip(self.logprobs[first:end], self.ids[first:end], strict=False)
            meta["output_token_logprobs"] = [[logprob, number, None] for logprob, number in pairs]
        document = {"text": "", "output_ids": self.ids[first:end], "meta_info": meta}
        if self.step.get("fault") == "no_ids":
            del document["output_ids"]
        return self.done(document)

    def end(self) -> list[dict[str, Any]]:
        return []


class Chat(Answer):
    """Chat completions, with the ids that were asked for."""

    def __init__(self, machine: Machine, step: dict[str, Any], body: dict[str, Any]) -> None:
        super().__init__(machine, step, body)
        prompt = machine.render(body)
        for old, new in [step["drift"]] if "drift" in step else []:
            at = next(i for i in range(len(prompt)) if prompt[i : i + len(old)] == old)
            prompt[at : at + len(old)] = new
        self.with_ids = body.get("return_token_ids") and step.get("fault") != "no_ids"
        self.prompt = {"prompt_token_ids": prompt} if self.with_ids else {}
        self.prompt_tokens = len(prompt)

    def whole(self) -> dict[str, Any]:
        choice = {"index": 0, "message": self.message(), **self.tokens(0, len(self.ids)), **self.finished()}
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.ids)}
        return self.done({"object": "chat.completion", "choices": [choice], "usage": usage, **self.prompt})

    def start(self) -> list[dict[str, Any]]:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return [self.done({"choices": [choice], **self.prompt})]

    def event(self, start: int, end: int, *, last: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": self.text(start, end)}
        if "message" in self.step:
            delta = self.step["message"] if last else {}
            delta = delta | ({"tool_calls": calls} if (calls := _indexed(delta)) else {})
        finish = self.finished() if last else {"finish_reason": None}
        return self.done({"choices": [{"index": 0, "delta": delta, **self.tokens(start, end), **finish}]})

    def end(self) -> list[dict[str, Any]]:
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.ids)}
        return [{"choices": [], "usage": usage}]

    def message(self) -> dict[str, Any]:
        return self.step.get("message") or {"role": "assistant", "content": self.text(0, len(self.ids))}

    def text(self, start: int, end: int) -> str:
        shown = [number for number in self.ids[start:end] if number != self.machine.end]
        return self.machine.tokenizer.decode(shown, skip_special_tokens=False)

    def tokens(self, start: int, end: int) -> dict[str, Any]:
        content = [
            {"token": "x", "logprob": logprob, "top_logprobs": [{"token": "other", "logprob": -0.1}]}
            for logprob in self.logprobs[start:end]
        ]
        ids = {"token_ids": self.ids[start:end]} if self.with_ids else {}
        return {"logprobs": {"content": content}, **ids}

    def finished(self) -> dict[str, Any]:
        return {"finish_reason": self.finish, "stop_reason": self.step.get("matched")}


def _indexed(delta: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"index": at, **call} for at, call in enumerate(delta.get("tool_calls") or [])]


def make_app(machine: Machine) -> web.Application:
    async def generate(request: web.Request) -> web.StreamResponse:
        return await respond(request, Generate)

    async def chat(request: web.Request) -> web.StreamResponse:
        return await respond(request, Chat)

    async def respond(request: web.Request, kind: type[Generate] | type[Chat]) -> web.StreamResponse:
        body = await request.json()
        step = machine.step(body)
        machine.requests.append({"path": request.path, "body": body})
        fault = step.get("fault")
        if fault == "500":
            return web.json_response({"error": {"message": "scripted failure"}}, status=500)
        if fault == "overflow":
            text = f"The input (9999 tokens) is longer than the model's context length ({CONTEXT} tokens)."
            return web.json_response({"error": {"message": text}}, status=400)
        answer = kind(machine, step, body)
        rid = body.get("rid") or ""
        stopped = machine.stopped.setdefault(rid, asyncio.Event())
        if body.get("stream"):
            return await stream(request, answer, stopped)
        await interrupted(answer, stopped, len(answer.ids))
        if fault == "drop":
            request.transport.close()
        return web.Response(text=json.dumps(answer.whole()), content_type="application/json")

    async def stream(request: web.Request, answer: Generate | Chat, stopped: asyncio.Event) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(document: dict[str, Any]) -> None:
            await response.write(b"data: " + json.dumps(document).encode() + b"\n\n")

        step = answer.step
        for document in answer.start():
            await send(document)
        for at in range(len(answer.ids)):
            if at == step.get("after", 0):
                await interrupted(answer, stopped, at)
                if step.get("fault") == "drop":
                    request.transport.close()
                    return response
                if step.get("fault") == "error_event":
                    await send({"error": {"message": "scripted failure", "code": 500}})
                    return response
            at_end = at + 1 >= len(answer.ids)
            await send(answer.event(at, at + 1, last=at_end))
            if at_end:
                break
            await asyncio.sleep(step.get("pace", 0))
        if not answer.ids:
            await send(answer.event(0, 0, last=True))
        for document in answer.end():
            await send(document)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def interrupted(answer: Generate | Chat, stopped: asyncio.Event, at: int) -> None:
        """Holds; an abort meanwhile cuts the answer where it is."""
        if answer.step.get("fault") == "hang":
            await asyncio.Event().wait()
        if not answer.step.get("hold"):
            return
        waits = [asyncio.ensure_future(event.wait()) for event in (machine.released, stopped)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if stopped.is_set():
            answer.ids, answer.finish = answer.ids[: at + 1], "abort"

    async def abort(request: web.Request) -> web.Response:
        rid = (await request.json()).get("rid", "")
        machine.aborted.append(rid)
        machine.stopped.setdefault(rid, asyncio.Event()).set()
        return web.Response()

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"model_path": "scripted", "tokenizer_path": machine.folder, "weight_version": "1"})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted", "max_model_len": machine.context}]})

    async def script(request: web.Request) -> web.Response:
        machine.script += await request.json()
        machine.released.clear()
        return web.Response()

    async def context(request: web.Request) -> web.Response:
        machine.context = await request.json()
        return web.Response()

    async def release(request: web.Request) -> web.Response:
        machine.released.set()
        return web.Response()

    async def seen(request: web.Request) -> web.Response:
        return web.json_response({"requests": machine.requests, "aborted": machine.aborted})

    app = web.Application(client_max_size=1 << 28)
    app.add_routes(
        [
            web.post("/generate", generate),
            web.post("/v1/chat/completions", chat),
            web.post("/abort_request", abort),
            web.get("/health", health),
            web.get("/server_info", info),
            web.get("/v1/models", models),
            web.post("/control/script", script),
            web.post("/control/context", context),
            web.post("/control/release", release),
            web.get("/control/seen", seen),
        ]
    )
    return app


async def serve(sock: socket.socket, machine: Machine, stop: asyncio.Event) -> None:
    runner = web.AppRunner(make_app(machine), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    await stop.wait()
    await runner.cleanup()


class ScriptedEngine:
    """The test's side, over HTTP whichever way the engine runs."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=10)

    def script(self, *steps: dict[str, Any]) -> None:
        self._http.post("/control/script", content=json.dumps(steps)).raise_for_status()

    def context(self, length: int) -> None:
        """What it says its context length is."""
        self._http.post("/control/context", content=json.dumps(length)).raise_for_status()

    def release(self) -> None:
        self._http.post("/control/release").raise_for_status()

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Bodies of the generations asked for so far."""
        return [request["body"] for request in self._http.get("/control/seen").json()["requests"]]

    @property
    def aborted(self) -> list[str]:
        return self._http.get("/control/seen").json()["aborted"]


@contextlib.contextmanager
def scripted_engine(
    tokenizer: Path | None = None, *, incremental: bool = False, numbered: bool = False, port: int = 0
) -> Iterator[ScriptedEngine]:
    sock = socket.create_server(("127.0.0.1", port))
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    machine = Machine(tokenizer, incremental, numbered)
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(sock, machine, stop),))
    thread.start()
    try:
        yield ScriptedEngine(f"http://127.0.0.1:{sock.getsockname()[1]}")
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--incremental", action="store_true")
    options = parser.parse_args()
    sock = socket.create_server(("127.0.0.1", options.port))
    print(f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True)

    async def run() -> None:
        await serve(sock, Machine(options.tokenizer, options.incremental), asyncio.Event())

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


if __name__ == "__main__":
    main()
