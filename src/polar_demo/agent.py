"""The demo's agent: it looks into a file, then answers. It runs alone in a sandbox with the standard library, and all
it knows of its model is a base URL and a key.

One run in fifty or so breaks before it asks anything, and a task may say that the agent compacts its history (it then
goes on in a new conversation): a trainer has to live with both.
"""

import json
import os
import socket
import zlib


def ask(messages: list[dict[str, str]]) -> str:
    """One chat completion; the text of its answer."""
    host, _, port = os.environ["OPENAI_BASE_URL"].removeprefix("http://").removesuffix("/v1").partition(":")
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    top, _, document = answer.partition(b"\r\n\r\n")
    if b" 200 " not in top.partition(b"\r\n")[0]:
        raise SystemExit(f"the model said no: {answer.decode()}")
    return json.loads(document)["choices"][0]["message"]["content"] or ""


def look_up(files: dict[str, str], said: str) -> str:
    """The tool."""
    words = said.split()
    if len(words) != 2 or words[0] != "read" or words[1] not in files:
        return "error : no such file"
    return files[words[1]]


def main() -> None:
    if zlib.crc32(os.environ["SESSION_ID"].encode()) % 50 == 0:
        raise SystemExit("broken on purpose")
    folder = os.environ["SESSION_DIR"]
    with open(f"{folder}/instruction.txt") as file:
        question = {"role": "user", "content": file.read()}
    with open(f"{folder}/world.json") as file:
        world = json.load(file)
    said = ask([question])
    found = {"role": "tool", "tool_call_id": "look_up", "content": look_up(world["files"], said)}
    turns = [found] if world["compact"] else [{"role": "assistant", "content": said}, found]
    with open(f"{os.environ['ARTIFACTS_DIR']}/answer.txt", "w") as file:
        file.write(ask([question, *turns]).strip() + "\n")


if __name__ == "__main__":
    main()
