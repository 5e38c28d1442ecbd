"""A data folder has one owner at a time, and none once the owner is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from polar.cli import lock
from polar.errors import ConfigError

HOLD = "import sys, pathlib, time; from polar.cli import lock\nwith lock.held(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"  # noqa: E501


def test_a_held_folder_is_refused_naming_its_holder_and_is_free_after_a_kill(tmp_path):
    folder = tmp_path / "data"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"pid {holder.pid}"), lock.held(folder):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    with lock.held(folder):
        assert (folder / "lock").read_text().strip() == str(os.getpid())


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/data"), lock.held(tmp_path / "file" / "data"):
        pass
