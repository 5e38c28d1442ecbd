"""The gateway's view of its engine: nothing is leased before a probe has passed, and a session that ended in an
engine fault casts doubt that only the next probe lifts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from polar.config import NodeSettings
from polar.errors import PolarError
from polar.nodeapi import EngineState
from polar.protocols import Engine, EngineFacts, Rendering
from polar.proxy import ModelProxy, load_rendering
from polar.records import LogprobMode

log = structlog.get_logger("polar.gateway")
_WAITING_SECONDS, _HEALTHY_SECONDS = 1.0, 15.0
_FAILURES = 2
"""A busy engine may miss one probe."""


class EngineWatch:
    """Probes for ever. `proxy` is there from the first good probe on; `ready` is set from then on."""

    def __init__(self, engine: Engine, node: NodeSettings, news: asyncio.Event) -> None:
        """`news` is set whenever the engine's health changes."""
        self.engine = engine
        self.proxy: ModelProxy | None = None
        self.ready = asyncio.Event()
        self.state = EngineState(kind=engine.kind, healthy=False, problem="not probed yet")
        self._node = node
        self._news = news
        self._doubt = asyncio.Event()
        self._failures = 0
        self._mode: LogprobMode | None = None

    def doubt(self) -> None:
        """Takes the engine as unhealthy until a probe says otherwise."""
        self.state.healthy = False
        self.state.problem = "a session met an engine fault; probing"
        self._failures = _FAILURES
        self._doubt.set()
        self._news.set()

    async def watch(self) -> None:
        while True:
            self._doubt.clear()
            if (facts := await self._probe()) is None:
                continue
            self._judge(facts)
            pause = _HEALTHY_SECONDS if self.state.healthy and not self._failures else _WAITING_SECONDS
            try:
                async with asyncio.timeout(pause):
                    await self._doubt.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(_WAITING_SECONDS / 4)

    async def _probe(self) -> EngineFacts | None:
        """None: a pause has cut it short. While inference is paused the engine may be asleep, its memory the trainer's,
        and even a probe would be a fault of it."""
        if self.proxy is None:
            return await self.engine.probe()
        return await self.proxy.probe()

    def _judge(self, facts: EngineFacts) -> None:
        problem = facts.problem or (None if facts.healthy else f"the engine {self.engine.base_url} does not answer")
        if problem is None and self.proxy is None:
            problem = self._make_proxy(facts)
        elif problem is None and None not in (facts.logprob_mode, self._mode) and facts.logprob_mode != self._mode:
            problem = f"the engine's logprobs were {self._mode} and are {facts.logprob_mode}: start the gateway again"
        self._failures = self._failures + 1 if problem else 0
        if problem and self.proxy is not None and self._failures < _FAILURES:
            return
        if problem != self.state.problem:
            log.warning("engine", problem=problem) if problem else log.info("engine is healthy", kind=facts.kind)
        if (problem is None) != self.state.healthy:
            self._news.set()
        self.state = EngineState(
            kind=facts.kind, healthy=problem is None, version=facts.version, model=facts.model, problem=problem
        )

    def _make_proxy(self, facts: EngineFacts) -> str | None:
        """Returns why it could not be made."""
        rendering: Rendering | None = None
        if self.engine.takes_ids:
            folder = self._node.inference.tokenizer or facts.tokenizer_path
            if not folder:
                return "the engine does not say where its tokenizer is: give its folder (tokenizer, --tokenizer)"
            try:
                rendering = load_rendering(Path(folder), self._node.inference.rendering)
            except (PolarError, OSError) as error:
                return f"the tokenizer folder {folder} cannot be used: {error}"
        self.proxy = ModelProxy(
            self.engine,
            rendering,
            model=self._node.model_served,
            context_length=facts.context_length,
            logprob_mode=facts.logprob_mode,
            prices=self._node.prices,
        )
        self._mode = facts.logprob_mode
        self.ready.set()
        return None
