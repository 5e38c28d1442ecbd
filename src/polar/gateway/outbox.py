"""Results and sealed logs stay on the gateway's disk until the server has answered for them, whatever dies."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec
import structlog

from polar.codec import from_msgpack, to_msgpack
from polar.errors import ServerFault
from polar.gateway.link import Refused, ServerLink
from polar.nodeapi import NodeResult
from polar.records import SessionStatus, Termination
from polar.sessionlog import pack

log = structlog.get_logger("polar.gateway")
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 15.0


class Outbox:
    """`<folder>/<session>.<attempt>.result` beside `<session>.<attempt>.log.zst`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def log_path(self, session_id: str, attempt: int) -> Path:
        return self.folder / f"{quote(session_id, safe='')}.{attempt}.log"

    def put(self, result: NodeResult) -> Path:
        """Packs the attempt's log, if it has one, then writes the result: whole or not at all."""
        plain = self.log_path(result.session_id, result.attempt)
        if plain.exists():
            _, result.log_sha256 = pack(plain)
        target = plain.with_suffix(".result")
        partial = target.with_suffix(".part")
        with partial.open("wb") as file:
            file.write(to_msgpack(result))
            file.flush()
            os.fsync(file.fileno())
        partial.rename(target)
        plain.unlink(missing_ok=True)
        return target

    def waiting(self) -> list[Path]:
        """Results that an earlier life of this gateway did not get rid of."""
        return sorted(self.folder.glob("*.result"))

    async def deliver(self, path: Path, link: ServerLink) -> bool:
        """Uploads log and result, for as long as it takes, then deletes both. True if the result was accepted."""
        accepted = await self.send(_read(path), link)
        path.unlink(missing_ok=True)
        path.with_suffix(".log.zst").unlink(missing_ok=True)
        return accepted

    async def send(self, result: NodeResult, link: ServerLink) -> bool:
        """Log first, then result, again and again until the server has answered for both."""
        wait = _FIRST_WAIT
        while True:
            try:
                return await self._hand_over(result, link)
            except Refused as refusal:
                log.warning("result refused", session=result.session_id, attempt=result.attempt, why=refusal.message)
                return False
            except ServerFault as fault:
                log.warning("result waits", session=result.session_id, why=fault.message, seconds=wait)
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)

    def rescue(self, node_id: str, epoch: int) -> None:
        """Attempts that died with an earlier life of this gateway get the result that says so, and keep their logs."""
        for plain in self.folder.glob("*.log"):
            if plain.with_suffix(".result").exists():
                plain.unlink()
                continue
            session_id, attempt = plain.stem.rsplit(".", 1)
            self.put(_lost(unquote(session_id), int(attempt), node_id, epoch))

    async def _hand_over(self, result: NodeResult, link: ServerLink) -> bool:
        if result.log_sha256 is not None:
            packed = self.log_path(result.session_id, result.attempt).with_suffix(".log.zst")
            await link.upload(result.session_id, result.attempt, packed)
        return (await link.result(result)).accepted


def _lost(session_id: str, attempt: int, node_id: str, epoch: int) -> NodeResult:
    return NodeResult(
        session_id=session_id,
        attempt=attempt,
        node_id=node_id,
        epoch=epoch,
        status=SessionStatus.ERROR,
        termination=Termination.INFRASTRUCTURE,
        retryable=True,
        fault="gateway_lost",
        error="the gateway died while this attempt ran",
    )


def _read(path: Path) -> NodeResult:
    try:
        return from_msgpack(path.read_bytes(), NodeResult)
    except msgspec.MsgspecError as error:
        raise ServerFault(f"{path} is not a result: {error}", name="outbox_unreadable") from error
