"""A sandbox of Linux namespaces: its own files, processes, users and network, and no way out but our listener.

Programs see the host's /usr (or the folder `image`) read-only, and may write to the session's folder, the working
directory and /tmp; never the host's home, /sys, /proc or environment. Needs no root, and gives none.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from polar.errors import SandboxFault, TaskFault
from polar.protocols import Place
from polar.requests import RuntimeSpec
from polar.runtimes import folders
from polar.runtimes.availability import MISSING, explain
from polar.runtimes.served import Served

SESSION_DIR, WORKDIR = "/session", "/workspace"
_RUN_BYTES = 64 << 20
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC_FILES = ("ld.so.cache", "localtime", "mime.types", "nsswitch.conf", "os-release", "protocols", "services")
_ETC_FOLDERS = ("alternatives", "ssl", "pki", "fonts", "java-17-openjdk")
_USER_FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/session:/bin/sh\n",
    "group": "root:x:0:\nagent:x:1000:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
}


class Bubblewrap(Served):
    def __init__(self, spec: RuntimeSpec) -> None:
        super().__init__(spec)
        self.session_dir = SESSION_DIR
        self.workdir = spec.workdir or WORKDIR
        if not self.workdir.startswith("/"):
            raise TaskFault(f"runtime.workdir {spec.workdir!r} is not an absolute path")
        self.env = self._environment()

    async def start(self, place: Place) -> None:
        try:
            await super().start(place)
        except SandboxFault as fault:
            raise SandboxFault(explain(fault.message), name="sandbox_start") from fault

    def _make(self, folder: Path) -> list[str]:
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxFault(MISSING, name="sandbox_start")
        folders.make(folder, "workspace", "tmp", "etc")
        return [program, *self._namespaces(), *self._view(folder)]

    def _namespaces(self) -> list[str]:
        own = ["user", "ipc", "uts", "pid"] + ([] if self._online else ["net"])
        names = [f"--unshare-{name}" for name in own]
        return [*names, "--die-with-parent", "--uid", "0", "--gid", "0", "--hostname", "sandbox"]

    @property
    def _online(self) -> bool:
        return self.spec.network == "host" or self.spec.allow_internet

    def _view(self, folder: Path) -> list[str]:
        root = self._image_view(Path(self.spec.image)) if self.spec.image else self._host_view(folder)
        own = [
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--bind",
            str(folder / "tmp"),
            "/tmp",
            "--size",
            str(64 << 20),
            "--tmpfs",
            "/run",
        ]
        places = [(folder / "session", SESSION_DIR), (folder / "workspace", self.workdir)]
        binds = [part for source, target in places for part in ("--bind", str(source), target)]
        extra = [part for path in self.options.bind for part in ("--ro-bind", path, path)]
        return [*root, *own, *extra, *binds]

    def _host_view(self, folder: Path) -> list[str]:
        view = ["--ro-bind", "/usr", "/usr"]
        for path in _SYSTEM:
            if os.path.islink(path):
                view += ["--symlink", os.readlink(path), path]
            elif os.path.exists(path):
                view += ["--ro-bind", path, path]
        view += ["--ro-bind", str(_make_etc(folder / "etc", self._online)), "/etc"]
        for name in _ETC_FOLDERS:
            if os.path.isdir(f"/etc/{name}"):
                view += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
        return [*view, "--dir", "/var/tmp"]

    def _image_view(self, image: Path) -> list[str]:
        """The image's top-level entries one by one, so that / itself can be written to (and forgotten)."""
        if not image.is_dir():
            raise TaskFault(f"runtime.image {str(image)!r}: bubblewrap takes a folder with a root file system, or none")
        view = []
        for entry in sorted(image.iterdir()):
            if entry.name in ("proc", "dev", "sys", "tmp", "run"):
                continue
            if entry.is_symlink():
                view += ["--symlink", os.readlink(entry), f"/{entry.name}"]
            else:
                view += ["--ro-bind", str(entry), f"/{entry.name}"]
        return view


def _make_etc(etc: Path, online: bool) -> Path:
    """Copies, since each file mounted one by one would cost a millisecond."""
    for name in [*_ETC_FILES, "resolv.conf"] if online else _ETC_FILES:
        with suppress(FileNotFoundError):
            shutil.copyfile(f"/etc/{name}", etc / name)
    for name, text in _USER_FILES.items():
        (etc / name).write_text(text)
    for name in _ETC_FOLDERS:
        if os.path.isdir(f"/etc/{name}"):
            (etc / name).mkdir(exist_ok=True)
    return etc
