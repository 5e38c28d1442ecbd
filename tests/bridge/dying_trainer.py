"""A trainer as a process of its own that takes one rollout, or with "eval" one evaluation, and waits to be killed:
argv[1] is what its args change."""

from __future__ import annotations

import json
import sys

from tests.bridge.making import arguments
from tests.peers.trainer import Trainer

if __name__ == "__main__":
    trainer = Trainer(arguments(**json.loads(sys.argv[1])))
    _ = trainer.evaluate(0) if sys.argv[2:] == ["eval"] else trainer.rollout(0)
    print("done", flush=True)
    sys.stdin.read()
