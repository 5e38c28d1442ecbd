"""No sandbox: programs run as this user, on this host, with its files and network. For trusted tasks and debugging.

Still: a clean environment, a folder of their own, limits, and none of them outlives the session.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from polar.errors import WrongFields
from polar.requests import RuntimeSpec
from polar.runtimes import folders
from polar.runtimes.served import Served


class Local(Served):
    """`session_dir` and `env` are known once it has started."""

    unsafe: ClassVar[bool] = True
    owns_processes: ClassVar[bool] = False

    def __init__(self, spec: RuntimeSpec) -> None:
        super().__init__(spec)
        if spec.image:
            raise WrongFields([(("runtime", "image"), "the runtime local has the host's programs, and no image")])

    def _make(self, folder: Path) -> None:
        self.session_dir = str(folder / "session")
        self.workdir = self.spec.workdir or str(folder / "workspace")
        folders.make(folder, "workspace", "tmp")
        self.env = self._environment() | {"TMPDIR": str(folder / "tmp"), folders.MARK: str(folder)}
