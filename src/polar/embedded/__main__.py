"""`python -m polar.embedded --model FOLDER --port N`: a CPU inference engine with SGLang's face.

It prints one line, "listening on http://HOST:PORT", when it takes requests, and exits 0 at SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from contextlib import suppress

from aiohttp import web

from polar.embedded import chat, control, generate
from polar.embedded.checkpoint import Checkpoint, load_checkpoint
from polar.embedded.engine import Engine, errors
from polar.embedded.scheduler import Scheduler

MAX_BODY = 64 * 2**20  # a prompt of a million ids is about 8 MB of JSON


def main() -> None:
    args = _arguments()
    try:
        checkpoint = load_checkpoint(args.model)
    except ValueError as error:
        sys.exit(f"--model: {error}")
    sys.exit(asyncio.run(_serve(args, checkpoint)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m polar.embedded", description="CPU inference engine")
    parser.add_argument("--model", required=True, help="folder with config.json, tokenizer.json and weights")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free one; it is printed")
    parser.add_argument("--threads", type=int, default=1, help="torch's; sandboxes want the other cores")
    parser.add_argument("--max-running-requests", type=int, default=64)
    parser.add_argument("--weight-version", default="default", help="the policy version of --model")
    parser.add_argument(
        "--incremental-streaming-output", action="store_true", help="streamed events hold what is new only"
    )
    return parser.parse_args()


async def _serve(args: argparse.Namespace, checkpoint: Checkpoint) -> int:
    """The exit code: 0 where it was told to end, 1 where the model's thread failed."""
    scheduler = Scheduler(
        checkpoint, weight_version=args.weight_version, max_running=args.max_running_requests, threads=args.threads
    )
    engine = Engine(checkpoint, scheduler, args.incremental_streaming_output)
    app = web.Application(middlewares=[errors], client_max_size=MAX_BODY)
    for room in (generate, chat, control):
        app.add_routes(room.routes(engine))
    # A client that went away cancels its handler, and with it the sequence.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, args.host, args.port).start()
    host, port = runner.addresses[0][:2]
    print(f"listening on http://{host}:{port}", flush=True)
    await _told_to_end(scheduler)
    await runner.cleanup()
    await scheduler.close()
    return int(scheduler.failed.is_set())


async def _told_to_end(scheduler: Scheduler) -> None:
    loop = asyncio.get_running_loop()
    waiting = asyncio.create_task(scheduler.failed.wait())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, waiting.cancel)
    with suppress(asyncio.CancelledError):
        await waiting


if __name__ == "__main__":
    main()
