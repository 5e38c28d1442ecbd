"""Runs a rollout server as a process of its own: settings as JSON in argv[1], the token in argv[2]; prints its URL.
SIGINT ends it as Ctrl-C does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

from polar.config import RolloutSettings
from polar.server import serve


def main() -> None:
    settings = RolloutSettings.model_validate(json.loads(sys.argv[1]))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(settings, token=sys.argv[2], ready=lambda url: print(url, flush=True)))


if __name__ == "__main__":
    main()
