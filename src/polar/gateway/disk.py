"""Whether the disk that sandboxes write to was full at a time: what failed then is nobody's doing but ours."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import structlog

from polar.errors import ServerFault

log = structlog.get_logger("polar.gateway")
_FULL_BYTES = 1 << 20
"""less room than this is none: the file that a harness could not write was larger"""
_LOOK_SECONDS = 0.5


class Disk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._full = False
        self._full_at = float("-inf")

    async def watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(_LOOK_SECONDS)

    def fault(self, since: float) -> ServerFault | None:
        """`disk_full`, where it was full at any look since then."""
        if self._full_at < since:
            return None
        return ServerFault(f"the disk of {self.folder} was full while the session ran", name="disk_full")

    def look(self) -> None:
        """A folder that is not there is told by whoever needs it."""
        try:
            found = os.statvfs(self.folder)
        except OSError:
            return
        out_of_files = bool(found.f_files) and not found.f_favail
        full = found.f_bavail * found.f_frsize < _FULL_BYTES or out_of_files
        if full:
            self._full_at = time.monotonic()
        if full != self._full:
            self._full = full
            say = log.warning if full else log.info
            say("the disk is full" if full else "the disk has room again", folder=str(self.folder))
