"""Commands in either runtime: how they end, what is kept of their output, what becomes of what they start."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from polar.errors import SandboxFault, ServerFault, TaskFault
from polar.requests import ExecInput, RuntimeSpec
from polar.runtimes import load_runtime
from sandboxing import alive, becomes, both, needs_bubblewrap, run, sh, standing, until

DAEMON = "(setsid sh -c '(while :; do sleep 0.05; date >> {beat}; done) & exit' > /dev/null 2>&1 &)"
"""in a session of its own, twice forked, parent gone: writes to {beat} for ever"""


async def beats(runtime, beat: str) -> bool:
    """Whether anything writes to `beat` while we look; what is dead can be looked at for ever."""
    before = (await sh(runtime, f"cat {beat} 2>/dev/null | wc -l")).output
    await asyncio.sleep(0.4)
    return (await sh(runtime, f"cat {beat} 2>/dev/null | wc -l")).output != before


@both
def test_a_commands_end_and_words_come_back(tmp_path, kind):
    async def story():
        async with standing(tmp_path, kind) as box:
            result = await sh(box, "echo out; echo err >&2; exit 3", log=tmp_path / "log")
            assert (result.exit_code, result.output, result.errors, result.timed_out) == (3, "out\n", "err\n", False)
            assert sorted((tmp_path / "log").read_text().split()) == ["err", "out"]
            assert (await sh(box, "kill -TERM $$")).exit_code == 128 + 15
            assert (await sh(box, "echo $X", env={"X": "of the command"})).output == "of the command\n"
            box.env["X"] = "of the sandbox"
            assert (await sh(box, "echo $X")).output == "of the sandbox\n"
            result = await sh(box, "true", cwd="/nowhere")
            assert result.exit_code == 126
            assert "/nowhere" in result.errors
            result = await box.run(
                ExecInput.model_construct(command="true", cwd="a\0b", env={}, stdin_path=None), timeout=9
            )
            assert (result.exit_code, "null byte" in result.errors) == (126, True)
            assert (await sh(box, r"printf '\377ok'")).output == "�ok"

    run(story())


@both
def test_stdin_is_a_file_or_nothing(tmp_path, kind):
    async def story():
        async with standing(tmp_path, kind) as box:
            assert (await sh(box, "cat")).output == ""
            path = f"{box.session_dir}/instruction.txt"
            await box.write(path, b"x" * (1 << 20))
            assert (await sh(box, "wc -c", stdin_path=path)).output.strip() == str(1 << 20)
            await sh(box, f"mkfifo {box.session_dir}/fifo")
            assert (await sh(box, "cat", stdin_path=f"{box.session_dir}/fifo")).exit_code == 126
            assert (await sh(box, "cat", stdin_path="/nowhere")).exit_code == 126

    run(story())


@both
def test_more_than_linux_passes_on_is_refused_by_name(tmp_path, kind):
    async def story():
        async with standing(tmp_path, kind) as box:
            with pytest.raises(TaskFault, match="the command is longer than 128 KiB"):
                await sh(box, "#" * (128 << 10))
            with pytest.raises(TaskFault, match="the variable BIG is longer"):
                await sh(box, "true", env={"BIG": "x" * (128 << 10)})
            result = await sh(box, "true", env={f"V{n}": "x" * (120 << 10) for n in range(60)})
            assert result.exit_code == 126
            assert "too long" in result.errors

    run(story())


@both
def test_a_hundred_megabytes_of_output_cost_neither_memory_nor_disk(tmp_path, kind):
    async def story():
        async with standing(tmp_path, kind) as box:
            log = tmp_path / "log"
            result = await sh(box, "head -c 100000000 /dev/zero | tr '\\0' x; echo the end", log=log)
            assert result.exit_code == 0
            assert result.output.endswith("x" * 100 + "the end\n")
            assert len(result.output) <= 1 << 20
            assert log.stat().st_size < 6 << 20
            text = log.read_text()
            assert text.startswith("x" * 1000)
            assert text.endswith("the end\n")
            left_out = 100_000_008 - (4 << 20) - (1 << 20)
            assert f"[... {left_out} bytes left out ...]" in text
            status = Path(f"/proc/{box._channel.pid}/status").read_text()
            peak = int(status.split("VmHWM:")[1].split()[0])
            assert peak < 60_000, "kB of the process that read it all"

    run(story())


@both
def test_a_full_disk_is_the_servers_fault(tmp_path, kind):
    async def story():
        async with standing(tmp_path, kind) as box:
            with pytest.raises(ServerFault) as caught:
                await sh(box, "echo lost", log=Path("/dev/full"))
            assert caught.value.name == "disk_full"
            assert (await sh(box, "echo x > /dev/full")).exit_code != 0, "a program's own business"

    run(story())


@both
def test_time_up_kills_the_command_and_all_that_it_started(tmp_path, kind):
    """Case 44's mechanism: nothing that ignores SIGTERM, forks or hides in another session outlives its time."""

    async def story():
        async with standing(tmp_path, kind) as box:
            ours, services = f"{box.session_dir}/ours", f"{box.session_dir}/services"
            await sh(box, DAEMON.format(beat=services))
            stubborn = f"trap '' TERM INT; {DAEMON.format(beat=ours)}; echo said; sleep 1000"
            result = await sh(box, stubborn, timeout=2)
            assert (result.timed_out, result.exit_code, result.output) == (True, 137, "said\n")
            assert not await beats(box, ours)
            await becomes(lambda: beats(box, services))  # what an earlier command left running lives on

    run(story())


