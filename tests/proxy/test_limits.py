"""What a task allows a session, and how it samples: limits in every dialect's own words, auxiliary calls, values."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from google import genai
from google.genai import errors, types

from dialects import PATHS, body, post
from peers.engine import ScriptedEngine
from polar.config import PriceSettings
from polar.errors import TaskFault
from polar.protocols import Rendering
from polar.requests import StrategySpec
from polar.trajectory.prefix_merging import PrefixMerging
from running_proxy import OpenSession, RunningProxy, running_proxy, until

in_every_dialect = pytest.mark.parametrize("dialect", list(PATHS))
PRICES = PriceSettings(input=0.0, output=1e6)
REFUSED = {
    "openai_chat": ("permission_error", "rate_limit_error"),
    "openai_responses": ("permission_error", "rate_limit_error"),
    "anthropic": ("permission_error", "rate_limit_error"),
    "gemini": ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED"),
}
"""the dialect's words for a limit that is reached, and for too many calls at once"""


def asked(text: str = "go", **fields: Any) -> dict[str, Any]:
    return body(text, max_tokens=100, **fields)


def word(answer: dict[str, Any]) -> str:
    error = answer["error"]
    return error.get("type") or error["status"]


@in_every_dialect
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("limits", "answered"), [({"turns": 2}, 2), ({"tokens": 6}, 2), ({"seconds": 1e-9}, 0), ({"cost": 5.5}, 2)]
)
def test_beyond_a_limit_the_error_is_the_dialects_own(
    tmp_path: Path,
    engine: ScriptedEngine,
    rendering: Rendering,
    dialect: str,
    stream: bool,
    limits: dict[str, Any],
    answered: int,
) -> None:
    engine.script({"text": "ab"}, {"text": "cd"})  # three tokens each, with their ends
    with running_proxy(tmp_path, engine.url, rendering, prices=PRICES) as proxy:
        session = proxy.open(limits=limits)
        for _ in range(answered):
            assert post(session, dialect, asked(), stream=stream).status_code == 200
        assert session.log.refusals == []
        refused = post(session, dialect, asked(), stream=stream)
        record, log = session.end()
    [name] = limits
    assert (refused.status_code, word(refused.json())) == (403, REFUSED[dialect][0])
    assert refused.headers["x-should-retry"] == "false"
    assert f"{limits[name]:g} {name}" in refused.json()["error"]["message"]
    assert (record.limit, record.fault, record.completions) == (name, None, answered)
    assert [each.reason for each in log.refusals] == ["limit"]


@in_every_dialect
def test_calls_beyond_those_allowed_at_once_are_told_to_wait(
    engine: ScriptedEngine, proxy: RunningProxy, dialect: str
) -> None:
    engine.script({"text": "hello", "hold": True})
    session = proxy.open(limits={"concurrent_calls": 1})
    with ThreadPoolExecutor() as pool:
        live = pool.submit(post, session, dialect, asked())
        until(lambda: len(engine.requests) == 1)
        busy = post(session, dialect, asked("other"))
        assert (busy.status_code, word(busy.json())) == (429, REFUSED[dialect][1])
        assert busy.headers["Retry-After"] == "1"
        assert "x-should-retry" not in busy.headers
        engine.release()
        assert live.result().status_code == 200
    assert session.end()[0].limit is None


USER = [{"role": "user", "content": "go"}]


def chat(session: OpenSession) -> Any:
    sdk = openai.OpenAI(base_url=session.url + "/v1", api_key=session.key)
    return sdk.chat.completions.create(model="policy", messages=USER)


def responses(session: OpenSession) -> Any:
    sdk = openai.OpenAI(base_url=session.url + "/v1", api_key=session.key)
    return sdk.responses.create(model="policy", input=USER)


def messages(session: OpenSession) -> Any:
    sdk = anthropic.Anthropic(base_url=session.url, api_key=session.key)
    return sdk.messages.create(model="policy", max_tokens=100, messages=USER)


def gemini(session: OpenSession) -> Any:
    options = types.HttpOptions(base_url=session.url, retry_options=types.HttpRetryOptions(initial_delay=0.01))
    sdk = genai.Client(api_key=session.key, http_options=options)
    return sdk.models.generate_content(model="policy", contents="go")


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (chat, openai.PermissionDeniedError),
        (responses, openai.PermissionDeniedError),
        (messages, anthropic.PermissionDeniedError),
        (gemini, errors.ClientError),
    ],
)
def test_no_sdk_asks_again_beyond_a_limit(
    proxy: RunningProxy, ask: Callable[[OpenSession], Any], error: type[Exception]
) -> None:
    session = proxy.open(limits={"turns": 1})
    ask(session)
    with pytest.raises(error, match="1 turns"):
        ask(session)
    assert session.end()[0].refused == 1


