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
from polar.runtimes.availability import MISSING, bwrap, explain
from polar.runtimes.served import Served

SESSION_DIR, WORKDIR = "/session", "/workspace"
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC_FILES = ("ld.so.cache", "localtime", "mime.types", "nsswitch.conf", "os-release", "protocols", "services")
_ETC_FOLDERS = ("alternatives", "fonts", "java-*-openjdk", "pki/ca-trust", "pki/tls/certs", "ssl/certs")
"""nothing that holds keys: as root one could read them"""
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
        self.env = self._environment()

    async def start(self, place: Place) -> None:
        try:
            await super().start(place)
        except SandboxFault as fault:
            raise SandboxFault(explain(fault.message), name="sandbox_start") from fault

    def _make(self, folder: Path) -> list[str]:
        program = bwrap()
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
        image = Path(self.spec.image) if self.spec.image else None
        root = self._host_view(folder) if image is None else _image_view(image, self.workdir, folder / "workspace")
        own = ["--proc", "/proc", "--dev", "/dev", "--dir", "/run"]
        own += ["--bind", str(folder / "tmp"), "/tmp"]
        for path in self.options.bind:
            own += ["--ro-bind", path, path]
        for source, target in ((folder / "session", SESSION_DIR), (folder / "workspace", self.workdir)):
            own += ["--bind", str(source), target]
        return [*root, *own]

    def _host_view(self, folder: Path) -> list[str]:
        view = ["--ro-bind", "/usr", "/usr"]
        for path in _SYSTEM:
            if os.path.islink(path):
                view += ["--symlink", os.readlink(path), path]
            elif os.path.exists(path):
                view += ["--ro-bind", path, path]
        view += ["--ro-bind", str(_make_etc(folder / "etc", self._online)), "/etc"]
        for shared in _etc_folders():
            view += ["--ro-bind", str(shared), str(shared)]
        return [*view, "--dir", "/var/tmp"]


def _image_view(image: Path, workdir: str, copy: Path) -> list[str]:
    """The image's top-level entries one by one, so that / itself can be written to (and forgotten); what it has in
    the working directory is copied, for that is written to."""
    if not image.is_dir():
        raise TaskFault(f"runtime.image {str(image)!r}: bubblewrap takes a folder with a root file system, or none")
    inside = image / workdir.lstrip("/")
    if inside.is_dir():
        shutil.copytree(inside, copy, symlinks=True, dirs_exist_ok=True)
    view = []
    for entry in sorted(image.iterdir()):
        if entry.is_symlink():
            view += ["--symlink", os.readlink(entry), f"/{entry.name}"]
        elif entry.name not in ("proc", "dev", "sys", "tmp", "run"):
            view += ["--ro-bind", str(entry), f"/{entry.name}"]
    return view


def _make_etc(etc: Path, online: bool) -> Path:
    """Copies, since each file mounted one by one would cost a millisecond."""
    for name in [*_ETC_FILES, "resolv.conf"] if online else _ETC_FILES:
        with suppress(FileNotFoundError):
            shutil.copyfile(f"/etc/{name}", etc / name)
    for name, text in _USER_FILES.items():
        (etc / name).write_text(text)
    for path in _etc_folders():
        (etc / path.relative_to("/etc")).mkdir(parents=True, exist_ok=True)
    return etc


def _etc_folders() -> list[Path]:
    return [path for name in _ETC_FOLDERS for path in Path("/etc").glob(name) if path.is_dir()]