@both
def test_a_cancelled_command_is_killed(tmp_path, kind):
    async def story():
        async with standing(tmp_path, kind) as box:
            beat = f"{box.session_dir}/beat"
            task = asyncio.create_task(sh(box, f"{DAEMON.format(beat=beat)}; sleep 1000"))
            await becomes(lambda: beats(box, beat))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not await beats(box, beat)

    run(story())


@both
def test_killing_the_processes_leaves_none_and_keeps_the_files(tmp_path, kind):
    async def story():
        async with standing(tmp_path, kind) as box:
            listener = await box.listen()
            beat = f"{box.session_dir}/beat"
            hidden = DAEMON.format(beat=beat).replace("setsid sh", "env -i setsid sh")
            await sh(box, f"{hidden}; {DAEMON.format(beat=beat)}")
            running = asyncio.create_task(sh(box, "sleep 1000"))
            await becomes(lambda: beats(box, beat))
            await box.kill_processes()
            assert (await running).exit_code == 137
            assert not await beats(box, beat)
            assert (await sh(box, f"test -s {beat} && echo kept")).output == "kept\n"
            assert listener.sock.fileno() > 0
            listener.sock.close()
            await box.kill_processes()

    run(story())


@both
def test_a_service_that_talks_on_is_neither_waited_for_nor_silenced_to_death(tmp_path, kind):
    async def story():
        async with standing(tmp_path, kind) as box:
            beat = f"{box.session_dir}/beat"
            talker = f"(while :; do echo talk; date >> {beat}; sleep 0.02; done) & echo started"
            result = await sh(box, talker)
            assert result.exit_code == 0
            assert "started" in result.output
            await becomes(lambda: beats(box, beat))

    run(story())


@needs_bubblewrap
def test_a_fork_bomb_is_bounded_and_dies(tmp_path):
    async def story():
        async with standing(tmp_path, kwargs={"pids": 100}) as box:
            bomb = "bomb() { bomb | bomb & sleep 0.05; bomb; }; bomb"
            result = await sh(box, bomb, timeout=2)
            assert result.exit_code != 0
            await box.kill_processes()
            left = (await sh(box, "ls -d /proc/[0-9]* | wc -l")).output
            assert int(left) <= 4

    run(story())


@both
def test_memory_is_bounded_and_the_sandbox_survives(tmp_path, kind):
    hog = "a=x; while :; do a=$a$a; done"

    async def story():
        async with standing(tmp_path, kind, memory_mb=64) as box:
            result = await sh(box, hog)
            assert result.exit_code != 0
            assert result.limit_hit == ("memory" in box.enforced)
            assert (await sh(box, "echo well")).output == "well\n"
            assert not (await sh(box, "exit 1")).limit_hit, "a limit is reported once"
            survivor = await sh(box, f"({hog}) ; echo went on")
            assert (survivor.exit_code, survivor.limit_hit) == (0, False)

    run(story())


@both
def test_a_file_is_bounded_by_the_storage_limit(tmp_path, kind):
    async def story():
        async with standing(tmp_path, kind, storage_mb=1) as box:
            assert (await sh(box, "head -c 3000000 /dev/zero > big")).exit_code != 0
            assert (await sh(box, "stat -c %s big")).output.strip() == str(1 << 20)
            result = await sh(box, "yes | head -c 3000000", log=tmp_path / "log")
            assert result.exit_code == 0
            assert (tmp_path / "log").stat().st_size == 3_000_000, "our own record is not the sandbox's"

    run(story())


@both
def test_a_lost_sandbox_is_said_to_be_lost(tmp_path, kind):
    async def story():
        async with standing(tmp_path, kind) as box:
            pid = box._channel.pid
            waiting = asyncio.create_task(sh(box, "sleep 1000"))
            await becomes(lambda: sleeps(box))
            os.kill(pid, 9)
            with pytest.raises(SandboxFault) as caught:
                await waiting
            assert caught.value.name == "sandbox_lost"
            with pytest.raises(SandboxFault):
                await box.read("/etc/passwd")
            until(lambda: not alive(pid))

    async def sleeps(box) -> bool:
        return "sleep" in (await sh(box, "cat /proc/[0-9]*/comm")).output

    run(story())


@both
def test_many_commands_run_side_by_side(tmp_path, kind):
    async def story():
        async with standing(tmp_path, kind) as box:
            results = await asyncio.gather(*(sh(box, f"sleep 0.1; echo {n}; exit {n}") for n in range(20)))
            assert [(result.exit_code, result.output) for result in results] == [(n, f"{n}\n") for n in range(20)]

    run(story())


@both
def test_a_sandbox_that_does_not_stand_says_so(tmp_path, kind):
    async def story():
        box = load_runtime(RuntimeSpec(backend=kind))
        box.workdir = "/"
        box.env = {}
        with pytest.raises(SandboxFault, match="not been started"):
            await box.run(ExecInput(command="true"), timeout=1)
        await box.stop()

    run(story())
