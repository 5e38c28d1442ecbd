"""No sandbox: programs run as this user, on this host, with its files and network. For trusted tasks and debugging.

Still: a clean environment, a folder of their own, limits, and none of them outlives the session.
"""

from __future__ import annotations

from typing import ClassVar

from polar.protocols import Place
from polar.runtimes import folders
from polar.runtimes.served import Served


class Local(Served):
    unsafe: ClassVar[bool] = True
    owns_processes: ClassVar[bool] = False

    async def start(self, place: Place) -> None:
        folder = place.folder.absolute()
        self._folder = folder
        self.session_dir = str(folder / "session")
        self.workdir = self.spec.workdir or str(folder / "workspace")
        folders.make(folder, "workspace", "tmp")
        self.env = self._environment() | {"TMPDIR": str(folder / "tmp"), folders.MARK: str(folder)}
        await self._launch(place, None)
