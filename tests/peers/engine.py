"""The scripted engine: SGLang's /generate, chat completions and, where it `offers` them, vLLM's routes of token ids,
each answer and each fault written down beforehand.

A script is a list of steps, one a generation; when it is used up, the engine says "ok", or with `numbered` "answer 1",
"answer 2", …, so that no two answers are alike, nor the logprobs of neighbouring tokens. A step is a dict:
  ids or text      what is sampled (text is encoded, and the end of turn appended unless finish is length or abort)
  finish           stop (default), length or abort;  matched: what stopped it
  logprobs         one a token; else -0.5 each. A shorter list is a misaligned answer; null, NaN and infinities are sent
  version          policy version of the answer;  fault: see FAULTS;  after: tokens handed over before the fault or hold
  hold             stays silent (after `after` tokens) until POST /control/release
  pace             seconds between two tokens of a stream
  drift            [[ids], [ids]]: chat only, the first replaced by the second in the prompt that the engine claims
  message          chat only: the message instead of one with the text
  tells            chat only: the field with the ids: token_ids (default), response_token_ids, meta_info or sglext
  deltas           chat only, streamed: what the event of each token says, instead of its text
  probe            this step is for a gateway's probe
  versions         [[start, end, version]] instead of `version`: new weights within an answer
  refuse           the words of a 400
  says             /generate only: fields of meta_info that its last event has instead of the true ones
  without          names of fields that a router in between has dropped
Runs in a thread (`scripted_engine`) or as a process of its own (`python -m peers.engine --port N --tokenizer FOLDER`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import jinja2
from aiohttp import web
from tokenizers import Tokenizer

from peers.engine_answers import Answer, Chat, Completions, Generate, Tokens

FAULTS = ("500", "html", "overflow", "hang", "drop", "error_event", "no_ids")
CONTEXT = 4096


class Machine:
    def __init__(
        self, tokenizer: Path | None, incremental: bool, numbered: bool = False, mode: str = "sampling_temperature"
    ) -> None:
        self.mode = mode
        self.numbers = itertools.count(1) if numbered else None
        self.script: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.incremental = incremental
        self.context = CONTEXT
        self.version = "1"
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
        given = [body.get(name) for name in ("input_ids", "token_ids", "prompt")]
        probe = [1] in given or (body.get("max_tokens") == 1 and len(body.get("messages", [])) == 1)
        if self.script and bool(self.script[0].get("probe")) == probe:
            return self.script.pop(0)
        if self.numbers is not None and not probe:
            number = next(self.numbers)
            return {"text": f"answer {number}", "logprobs": [-((number + at) % 64 + 1) / 64 for at in range(CONTEXT)]}
        return {"text": "ok"} if self.tokenizer else {"ids": [7, 9]}

    def ids(self, step: dict[str, Any]) -> list[int]:
        if "ids" in step:
            return step["ids"]
        ids = self.tokenizer.encode(step["text"], add_special_tokens=False).ids
        return ids if step.get("finish") in ("length", "abort") else [*ids, self.end]

    def render(self, body: dict[str, Any]) -> list[int]:
        messages = [{**message, "content": _text(message["content"])} for message in body["messages"]]
        text = self.template.render(
            messages=messages, tools=body.get("tools"), add_generation_prompt=True, bos_token=""
        )
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def _text(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return "".join(part.get("text", "[image]") for part in content)


KINDS: dict[str, type[Answer]] = {
    "/generate": Generate,
    "/v1/chat/completions": Chat,
    "/inference/v1/generate": Tokens,
    "/v1/completions": Completions,
}
ALWAYS = ("/generate", "/v1/chat/completions")


def make_app(machine: Machine, offers: Sequence[str] = ()) -> web.Application:
    async def respond(request: web.Request) -> web.StreamResponse:
        kind = KINDS[request.path]
        try:
            return await answered(request, kind)
        except asyncio.CancelledError:
            if kind in (Tokens, Completions):
                machine.aborted.append(request.path)
            raise

    async def answered(request: web.Request, kind: type[Answer]) -> web.StreamResponse:
        body = await request.json()
        step = machine.step(body)
        machine.requests.append({"path": request.path, "body": body})
        fault = step.get("fault")
        if fault == "500":
            return web.json_response({"error": {"message": "scripted failure"}}, status=500)
        if fault == "html":
            return web.Response(text="<html><body>Welcome</body></html>", content_type="text/html")
        if fault == "overflow":
            text = f"The input (9999 tokens) is longer than the model's context length ({CONTEXT} tokens)."
            return web.json_response({"error": {"message": text}}, status=400)
        if "refuse" in step:
            return web.json_response({"error": {"message": step["refuse"]}}, status=400)
        answer = kind(machine, step, body)
        machine.requests[-1]["sampled"] = list(zip(answer.ids, answer.logprobs, strict=False))
        rid = body.get("rid") or ""
        stopped = machine.stopped.setdefault(rid, asyncio.Event())
        if body.get("stream"):
            return await stream(request, answer, stopped)
        await interrupted(answer, stopped, len(answer.ids))
        if fault == "drop":
            request.transport.close()
        return web.Response(text=json.dumps(answer.whole()), content_type="application/json")

    async def stream(request: web.Request, answer: Answer, stopped: asyncio.Event) -> web.StreamResponse:
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

    async def interrupted(answer: Answer, stopped: asyncio.Event, at: int) -> None:
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
        told = {"model_path": "scripted", "tokenizer_path": machine.folder, "weight_version": machine.version}
        return web.json_response(told)

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted", "max_model_len": machine.context}]})

    async def script(request: web.Request) -> web.Response:
        machine.script += await request.json()
        machine.released.clear()
        return web.Response()

    async def context(request: web.Request) -> web.Response:
        machine.context = await request.json()
        return web.Response()

    async def version(request: web.Request) -> web.Response:
        machine.version = await request.json()
        return web.Response()

    async def release(request: web.Request) -> web.Response:
        machine.released.set()
        return web.Response()

    async def seen(request: web.Request) -> web.Response:
        return web.json_response({"requests": machine.requests, "aborted": machine.aborted})

    app = web.Application(client_max_size=1 << 28)
    app.add_routes(
        [
            *(web.post(path, respond) for path in (*ALWAYS, *offers)),
            web.post("/abort_request", abort),
            web.get("/health", health),
            web.get("/server_info", info),
            web.get("/model_info", info),
            web.get("/v1/models", models),
            web.post("/control/script", script),
            web.post("/control/context", context),
            web.post("/control/version", version),
            web.post("/control/release", release),
            web.get("/control/seen", seen),
        ]
    )
    return app


async def serve(sock: socket.socket, machine: Machine, stop: asyncio.Event, offers: Sequence[str] = ()) -> None:
    runner = web.AppRunner(make_app(machine, offers), handler_cancellation=True, shutdown_timeout=0.1)
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

    def context(self, length: int | None) -> None:
        """What it says its context length is; None: nothing."""
        self._http.post("/control/context", content=json.dumps(length)).raise_for_status()

    def version(self, name: str) -> None:
        """The policy version of what it samples from now on."""
        self._http.post("/control/version", content=json.dumps(name)).raise_for_status()

    def release(self) -> None:
        self._http.post("/control/release").raise_for_status()

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Bodies of the generations asked for so far."""
        return [request["body"] for request in self._http.get("/control/seen").json()["requests"]]

    @property
    def sampled(self) -> list[tuple[list[int], list[tuple[int, float]]]]:
        """(prompt ids, sampled ids with their logprobs) of the generations of /generate so far, probes too."""
        told = self._http.get("/control/seen").json()["requests"]
        made = [each for each in told if "sampled" in each and "input_ids" in each["body"]]
        return [(each["body"]["input_ids"], [tuple(pair) for pair in each["sampled"]]) for each in made]

    @property
    def aborted(self) -> list[str]:
        return self._http.get("/control/seen").json()["aborted"]


@contextlib.contextmanager
def scripted_engine(
    tokenizer: Path | None = None,
    *,
    incremental: bool = False,
    numbered: bool = False,
    port: int = 0,
    offers: Sequence[str] = (),
    mode: str = "sampling_temperature",
) -> Iterator[ScriptedEngine]:
    """`offers`: routes beside ALWAYS; `mode`: of which distribution its logprobs are, to a probe."""
    sock = socket.create_server(("127.0.0.1", port))
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    machine = Machine(tokenizer, incremental, numbered, mode)
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(sock, machine, stop, offers),))
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