def test_the_token_limit_bounds_the_answer(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script({"text": "abcdef"})
    session = proxy.open(limits={"tokens": 3})
    answer = post(session, "openai_chat", asked())
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    record, log = session.end()
    assert (record.limit, len(log.calls[0].ids)) == ("tokens", 3)


def test_a_call_that_never_reached_the_engine_is_no_turn(proxy: RunningProxy) -> None:
    session = proxy.open(limits={"turns": 1})
    assert post(session, "openai_chat", asked("x" * 5000)).status_code == 400
    assert post(session, "openai_chat", asked()).status_code == 200
    assert session.end()[0].limit is None


def test_a_cost_limit_needs_prices(proxy: RunningProxy) -> None:
    with pytest.raises(TaskFault, match="prices"):
        proxy.open(limits={"cost": 1.0})


def test_prompts_cost_too(tmp_path: Path, engine: ScriptedEngine, rendering: Rendering) -> None:
    with running_proxy(tmp_path, engine.url, rendering, prices=PriceSettings(input=1e6, output=0.0)) as proxy:
        session = proxy.open(limits={"cost": 10.0})
        statuses = [post(session, "openai_chat", asked("x" * 20)).status_code for _ in range(2)]
    assert statuses == [200, 403]


def test_time_in_a_pause_is_no_ones(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    session = proxy.open(limits={"seconds": 5.0})
    assert proxy.run(proxy.proxy.pause("drain", 60.0))
    until(lambda: proxy.proxy.paused_seconds() > 5.5)
    proxy.on_loop(proxy.proxy.resume)
    assert post(session, "openai_chat", asked()).status_code == 200


# Sampling


@in_every_dialect
def test_auxiliary_calls_are_known_by_their_alias(engine: ScriptedEngine, proxy: RunningProxy, dialect: str) -> None:
    session = proxy.open(limits={"turns": 1})
    path = PATHS[dialect].replace("models/policy", "models/policy-aux")
    for _ in range(2):  # they are no turns
        assert session.post(asked("title?") | {"model": "policy-aux"}, path).status_code == 200
    assert post(session, dialect, asked()).status_code == 200
    record, log = session.end()
    assert [call.opened.auxiliary for call in log.calls] == [True, True, False]
    assert (record.completions, record.limit) == (3, None)
    own = sum(len(call.ids) for call in log.calls[:2])
    without, included = (
        PrefixMerging(StrategySpec()).build(log, include_auxiliary=included) for included in (False, True)
    )
    assert without.tokens.excluded == {"auxiliary_call": own}
    assert (len(without.traces), len(included.traces)) == (1, 3)
    assert included.tokens.trainable == included.tokens.sampled


@in_every_dialect
def test_the_tasks_sampling_wins_and_is_recorded(engine: ScriptedEngine, proxy: RunningProxy, dialect: str) -> None:
    forced = {"temperature": 0.7, "max_tokens": 40, "top_k": 5}
    harness = {"temperature": 0.0, "top_p": 0.5, "max_output_tokens": 100}
    config = {"temperature": 0.0, "topP": 0.5, "maxOutputTokens": 100}
    session = proxy.open(sampling=forced)
    assert post(session, dialect, asked(**harness, generationConfig=config)).status_code == 200
    [given] = (request["sampling_params"] for request in engine.requests)
    assert (given["temperature"], given["max_new_tokens"], given["top_k"], given["top_p"]) == (0.7, 40, 5, 0.5)
    used = session.end()[1].calls[0].opened.sampling
    assert (used["temperature"], used["max_tokens"], used["top_k"], used["top_p"]) == (0.7, 40, 5, 0.5)


def test_a_seed_is_a_base_and_sessions_never_sample_alike(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    forced = {"seed": 1}
    sessions = [proxy.open(sampling=forced), proxy.open(sampling=forced, session_index=1)]
    for session in sessions:
        post(session, "openai_chat", asked(seed=5))
    first, other = (request["sampling_params"]["sampling_seed"] for request in engine.requests)
    assert first not in (1, 5, other)
    assert sessions[0].end()[1].calls[0].opened.sampling["seed"] == first
