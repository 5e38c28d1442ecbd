"""Files in and out of a sandbox. The host follows no path that sandboxed programs can change: files are opened
inside, and only descriptors come out."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
from pathlib import Path

from polar.errors import TaskFault
from polar.runtimes.channel import Channel

MOST_READ = 64 << 20


async def upload(channel: Channel, source: Path, target: str) -> None:
    """A file, or a folder with all that is in it; links stay links. Raises TaskFault where `source` is missing."""
    if source.is_symlink():
        await channel.ask("symlink", path=target, to=os.readlink(source))
    elif source.is_dir():
        await channel.ask("mkdir", path=target)
        for entry in sorted(source.iterdir()):
            await upload(channel, entry, f"{target}/{entry.name}")
    elif source.is_file():
        fd = await _open(channel, target, write=True, mode=stat.S_IMODE(source.stat().st_mode))
        await asyncio.to_thread(_copy, source, fd)
    else:
        raise TaskFault(f"upload: {source} is neither file nor folder on the gateway's host", name="prepare")


async def write(channel: Channel, target: str, data: bytes) -> None:
    await asyncio.to_thread(_write, await _open(channel, target, write=True, mode=0o644), data)


async def read(channel: Channel, path: str) -> bytes:
    """Raises FileNotFoundError, also for what is no regular file, and OSError above 64 MiB."""
    data = await asyncio.to_thread(_read, await _open(channel, path, write=False, mode=0))
    if len(data) > MOST_READ:
        raise OSError(errno.EFBIG, f"{path} is larger than {MOST_READ >> 20} MiB")
    return data


async def _open(channel: Channel, path: str, *, write: bool, mode: int) -> int:
    return (await channel.ask("open", path=path, write=write, mode=mode))[1][0]


def _copy(source: Path, fd: int) -> None:
    with source.open("rb") as file, open(fd, "wb") as inside:
        shutil.copyfileobj(file, inside)


def _write(fd: int, data: bytes) -> None:
    with open(fd, "wb") as file:
        file.write(data)


def _read(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return file.read(MOST_READ + 1)
