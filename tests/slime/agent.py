"""The harness of these tests, run in a sandbox: two turns, and what its session's number within the group asks for.

Session 1 also asks a helper (a second trace); session 2 makes no call at all where the prompt says "hard".
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request


def ask(messages: list[dict[str, str]]) -> str:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as answer:
        message = json.load(answer)["choices"][0]["message"]
    messages.append(message)
    return message["content"]


def main(number: int) -> None:
    with open(os.environ["SESSION_DIR"] + "/instruction.txt") as file:
        task = file.read()
    if number == 2 and "hard" in task:
        sys.exit("too hard")
    messages = [{"role": "user", "content": task}]
    first = ask(messages)
    if number == 1:
        ask([{"role": "system", "content": "You help."}, {"role": "user", "content": "is it " + first + "?"}])
    messages.append({"role": "user", "content": "go on"})
    with open(os.environ["ARTIFACTS_DIR"] + "/answer.txt", "w") as file:
        file.write(ask(messages))


if __name__ == "__main__":
    main(int(os.environ["SESSION_ID"].rsplit("-", 2)[1][1:]))
