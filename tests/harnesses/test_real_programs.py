"""The real command-line agents, in a sandbox without network, on the listener of a real proxy over a scripted model."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from chain import polar_serve
from peers.engine import ScriptedEngine, scripted_engine
from peers.tokenizer import make_tokenizer
from polar.harnesses import load_harness
from polar.harnesses.claude_code import ClaudeCode
from polar.protocols import ExecResult
from polar.proxy import load_rendering
from polar.proxy.forms import NOT_SHOWN
from polar.records import BuildResult
from polar.requests import AgentSpec, ExecInput
from polar.sessionlog import read
from running_proxy import RunningProxy, running_proxy, until
from sandboxing import needs_bubblewrap, run, sh, standing

pytestmark = needs_bubblewrap
NODE = 20
CODEX_CONFIG = """
model = "policy"
model_provider = "polar"
[model_providers.polar]
name = "polar"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
CODEX_WITH_LESS = "[features]\nplugins = false\napps = false\n[agents]\nenabled = false\n"
GEMINI_SETTINGS = {
    "security": {"auth": {"selectedType": "gemini-api-key"}},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"enableAutoUpdate": False},
}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
INSTRUCTION = "Write the word apple into answer.txt, look whether it is there, and say so."


@pytest.fixture(scope="module")
def claude(request: pytest.FixtureRequest) -> Path:
    """The folder that Claude Code is installed in: POLAR_TEST_CLAUDE, or installed once into pytest's cache."""
    if folder := os.environ.get("POLAR_TEST_CLAUDE"):
        return Path(folder)
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip(f"claude_code needs Node >= {NODE} with npm, and there is none on PATH")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.lstrip("v").split(".")[0]) < NODE:
        pytest.skip(f"claude_code needs Node >= {NODE}, and this is {version}")
    folder = request.config.cache.mkdir(f"claude_code-{ClaudeCode.tried_with}")
    if not (folder / "node_modules" / ".bin" / "claude").exists():
        package = f"@anthropic-ai/claude-code@{ClaudeCode.tried_with}"
        command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), package]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"claude_code could not be installed: {done.stderr[-300:]}")
    return folder


@pytest.fixture(scope="module")
def mini() -> str:
    """The program `mini`: POLAR_TEST_MINI, or beside this Python, or on PATH."""
    beside = Path(sys.executable).parent / "mini"
    program = os.environ.get("POLAR_TEST_MINI") or (str(beside) if beside.exists() else shutil.which("mini"))
    if program is None:
        pytest.skip("mini-swe-agent is not installed: pip install mini-swe-agent, or POLAR_TEST_MINI=<path of mini>")
    return program


@pytest.fixture(scope="module")
def codex() -> Path:
    program = os.environ.get("POLAR_TEST_CODEX")
    if program is None:
        pytest.skip("Codex is not named: npm install @openai/codex, and POLAR_TEST_CODEX=<path of codex>")
    return Path(program)


@pytest.fixture(scope="module")
def gemini() -> Path:
    program = os.environ.get("POLAR_TEST_GEMINI")
    if program is None:
        pytest.skip("Gemini CLI is not named: npm install @google/gemini-cli, and POLAR_TEST_GEMINI=<path of gemini>")
    return Path(program)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def engine(tokenizer: Path) -> Iterator[ScriptedEngine]:
    with scripted_engine(tokenizer) as made:
        yield made


@pytest.fixture
def proxy(tmp_path: Path, tokenizer: Path, engine: ScriptedEngine) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path, engine.url, load_rendering(tokenizer), context_length=400_000) as made:
        yield made


