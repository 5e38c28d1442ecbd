"""A trainer as a process of its own that takes one rollout and waits to be killed: argv[1] is what its args change."""

from __future__ import annotations

import json
import sys

from tests.bridge.making import arguments
from tests.peers.trainer import Trainer

if __name__ == "__main__":
    Trainer(arguments(**json.loads(sys.argv[1]))).rollout(0)
    print("done", flush=True)
    sys.stdin.read()
