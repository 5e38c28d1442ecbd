"""What a program in a bubblewrap sandbox sees, and what it cannot reach."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from polar.errors import TaskFault
from polar.requests import RuntimeSpec
from polar.runtimes import load_runtime
from sandboxing import needs_bubblewrap, run, sh, standing

pytestmark = needs_bubblewrap


async def lines(runtime, command) -> list[str]:
    result = await sh(runtime, command)
    assert result.exit_code == 0, result
    return result.output.split()


def test_a_program_is_nobody_in_particular_and_has_no_power(tmp_path):
    async def story():
        async with standing(tmp_path) as box:
            assert await lines(box, "id -u; id -un; pwd; hostname") == ["1000", "agent", "/workspace", "sandbox"]
            status = (await sh(box, "cat /proc/self/status")).output
            values = dict(line.split(":", 1) for line in status.splitlines())
            assert [int(values[f"Cap{name}"], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")] == [0] * 5
            assert values["NoNewPrivs"].strip() == "1"

    run(story())


def test_the_host_is_out_of_sight(tmp_path, monkeypatch):
    monkeypatch.setenv("POLAR_SECRET_OF_THE_HOST", "1")
    (tmp_path / "secret").write_text("x")

    async def story():
        async with standing(tmp_path) as box:
            seen = set(await lines(box, "ls -a /"))
            assert not seen & {"sys", "home", "root", "boot", "mnt"}
            for path in (tmp_path / "secret", Path.home(), "/etc/shadow", "/etc/ssl/private", f"/proc/{os.getpid()}"):
                assert (await sh(box, f"ls {path}")).exit_code != 0, path
            environment = dict(line.split("=", 1) for line in (await sh(box, "env")).output.splitlines())
            assert "POLAR_SECRET_OF_THE_HOST" not in environment
            assert environment["HOME"] == environment["SESSION_DIR"] == "/session"
            assert environment["ARTIFACTS_DIR"] == "/session/artifacts"
            assert (
                await sh(box, 'test -d "$AGENT_LOG_DIR" && test -d "$ARTIFACTS_DIR" && test -d "$LOGS_DIR"')
            ).exit_code == 0
            processes = await lines(box, "cd /proc; for p in [0-9]*; do cat $p/comm; done")
            assert set(processes) <= {"polar-sandboxes", "sh", "cat"}

    run(story())


def test_only_its_own_places_can_be_written(tmp_path):
    async def story():
        async with standing(tmp_path) as box:
            for path in ("/session/x", "/workspace/x", "/tmp/x", "/dev/shm/x"):
                assert (await sh(box, f"echo 1 > {path}")).exit_code == 0, path
            for path in ("/usr/x", "/etc/x", "/bin/x", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger"):
                assert (await sh(box, f"echo core > {path}")).exit_code != 0, path
            assert (await sh(box, "mount -t tmpfs x /tmp")).exit_code != 0
            assert (await sh(box, "cat /proc/1/environ")).exit_code != 0
            assert (await sh(box, "kill -9 1; echo still here")).output == "still here\n"

    run(story())


def test_what_is_kept_in_memory_is_bounded(tmp_path):
    async def story():
        async with standing(tmp_path) as box:
            assert (await sh(box, "head -c 300000000 /dev/zero > /dev/shm/big")).exit_code != 0
            assert (await sh(box, "mkdir /tests && head -c 300000000 /dev/zero > /tests/big")).exit_code != 0

    run(story())


def test_a_workdir_of_the_tasks_own_and_host_folders_read_only(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "hello").write_text("#!/bin/sh\necho hello\n")
    (tools / "hello").chmod(0o755)

    async def story():
        async with standing(tmp_path, workdir="/place/here", kwargs={"bind": [str(tools)]}, env={"A": "b"}) as box:
            assert await lines(box, f"pwd; {tools}/hello; echo $A") == ["/place/here", "hello", "b"]
            assert (await sh(box, f"echo 1 > {tools}/x")).exit_code != 0
            assert (await sh(box, "echo 1 > x")).exit_code == 0

    run(story())


def make_image(folder: Path) -> Path:
    """A root file system with a shell and cat, their libraries, and a project in /project."""
    for program in ("/bin/sh", "/bin/cat"):
        linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for path in [program, *(word for word in linked.split() if word.startswith("/"))]:
            target = folder / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(path), target)
    (folder / "project").mkdir()
    (folder / "project" / "code").write_text("code of the image")
    return folder


def test_an_image_is_a_folder_that_stays_as_it_is(tmp_path):
    image = make_image(tmp_path / "image")

    async def story():
        async with standing(tmp_path, image=str(image), workdir="/project") as box:
            assert (await sh(box, "cat code")).output == "code of the image"
            assert (await sh(box, "cd /usr")).exit_code != 0
            assert (await sh(box, "echo changed > code; cat code")).output == "changed\n"
            assert (await sh(box, "echo x > /bin/x")).exit_code != 0
            await box.write("/tests/test.sh", b"echo tested")
            assert (await sh(box, "sh /tests/test.sh")).output == "tested\n"

    run(story())
    assert (image / "project" / "code").read_text() == "code of the image"
    assert not (image / "tests").exists()


def test_the_listener_is_the_only_way_out(tmp_path):
    """A program reaches the listener of its own sandbox and neither the host's ports nor another sandbox's."""

    async def served(listener) -> str:
        loop = asyncio.get_running_loop()
        listener.sock.setblocking(False)
        connection, _ = await loop.sock_accept(listener.sock)
        with connection:
            data = await loop.sock_recv(connection, 100)
            await loop.sock_sendall(connection, b"heard\n")
        return data.decode()

    def ask(port: int) -> str:
        return f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo from inside >&3 && cat <&3"

    async def story():
        with socket.create_server(("127.0.0.1", 0)) as host:
            async with standing(tmp_path) as box, standing(tmp_path) as other:
                listener, others = await box.listen(), await other.listen()
                port = int(listener.url.rpartition(":")[2])
                for unreachable in (host.getsockname()[1], int(others.url.rpartition(":")[2])):
                    if unreachable != port:
                        assert (await sh(box, f"bash -c '{ask(unreachable)}'")).exit_code != 0
                await box.kill_processes()
                heard, result = await asyncio.gather(served(listener), sh(box, f"bash -c '{ask(port)}'"))
                assert (heard, result.output) == ("from inside\n", "heard\n")
                assert await lines(box, "ls /proc/sys/net/ipv4/conf") == ["all", "default", "lo"]
                listener.sock.close()
                others.sock.close()

    run(story())


def test_the_hosts_network_is_there_when_the_task_asks(tmp_path):
    async def story():
        with socket.create_server(("127.0.0.1", 0)) as host:
            async with standing(tmp_path, network="host") as box:
                command = f"bash -c 'exec 3<>/dev/tcp/127.0.0.1/{host.getsockname()[1]}'"
                assert (await sh(box, command)).exit_code == 0
                listener = await box.listen()
                listener.sock.close()

    run(story())


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"backend": "docker"}, "unknown runtime 'docker': known are bubblewrap, local"),
        ({"kwargs": {"bnd": []}}, "runtime.kwargs.bnd"),
        ({"kwargs": {"bind": ["relative"]}}, "runtime.kwargs.bind.0"),
        ({"gpus": 1}, "runtime.gpus"),
        ({"network": "bridge"}, "runtime.network: unknown network 'bridge'"),
        ({"workdir": "relative"}, "runtime.workdir: 'relative'"),
        ({"backend": "local", "image": "/"}, "runtime.image"),
        ({"import_path": "polar.nothing:Here"}, "polar.nothing:Here"),
    ],
)
def test_what_no_runtime_gives_is_refused_by_name(spec, named):
    with pytest.raises(TaskFault, match=named):
        load_runtime(RuntimeSpec(**spec))


def test_bubblewrap_is_the_default_and_local_only_when_asked():
    assert type(load_runtime(RuntimeSpec())).__name__ == "Bubblewrap"
    assert type(load_runtime(RuntimeSpec(), default="local")).__name__ == "Local"
    assert type(load_runtime(RuntimeSpec(backend="bubblewrap"), default="local")).__name__ == "Bubblewrap"
    assert type(load_runtime(RuntimeSpec(import_path="polar.runtimes.local:Local"))).__name__ == "Local"
