"""The system calls that Python 3.11 lacks; each raises OSError."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC = 32, 4096, 16384
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_CAPBSET_DROP = 1, 4, 15, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
NS_GET_USERNS = 0xB701
CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def setns(fd: int) -> None:
    _checked(_libc.setns(fd, 0), "setns")


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def prctl(option: int, value: int) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def name_process(name: str) -> None:
    """At most 15 characters, for ps and top."""
    _checked(_libc.prctl(PR_SET_NAME, name.encode(), 0, 0, 0), "prctl")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    name = kind.encode() if kind else None
    result = _libc.mount(source.encode(), target.encode(), name, ctypes.c_ulong(flags), data.encode())
    _checked(result, f"mount {target}")


def drop_capabilities() -> None:
    """Empties the bounding set and then every other set, for this process and all that it starts."""
    last = int(open("/proc/sys/kernel/cap_last_cap").read())  # noqa: SIM115
    for capability in range(last + 1):
        prctl(PR_CAPBSET_DROP, capability)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _checked(_libc.capset(header, nothing), "capset")
