"""Case 3: a template that deletes earlier thinking breaks the prefix: more traces, and no sampled token lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.engine import ScriptedEngine, scripted_engine
from peers.tokenizer import CHATML, make_tokenizer
from polar.proxy import load_rendering
from polar.records import BuildResult
from running_proxy import OpenSession, running_proxy, user

FORGETFUL = CHATML.replace("message.content }}", "message.content.split('</think>')[-1] }}", 1)
THOUGHT = "<think>" + "hm " * 10 + "</think>"


def three_turns(session: OpenSession, engine: ScriptedEngine) -> BuildResult:
    messages = [user("one")]
    for number in range(3):
        engine.script({"text": f"{THOUGHT}answer"})
        session.turn(messages)
        messages.append(user(f"next {number}"))
    session.end()
    return session.build()


@pytest.fixture
def forgetful(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "forgetful", FORGETFUL)


def test_an_engine_that_deletes_thinking(forgetful: Path, tmp_path: Path) -> None:
    with (
        scripted_engine(forgetful) as engine,
        running_proxy(tmp_path, engine.url, None, engine="vllm", context_length=None) as proxy,
    ):
        built = three_turns(proxy.open(), engine)
    assert len(built.traces) >= 2
    assert sum(trace.trainable for trace in built.traces) == built.tokens.sampled


@pytest.mark.parametrize(("reasoning", "traces"), [("keep", 1), ("template", 3), ("tool_cycle", 3)])
def test_the_task_decides_whether_thinking_is_kept(
    forgetful: Path, tmp_path: Path, reasoning: str, traces: int
) -> None:
    with (
        scripted_engine(forgetful) as engine,
        running_proxy(tmp_path, engine.url, load_rendering(forgetful)) as proxy,
    ):
        session = proxy.open(reasoning=reasoning)
        built = three_turns(session, engine)
        whys = [call.prompt.why for call in session.log.calls]
    assert len(built.traces) == traces
    assert whys == [None, *[None if traces == 1 else "reasoning"] * 2]
    assert sum(trace.trainable for trace in built.traces) == built.tokens.sampled
