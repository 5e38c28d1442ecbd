"""Results and sealed logs stay on the gateway's disk until the server has answered for them, whatever dies.

A result is there whole or not at all, and its log before it. What cannot be read again is kept aside under its own
name, and its attempt is reported lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec
import structlog
from zstandard import ZstdError

from polar.codec import from_msgpack, to_msgpack
from polar.errors import PolarError, ServerFault
from polar.gateway.link import Refused, ServerLink
from polar.nodeapi import NodeResult
from polar.records import SessionStatus, Termination
from polar.sessionlog import pack, read

log = structlog.get_logger("polar.gateway")
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 15.0
_PLAIN, _PACKED, _RESULT, _PARTIAL = ".log", ".log.zst", ".result", ".part"
_UNREADABLE, _REFUSED = ".unreadable", ".refused"
_TOKEN_WRONG = (401, 403)


class Outbox:
    """`<folder>/<session>.<attempt>.result` beside `<session>.<attempt>.log.zst`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def log_path(self, session_id: str, attempt: int) -> Path:
        return self._path(session_id, attempt, _PLAIN)

    def put(self, result: NodeResult) -> Path:
        """Packs the attempt's log, if it has one, then writes the result: whole or not at all.
        Raises OSError or ServerFault, and then the log is still there."""
        plain = self.log_path(result.session_id, result.attempt)
        if plain.exists():
            _, result.log_sha256 = pack(plain)
        target = plain.with_suffix(_RESULT)
        partial = target.with_suffix(_PARTIAL)
        try:
            with partial.open("wb") as file:
                file.write(to_msgpack(result))
                file.flush()
                os.fsync(file.fileno())
            partial.rename(target)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        plain.unlink(missing_ok=True)
        return target

    def waiting(self) -> list[Path]:
        """Results that an earlier life of this gateway did not get rid of."""
        return sorted(self.folder.glob(f"*{_RESULT}"))

    async def deliver(self, path: Path, link: ServerLink) -> bool:
        """Uploads log and result, for as long as it takes, then deletes both. True if the result was accepted. What the
        server refuses for good is kept aside."""
        try:
            result = _read(path)
        except (ServerFault, OSError) as error:  # `rescue` deals with it at the next start
            log.error("a result is damaged", file=path.name, why=str(error))
            return False
        packed = path.with_suffix(_PACKED)
        try:
            accepted = await self.send(result, link)
        except Refused:
            _set_aside(path, _REFUSED)
            _set_aside(packed, _REFUSED)
            return False
        path.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)
        return accepted

    async def send(self, result: NodeResult, link: ServerLink) -> bool:
        """Log first, then result, again and again until the server has answered for both. Raises Refused when it takes
        neither, now or later; a token that is not its own may yet become so."""
        wait = _FIRST_WAIT
        while True:
            try:
                return await self._hand_over(result, link)
            except (ServerFault, OSError) as fault:
                if isinstance(fault, Refused) and fault.status not in _TOKEN_WRONG:
                    log.error("result refused", session=result.session_id, attempt=result.attempt, why=fault.message)
                    raise
                if wait == _FIRST_WAIT:
                    log.warning("result waits", session=result.session_id, why=str(fault))
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)

    async def _hand_over(self, result: NodeResult, link: ServerLink) -> bool:
        if result.log_sha256 is not None:
            packed = self._path(result.session_id, result.attempt, _PACKED)
            await link.upload(result.session_id, result.attempt, packed)
        return (await link.result(result)).accepted

    def _path(self, session_id: str, attempt: int, kind: str) -> Path:
        return self.folder / f"{quote(session_id, safe='')}.{attempt}{kind}"

    # What an earlier life has left

    def rescue(self, node_id: str, epoch: int) -> None:
        """Attempts that died with an earlier life of this gateway get the result that says so, and keep their logs.
        Afterwards every result is one that can be delivered, and nothing lies half-written."""
        for partial in self.folder.glob(f"*{_PARTIAL}"):
            partial.unlink()
        for path in self.waiting():
            if problem := self._damage(path):
                log.error("a result is damaged", file=path.name, why=problem)
                _set_aside(path, _UNREADABLE)
                self._report_lost(path, node_id, epoch, problem)
        for plain in self.folder.glob(f"*{_PLAIN}"):
            if plain.with_suffix(_RESULT).exists():
                plain.unlink()
            else:
                self._report_lost(plain, node_id, epoch, None)
        for packed in self.folder.glob(f"*{_PACKED}"):
            if not packed.with_suffix("").with_suffix(_RESULT).exists():  # answered for, and half deleted
                packed.unlink()

    def _damage(self, path: Path) -> str | None:
        """Why a result that waits cannot be delivered."""
        try:
            result = _read(path)
            packed = path.with_suffix(_PACKED)
            if path.name != self._path(result.session_id, result.attempt, _RESULT).name:
                return f"it is of attempt {result.attempt} of {result.session_id}"
            if result.log_sha256 is not None and _sha256(packed) != result.log_sha256:
                return f"its log {packed.name} is another"
        except (ServerFault, OSError) as error:
            return str(error)
        return None

    def _report_lost(self, path: Path, node_id: str, epoch: int, problem: str | None) -> None:
        """With the log, plain or packed, where there is one."""
        session_id, _, attempt = path.stem.rpartition(".")
        if not attempt.isdecimal():
            log.warning("a file that is no attempt's", file=str(path))
            return
        result = _lost(unquote(session_id), int(attempt), node_id, epoch, problem)
        plain, packed = path.with_suffix(_PLAIN), path.with_suffix(_PACKED)
        try:
            if plain.exists() and not plain.stat().st_size:
                plain.unlink()  # the attempt died between making the file and its first record
            if plain.exists():
                result.sampled_tokens = _sampled(plain)
            elif packed.exists():
                result.log_sha256, result.sampled_tokens = _sha256(packed), _sampled(packed)
            self.put(result)
        except (PolarError, OSError) as error:  # the next start tries again; the server takes it as lost anyhow
            log.error("cannot report a lost attempt", file=str(path), why=str(error))


def _lost(session_id: str, attempt: int, node_id: str, epoch: int, problem: str | None) -> NodeResult:
    return NodeResult(
        session_id=session_id,
        attempt=attempt,
        node_id=node_id,
        epoch=epoch,
        status=SessionStatus.ERROR,
        termination=Termination.INFRASTRUCTURE,
        retryable=True,
        fault="outbox_unreadable" if problem else "gateway_lost",
        error=problem or "the gateway died while this attempt ran",
    )


def _set_aside(path: Path, why: str) -> None:
    with suppress(FileNotFoundError):
        path.rename(path.with_name(path.name + why))


def _read(path: Path) -> NodeResult:
    try:
        return from_msgpack(path.read_bytes(), NodeResult)
    except msgspec.MsgspecError as error:
        raise ServerFault(f"{path} is not a result: {error}", name="outbox_unreadable") from error


def _sampled(path: Path) -> int:
    """Tokens in a log; 0 where it cannot be read."""
    try:
        return sum(len(call.ids) for call in read(path).calls)
    except (PolarError, OSError, ZstdError) as error:
        log.warning("the log of a lost attempt cannot be read", file=path.name, why=str(error))
        return 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
