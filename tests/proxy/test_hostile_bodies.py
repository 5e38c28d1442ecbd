"""Bodies that a parser could choke on get the dialect's own 400, never a 500 that a client would repeat."""

from __future__ import annotations

import httpx
import pytest

from dialects import PATHS
from running_proxy import RunningProxy


@pytest.mark.parametrize("path", PATHS.values())
def test_a_body_nested_without_end_is_the_callers_mistake(proxy: RunningProxy, path: str) -> None:
    session = proxy.open()
    deep = b"[" * 100_000
    for body in (b'{"messages": ' + deep, b'{"messages": ' + deep + b"]" * 100_000 + b"}"):
        answer = httpx.post(session.url + path, content=body, headers={"Authorization": f"Bearer {session.key}"})
        assert answer.status_code == 400
        assert "error" in answer.json()
