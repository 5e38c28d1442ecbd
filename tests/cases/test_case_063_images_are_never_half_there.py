"""Case 63: images at the first and the third turn. The trainer gets no features, so nothing that stands behind an image
is trained: such tokens are excluded by name, a group that has no others is dropped, and a data set with pictures is
refused before the first task. No prompt is ever cut, so no image is cut in half."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.bridge.making import arguments, group

from peers.engine import ScriptedEngine, scripted_engine
from polar.errors import ConfigError
from polar.nodeapi import NodeResult
from polar.public import session_result
from polar.records import Drop, SessionStatus, TaskResult, TaskState, Termination
from running_proxy import RunningProxy, running_proxy
from slime_bridge.acceptance import Dropped, Group, judge
from slime_bridge.fitting import ConversionRules
from slime_bridge.preflight import check_args

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
SHOWN = {"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]}
SAID = {"role": "user", "content": "go on"}


@pytest.fixture
def engine(tokenizer: Path) -> Iterator[ScriptedEngine]:
    with scripted_engine(tokenizer) as made:
        yield made


@pytest.fixture
def proxy(engine: ScriptedEngine, tmp_path: Path) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path, engine.url, None, engine="vllm", context_length=None) as made:
        yield made


def judged(proxy: RunningProxy, *turns: dict[str, Any]) -> tuple[Group | Dropped, NodeResult]:
    """What the bridge makes of a group of one session with these turns, all of which the engine was shown."""
    session = proxy.open()
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages.append(turn)
        session.turn(messages)
    session.end()
    built = session.build()
    for trace in built.traces:
        trace.reward = 1.0
    ended = NodeResult(
        session_id="s",
        attempt=1,
        node_id="n",
        epoch=1,
        status=SessionStatus.COMPLETED,
        termination=Termination.DONE,
        traces=built.traces,
        tokens=built.tokens,
        calls=built.calls,
    )
    result = TaskResult(task_id="t", status=TaskState.COMPLETED, results=[session_result(ended, "t", 0)])
    return judge(result, group(1), ConversionRules(), submitted=0, min_fraction=0.0), ended


def test_images_from_the_first_turn_on_leave_nothing_to_train(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    verdict, ended = judged(proxy, SHOWN, SAID, SHOWN)
    assert isinstance(verdict, Dropped)
    assert verdict.reason is Drop.ZERO_TRAINABLE
    assert ended.tokens is not None
    assert ended.tokens.excluded == {"images": ended.tokens.sampled}
    shown = [len([each for each in request["messages"] if "image_url" in str(each)]) for request in engine.requests]
    assert shown == [1, 1, 2], "the engine had each of them"


def test_what_was_said_before_an_image_is_trained_and_what_follows_is_not(proxy: RunningProxy) -> None:
    verdict, ended = judged(proxy, SAID, SAID, SHOWN)
    assert isinstance(verdict, Group)
    assert ended.tokens is not None
    assert verdict.trained == ended.tokens.trainable == ended.tokens.sampled - ended.tokens.excluded["images"]
    assert 0 < verdict.trained < ended.tokens.sampled
    assert "image_url" not in str([sample.prompt for traces in verdict.samples for sample in traces])


def test_a_data_set_with_pictures_is_refused_by_name() -> None:
    args = arguments(multimodal_keys={"image": "images"})
    with pytest.raises(ConfigError, match="multimodal_keys"):
        check_args(args)
