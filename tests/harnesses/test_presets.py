"""What every preset does before its program runs: settings checked, the program looked for, how it is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polar.errors import HarnessFault, TaskFault
from polar.harnesses import HARNESSES, load_harness
from polar.protocols import Harness, Runtime
from polar.requests import AgentSpec, ExecInput, McpServer
from sandboxing import both, needs_bubblewrap, run, sh, standing


def preset(name: str, **agent: Any) -> Harness:
    return load_harness(AgentSpec(harness=name, **agent))


def fake_program(folder: Path, name: str, script: str) -> str:
    """A stand-in for the real program, where it is only asked for its version or tells how it was called."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


async def instruct(box: Runtime, text: str) -> None:
    await box.write(f"{box.session_dir}/instruction.txt", text.encode())


@both
def test_a_shell_harness_finds_an_instruction_of_any_length_in_its_file(tmp_path, kind):
    instruction = "as long as it likes " * 60_000
    command = ExecInput(command='wc -c < "$SESSION_DIR/instruction.txt"; exit $CODE', env={"CODE": "5"})

    async def story():
        async with standing(tmp_path, kind) as box:
            await instruct(box, instruction)
            harness = preset("shell", custom_shell=command)
            assert harness.makes_calls
            await harness.setup(box)
            (step,) = harness.run_steps(instruction)
            result = await box.run(step, timeout=10)
            assert (result.output.strip(), result.exit_code) == (str(len(instruction)), 5)
            await harness.postprocess(box, result)
            assert harness.postrun_steps() == []

    run(story())


@pytest.mark.parametrize(
    ("agent", "named"),
    [
        ({"harness": "nobody"}, "unknown harness 'nobody': known are claude_code, mini_swe_agent, shell"),
        ({"harness": "claude_code", "settings": {"max_turn": 1}}, "agent.settings.max_turn: there is no such key"),
        ({"harness": "claude_code", "settings": {"max_turns": 0}}, "agent.settings.max_turns"),
        ({"harness": "mini_swe_agent", "settings": {"calls": "x"}}, "agent.settings.calls"),
        (
            {"harness": "mini_swe_agent", "skills_path": "/x"},
            "agent.skills_path: the harness mini_swe_agent takes none",
        ),
        (
            {"harness": "mini_swe_agent", "mcp_servers": [{"name": "x"}]},
            "agent.mcp_servers: the harness mini_swe_agent",
        ),
        ({"import_path": "polar.harnesses:Nothing"}, "polar.harnesses:Nothing"),
    ],
)
def test_what_a_harness_does_not_take_is_refused_by_name(agent, named):
    with pytest.raises(TaskFault, match=named):
        load_harness(AgentSpec(**agent))


@needs_bubblewrap
@pytest.mark.parametrize("name", sorted(set(HARNESSES) - {"shell"}))
def test_a_program_that_is_missing_or_another_version_is_named(tmp_path, name):
    program = fake_program(tmp_path / "bin", "agent", "echo agent version 1.2.3")

    async def story():
        async with standing(tmp_path, kwargs={"bind": [str(tmp_path / "bin")]}) as box:
            await instruct(box, "do it")
            with pytest.raises(HarnessFault, match=r"/nowhere/agent is not in the sandbox: (npm|pip) install"):
                await preset(name, settings={"command": "/nowhere/agent"}).setup(box)
            with pytest.raises(HarnessFault, match=r"is not version 9\.9: it says agent version 1\.2\.3") as caught:
                await preset(name, settings={"command": program, "version": "9.9"}).setup(box)
            assert caught.value.name == "prepare"
            await preset(name, settings={"command": program, "version": "1.2.3"}).setup(box)
            await preset(name, settings={"command": program}).setup(box)

    run(story())


TELL = """
{ printf '%s\\n' "$@"; echo --; env | sort; echo --; cat; } > "$ARTIFACTS_DIR/told"
"""