def calls(name: str, **arguments: Any) -> dict[str, Any]:
    """An engine step whose sampled text is a tool call."""
    return {"text": f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"}


def bound(*paths: str | Path) -> dict[str, list[str]]:
    """Those that /usr does not hold already."""
    real = {str(path) for path in paths} | {os.path.realpath(path) for path in paths}
    return {"bind": sorted(path for path in real if not path.startswith("/usr/"))}


def drive(
    tmp_path: Path, proxy: RunningProxy, agent: AgentSpec, kwargs: dict[str, Any]
) -> tuple[ExecResult, str, BuildResult]:
    """Runs the agent to its end: how it ended, the answer.txt that it left, and the trajectory that was built."""
    session = proxy.open(agent=agent)

    async def story() -> tuple[ExecResult, str]:
        harness = load_harness(agent)
        async with standing(tmp_path, kwargs=kwargs) as box:
            listener = await box.listen()
            proxy.run(proxy.proxy.listen(session.key, listener.sock))
            box.env |= {"ANTHROPIC_BASE_URL": listener.url, "ANTHROPIC_API_KEY": session.key}
            box.env |= {"OPENAI_BASE_URL": f"{listener.url}/v1", "OPENAI_API_KEY": session.key}
            box.env |= {"GOOGLE_GEMINI_BASE_URL": listener.url, "GEMINI_API_KEY": session.key}
            await box.write(f"{box.session_dir}/instruction.txt", INSTRUCTION.encode())
            await harness.setup(box)
            (step,) = harness.run_steps(INSTRUCTION)
            result = await box.run(step, timeout=90, log=tmp_path / "agent.log")
            session.end()
            await box.kill_processes()
            return result, (await sh(box, "cat answer.txt")).output

    result, answer = run(story(), 120)
    return result, answer, session.build()


def check(result: ExecResult, answer: str, built: BuildResult) -> None:
    """One chain of three turns, continued from the ids that were sampled, every one of them trainable."""
    assert result.exit_code == 0, result
    assert answer == "apple\n"
    assert (built.calls.completions, built.calls.continued, built.calls.forks, built.calls.drift) == (3, 2, 0, 0)
    assert len(built.traces) == 1
    assert built.tokens.balanced
    assert built.tokens.sampled == built.tokens.trainable == built.traces[0].trainable > 100


@pytest.mark.parametrize("tools", [None, ["Bash", "Write"]])
def test_claude_code_to_a_trajectory(tmp_path, claude, proxy, engine, tools):
    engine.script(
        calls("Write", file_path="/workspace/answer.txt", content="apple\n"),
        calls("Bash", command="cat answer.txt"),
        {"text": "It is there."},
    )
    program = claude / "node_modules" / ".bin" / "claude"
    settings = {"command": str(program), "max_turns": 10, "tools": tools}
    result, answer, built = drive(
        tmp_path, proxy, AgentSpec(harness="claude_code", settings=settings), bound(claude, program)
    )
    check(result, answer, built)
    assert json.loads(result.output)["result"] == "It is there."


def test_claude_code_through_the_whole_chain_to_a_grade(tmp_path, claude, engine):
    engine.context(400_000)
    program = claude / "node_modules" / ".bin" / "claude"
    agent = {"harness": "claude_code", "settings": {"command": str(program), "tools": ["Bash", "Write"]}}
    evaluator = {"strategy": "command", "config": {"command": "grep -qx apple /workspace/answer.txt"}}
    with polar_serve(tmp_path / "data", engine.url) as chain:
        engine.script(
            calls("Write", file_path="/workspace/answer.txt", content="apple\n"),
            calls("Bash", command="cat answer.txt"),
            {"text": "It is there."},
        )
        runtime = {"kwargs": bound(claude, program)}
        (result,) = chain.run("claude", instruction=INSTRUCTION, agent=agent, runtime=runtime, evaluator=evaluator)
    assert (result["status"], result["metadata"]["termination"]) == ("COMPLETED", "done"), result
    (trace,) = result["trajectory"]["traces"]
    assert trace["reward"] == 1.0
    assert sum(trace["loss_mask"]) == result["trajectory"]["metadata"]["tokens"]["sampled"] > 100
    assert result["trajectory"]["metadata"]["calls"]["continued"] == 2


@pytest.mark.parametrize("style", ["tools", "text"])
def test_mini_swe_agent_to_a_trajectory(tmp_path, mini, proxy, engine, style):
    def acts(command: str) -> dict[str, Any]:
        text = {"text": f"THOUGHT: so be it\n\n```mswea_bash_command\n{command}\n```"}
        return calls("bash", command=command) if style == "tools" else text

    done = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    engine.script(acts("echo apple > answer.txt"), acts("cat answer.txt"), acts(done))
    python = Path(mini).parent / "python3"
    prefixes = subprocess.run(
        [python, "-c", "import sys; print(sys.prefix, sys.base_prefix)"], capture_output=True, text=True, check=True
    ).stdout.split()
    agent = AgentSpec(harness="mini_swe_agent", settings={"command": mini, "calls": style, "step_limit": 10})
    check(*drive(tmp_path, proxy, agent, bound(*prefixes)))


def codex_agent(program: Path, config: str) -> tuple[AgentSpec, dict[str, list[str]]]:
    """A command for Codex by hand, and what has to be in its sandbox."""
    home = "export CODEX_HOME=$SESSION_DIR/codex && mkdir -p $CODEX_HOME"
    written = f"cat > $CODEX_HOME/config.toml <<END\n{config}\nEND"
    options = "--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --json"
    command = f"{home}\n{written}\n{program} exec {options} - < $SESSION_DIR/instruction.txt"
    installed = next(path.parent for path in program.resolve().parents if path.name == "node_modules")
    return AgentSpec(harness="shell", custom_shell=ExecInput(command=command)), bound(program, installed)


def codex_turns(tool: str, argument: str, around: str) -> list[dict[str, Any]]:
    write, look = (around.format(command) for command in ("echo apple > answer.txt", "cat answer.txt"))
    first = f'<think>\nA file is asked for.\n</think>\n\nI write "é".{calls(tool, **{argument: write})["text"]}'
    return [{"text": first}, calls(tool, **{argument: look}), {"text": "It is there."}]


@pytest.mark.parametrize(
    ("model", "more", "turns"),
    [
        # As it comes: with a namespace of tools and a web search.
        ("policy", "", ("exec_command", "cmd", "{}")),
        ("policy", CODEX_WITH_LESS, ("exec_command", "cmd", "{}")),
        # A name that it knows: custom tools, in an item of the input.
        ("gpt-5.6-sol", "", ("functions__exec", "input", 'text(await tools.exec_command({{cmd: "{}"}}))')),
    ],
)
def test_codex_to_a_trajectory(tmp_path, codex, proxy, engine, tokenizer, model, more, turns):
    steps = codex_turns(*turns)
    engine.script(*steps)
    agent, kwargs = codex_agent(codex, CODEX_CONFIG.replace("policy", model) + more)
    result, answer, built = drive(tmp_path, proxy, agent, kwargs)
    check(result, answer, built)
    events = [json.loads(line) for line in result.output.splitlines() if "agent_message" in line]
    assert [event["item"]["text"] for event in events] == ['I write "é".', "It is there."]
    (trace,) = built.traces
    sampled = load_rendering(tokenizer).decode(trace.response_ids[trace.loss_mask == 1])
    assert sampled == "".join(f"{step['text']}<|im_end|>" for step in steps)


def test_codex_that_breaks_a_silent_stream_off_joins_its_call(tmp_path, codex, engine, tokenizer):
    """It keeps the reasoning that it has had, and asks again with it."""
    steps = codex_turns("exec_command", "cmd", "{}")
    engine.script(steps[0] | {"hold": True, "after": 40}, *steps[1:])
    agent, kwargs = codex_agent(codex, CODEX_CONFIG + "stream_idle_timeout_ms = 2000\n" + CODEX_WITH_LESS)
    settings = {"context_length": 400_000, "keep_alive_seconds": 60.0, "grace_seconds": 30.0}
    house = running_proxy(tmp_path, engine.url, load_rendering(tokenizer), **settings)
    with house as proxy, ThreadPoolExecutor() as pool:
        running = pool.submit(drive, tmp_path, proxy, agent, kwargs)
        until(lambda: any(call.joined for path in tmp_path.glob("*/1.log") for call in read(path).calls), 60)
        engine.release()
        result, answer, built = running.result()
    check(result, answer, built)
    assert built.calls.joined == 1
    assert len(engine.requests) == 3


def test_codex_that_looks_at_an_image_goes_on(tmp_path, codex, proxy, engine, tokenizer):
    """The model takes text alone: it is told so where the image would be."""
    write = f"echo apple > answer.txt; echo {PIXEL} | base64 -d > pixel.png"
    engine.script(calls("exec_command", cmd=write), calls("view_image", path="pixel.png"), {"text": "It is there."})
    result, answer, built = drive(tmp_path, proxy, *codex_agent(codex, CODEX_CONFIG + CODEX_WITH_LESS))
    check(result, answer, built)
    (trace,) = built.traces
    assert NOT_SHOWN in load_rendering(tokenizer).decode(trace.response_ids)


def test_gemini_cli_to_a_trajectory(tmp_path, gemini, proxy, engine):
    """It shows thoughts and gives none back: they return in the signatures of calls."""
    write = calls("write_file", file_path="/workspace/answer.txt", content="apple\n")["text"]
    engine.script(
        {"text": f'<think>\nA file is asked for.\n</think>\n\nI write "é".{write}'},
        calls("run_shell_command", command="cat answer.txt"),
        {"text": "It is there."},
    )
    settings = shlex.quote(json.dumps(GEMINI_SETTINGS))
    command = f"mkdir -p ~/.gemini && echo {settings} > ~/.gemini/settings.json && exec "
    command += shlex.join([str(gemini), "-m", "policy", "--yolo", "--output-format", "json", "-p", INSTRUCTION])
    shell = ExecInput(command=command, env={"GEMINI_CLI_TRUST_WORKSPACE": "true"})
    installed = next(path.parent for path in gemini.resolve().parents if path.name == "node_modules")
    agent = AgentSpec(harness="shell", custom_shell=shell)
    result, answer, built = drive(tmp_path, proxy, agent, bound(gemini, installed))
    check(result, answer, built)
    assert "It is there." in result.output
