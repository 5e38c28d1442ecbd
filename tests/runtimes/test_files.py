"""Files in and out: whole, with their modes, and never along a link that leads out of the sandbox."""

from __future__ import annotations

import os

import pytest

from polar.errors import TaskFault
from polar.requests import ExecInput
from sandboxing import both, needs_bubblewrap, run, sh, standing


@both
def test_bytes_go_in_and_come_out(tmp_path, kind):
    data = bytes(range(256)) * 1000

    async def story():
        async with standing(tmp_path, kind) as box:
            path = f"{box.session_dir}/deep/er/file"
            await box.write(path, data)
            assert await box.read(path) == data
            await box.write(path, b"short")
            assert await box.read(path) == b"short"
            with pytest.raises(FileNotFoundError):
                await box.read(f"{box.session_dir}/nothing")
            with pytest.raises(FileNotFoundError):
                await box.read(box.session_dir)
            await sh(box, f"mkfifo {box.session_dir}/fifo; truncate -s 1T {box.session_dir}/huge")
            with pytest.raises(FileNotFoundError):
                await box.read(f"{box.session_dir}/fifo")
            with pytest.raises(OSError, match="64 MiB"):
                await box.read(f"{box.session_dir}/huge")

    run(story())


@both
def test_a_relative_path_starts_at_the_working_directory(tmp_path, kind):
    (tmp_path / "source").write_text("uploaded")

    async def story():
        async with standing(tmp_path / "box", kind) as box:
            await box.write("sub/written", b"written")
            await box.upload(tmp_path / "source", "uploaded")
            assert await box.read("sub/written") == b"written"
            told = await box.run(ExecInput(command="cat written ../uploaded", cwd="sub"), timeout=60)
            assert told.output == "writtenuploaded"
            assert (await sh(box, "cat sub/written")).output == "written"
            assert (await box.run(ExecInput(command="cat", stdin_path="uploaded"), timeout=60)).output == "uploaded"

    run(story())


@both
def test_a_folder_goes_in_with_modes_and_links(tmp_path, kind):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "sub" / "data").write_bytes(os.urandom(1 << 20))
    (source / "link").symlink_to("run.sh")

    async def story():
        async with standing(tmp_path, kind) as box:
            target = f"{box.session_dir}/uploaded"
            await box.upload(source, target)
            assert (await sh(box, f"{target}/link")).output == "ran\n"
            assert (await sh(box, f"readlink {target}/link")).output == "run.sh\n"
            assert await box.read(f"{target}/sub/data") == (source / "sub" / "data").read_bytes()
            await box.upload(source / "run.sh", f"{target}/sub/again.sh")
            assert (await sh(box, f"{target}/sub/again.sh")).output == "ran\n"
            with pytest.raises(TaskFault, match="not-there"):
                await box.upload(tmp_path / "not-there", target)

    run(story())


@needs_bubblewrap
def test_links_that_programs_plant_lead_nowhere_outside(tmp_path):
    """The host's file that a link names is neither read nor written: links are followed inside."""
    secret = tmp_path / "secret"
    secret.write_text("of the host")

    async def story():
        async with standing(tmp_path) as box:
            await sh(box, f"ln -s {secret} /session/link; ln -s {tmp_path} /session/folder; rm -rf /session/artifacts")
            await sh(box, "ln -s /etc /session/artifacts")
            for path in ("/session/link", "/session/folder/secret"):
                with pytest.raises(FileNotFoundError):
                    await box.read(path)
            for path in ("/session/link", "/session/folder/new"):
                with pytest.raises(OSError, match="/session/"):
                    await box.write(path, b"written by the host")
            with pytest.raises(OSError, match="Read-only"):
                await box.write("/session/artifacts/passwd", b"x")
            assert b"agent" in await box.read("/session/artifacts/passwd")

    run(story())
    assert secret.read_text() == "of the host"
    assert not (tmp_path / "new").exists()