async def told(box: Runtime, harness: Harness, instruction: str) -> tuple[list[str], dict[str, str], str]:
    """Arguments, environment and stdin of the program that the harness runs."""
    await instruct(box, instruction)
    await harness.setup(box)
    for step in harness.run_steps(instruction):
        result = await box.run(step, timeout=20)
        assert result.exit_code == 0, result
    arguments, environment, stdin = (await box.read(f"{box.session_dir}/artifacts/told")).decode().split("--\n", 2)
    return arguments.splitlines(), dict(line.split("=", 1) for line in environment.splitlines()), stdin


@both
def test_claude_code_is_called_as_it_expects(tmp_path, kind):
    program = fake_program(tmp_path / "bin", "claude", TELL)
    skills = tmp_path / "skills" / "knot"
    skills.mkdir(parents=True)
    (skills / "SKILL.md").write_text("how to tie it")
    settings = {"command": program, "max_turns": 7, "tools": ["Bash", "Write"], "arguments": ["--effort", "low"]}
    servers = [
        McpServer(name="files", command="serve", args=["-x"]),
        McpServer(name="net", transport="streamable-http", url="http://127.0.0.1:1/mcp"),
    ]
    harness = preset(
        "claude_code",
        model_name="policy",
        settings=settings,
        env={"DISABLE_TELEMETRY": "0"},
        mcp_servers=servers,
        skills_path=str(tmp_path / "skills"),
    )
    instruction = "quotes ' \" $HOME `x` \\ and\nlines " * 50_000

    async def story():
        async with standing(tmp_path, kind, kwargs={"bind": [str(tmp_path / "bin")]}) as box:
            arguments, environment, stdin = await told(box, harness, instruction)
            assert stdin == instruction
            assert arguments[:4] == ["-p", "--output-format", "json", "--dangerously-skip-permissions"]
            assert arguments[4:8] == ["--max-turns", "7", "--tools", "Bash,Write"]
            assert arguments[8:] == ["--effort", "low", "--mcp-config", f"{box.session_dir}/mcp.json"]
            assert environment["ANTHROPIC_MODEL"] == "policy"
            assert environment["ANTHROPIC_SMALL_FAST_MODEL"] == "policy-aux"
            assert environment["DISABLE_TELEMETRY"] == "0", "agent.env has the last word"
            assert (await sh(box, 'cat "$HOME/.claude/skills/knot/SKILL.md"')).output == "how to tie it"
            assert json.loads(await box.read(f"{box.session_dir}/mcp.json"))["mcpServers"] == {
                "files": {"type": "stdio", "command": "serve", "args": ["-x"]},
                "net": {"type": "http", "url": "http://127.0.0.1:1/mcp"},
            }

    run(story())


@both
def test_mini_swe_agent_is_called_as_it_expects(tmp_path, kind):
    program = fake_program(tmp_path / "bin", "mini", TELL)
    settings = {"command": program, "calls": "text", "step_limit": 3, "config": ["agent.x=1"]}
    harness = preset("mini_swe_agent", model_name="policy", settings=settings)
    instruction = "quotes ' \" $HOME `x` \\"

    async def story():
        async with standing(tmp_path, kind, kwargs={"bind": [str(tmp_path / "bin")]}) as box:
            box.env["OPENAI_BASE_URL"] = "http://127.0.0.1:1/v1"
            arguments, environment, stdin = await told(box, harness, instruction)
            assert stdin == ""
            assert arguments[-2:] == ["-t", instruction]
            assert arguments[:6] == ["-y", "--exit-immediately", "-l", "0", "-m", "openai/policy"]
            assert [arguments[at + 1] for at, word in enumerate(arguments) if word == "-c"] == [
                "mini_textbased.yaml",
                "agent.step_limit=3",
                "agent.x=1",
            ]
            assert environment["OPENAI_API_BASE"] == "http://127.0.0.1:1/v1"
            await instruct(box, "x" * (128 << 10))
            with pytest.raises(TaskFault, match="128 KiB"):
                await harness.setup(box)
            await instruct(box, "x" * ((128 << 10) - 1))
            await harness.setup(box)
            assert (await box.run(harness.run_steps("")[0], timeout=20)).exit_code == 0

    run(story())
