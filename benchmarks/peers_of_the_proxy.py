"""The processes that `proxy.py` measures and those beside them: `engine`, `relay`, `proxy`, `heavy`; each prints a URL.

The engine answers after a fixed time, with the same ids, and does as little as it can; the relay is what any proxy has
to do at least: take a body, post it, hand the answer back.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import tempfile
from pathlib import Path

import aiohttp
from aiohttp import web
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from polar.garbage import collect_rarely
from polar.proxy import Attempt, ModelProxy, load_rendering, make_engine
from polar.proxy.engines import http
from polar.requests import AgentSpec, ExecInput, TaskRequest
from polar.sessionlog import LogWriter

BODY_BYTES = 256 << 20
END = "<|im_end|>"
_KNOWN = ["".join(random.Random(at).choices("aeinorstlm", k=3 + at % 5)) for at in range(4000)]
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)


def words(count: int, seed: int = 0) -> str:
    """Text with about one token a word under `make_tokenizer`."""
    source = random.Random(seed)
    return " ".join(source.choices(_KNOWN, k=count))


def make_tokenizer(folder: Path) -> Path:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=8000,
        special_tokens=["<|im_start|>", END],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([words(40_000, 1)], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": TEMPLATE}))
    return folder


async def engine(arguments: argparse.Namespace) -> web.Application:
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    ids = [*tokenizer.encode(words(arguments.sampled - 1, 2)).ids[: arguments.sampled - 1], tokenizer.token_to_id(END)]
    entries = [[-0.5, number, None] for number in ids]
    finish = {"type": "stop", "matched": ids[-1]}
    meta = {"finish_reason": finish, "completion_tokens": len(ids), "weight_version": "1"}
    generated = json.dumps({"output_ids": ids, "meta_info": meta | {"output_token_logprobs": entries}}).encode()
    choice = {"index": 0, "message": {"role": "assistant", "content": tokenizer.decode(ids)}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": len(ids), "total_tokens": len(ids) + 1}
    chat = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}

    def answering(body: bytes) -> object:
        async def answer(request: web.Request) -> web.Response:
            await request.read()
            await asyncio.sleep(arguments.seconds)
            return web.Response(body=body, content_type="application/json")

        return answer

    async def about(request: web.Request) -> web.Response:
        return web.json_response({"tokenizer_path": str(arguments.tokenizer), "weight_version": "1"})

    app = web.Application(client_max_size=BODY_BYTES)
    app.router.add_post("/generate", answering(generated))
    app.router.add_post("/v1/chat/completions", answering(json.dumps(chat).encode()))
    app.router.add_get("/{path:.*}", about)
    return app


async def relay(arguments: argparse.Namespace) -> web.Application:
    connector = aiohttp.TCPConnector(limit=0)
    client = aiohttp.ClientSession(connector=connector)

    async def forward(request: web.Request) -> web.Response:
        body = await request.read()
        headers = {"Content-Type": "application/json"}
        async with client.post(arguments.engine + "/v1/chat/completions", data=body, headers=headers) as answer:
            return web.Response(body=await answer.read(), content_type="application/json")

    app = web.Application(client_max_size=BODY_BYTES)
    app.router.add_post("/v1/chat/completions", forward)
    return app


async def serve(app: web.Application) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=8192).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


async def proxy(arguments: argparse.Namespace) -> None:
    """Keys are key-0, key-1, …: each is a session of its own with its log on disk."""
    http.POOL = arguments.connections
    collect_rarely()
    rendering = load_rendering(arguments.tokenizer)
    model = ModelProxy(await make_engine("sglang", arguments.engine), rendering, model="policy", context_length=None)
    agent = AgentSpec(harness="shell", custom_shell=ExecInput(command="true"))
    task = TaskRequest(task_id="t", instruction="do it", agent=agent)
    with tempfile.TemporaryDirectory() as folder:
        for index in range(arguments.sessions):
            names = {"session_id": f"s{index}", "task_id": "t", "attempt": 1}
            log = LogWriter(Path(folder) / f"{index}.log", model.header(**names, session_index=index, task=task))
            model.open(Attempt(**names, session_index=index, key=f"key-{index}", task=task, log=log))
        print(await model.start("127.0.0.1", 0), flush=True)
        await asyncio.Event().wait()


async def heavy(arguments: argparse.Namespace) -> None:
    """One session's client that sends much, twice a second."""
    print(arguments.proxy, flush=True)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0K" * 125_000}}
    headers = {"Authorization": f"Bearer {arguments.key}"}
    async with aiohttp.ClientSession(headers=headers) as client:
        for number in itertools.count():
            content: object = [picture] * 20 if arguments.body == "pictures" else words(170_000, number)
            body = {"model": "policy", "messages": [{"role": "user", "content": content}]}
            async with client.post(arguments.proxy + "/v1/chat/completions", json=body) as answer:
                await answer.read()
            await asyncio.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["engine", "relay", "proxy", "heavy"])
    parser.add_argument("--engine", help="URL of the engine")
    parser.add_argument("--proxy", help="URL of the proxy, for `heavy`")
    parser.add_argument("--key")
    parser.add_argument("--body", choices=["pictures", "text"])
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=0.5, help="that the engine takes")
    parser.add_argument("--sampled", type=int, default=20, help="tokens of each answer")
    parser.add_argument("--sessions", type=int, default=0)
    parser.add_argument("--connections", type=int, default=http.POOL, help="of the proxy to the engine, at most")
    arguments = parser.parse_args()
    if arguments.role in ("proxy", "heavy"):
        asyncio.run({"proxy": proxy, "heavy": heavy}[arguments.role](arguments))
    else:
        make = {"engine": engine, "relay": relay}[arguments.role]

        async def run() -> None:
            await serve(await make(arguments))

        asyncio.run(run())


if __name__ == "__main__":
    main()
