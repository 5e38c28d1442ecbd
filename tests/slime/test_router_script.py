"""scripts/patch/patch_slime_router_tokens.sh says where no patch is needed, and elsewhere what is wrong.

With POLAR_TEST_ROUTER (a Python that has sglang-router) the real router stands between; neither needs Slime.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.chain import polar_serve
from tests.engines.real import program, router
from tests.peers.engine import ScriptedEngine, scripted_engine
from tests.peers.harness import scripted
from tests.peers.tokenizer import make_tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "patch" / "patch_slime_router_tokens.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with scripted_engine() as made:
        yield made


def test_ids_come_through(engine: ScriptedEngine):
    done = run(engine.url + "/")
    assert done.returncode == 0, done.stderr
    assert "whole: ids [7, 9], a logprob each, policy version 1" in done.stdout
    assert "streamed: ids [7, 9]" in done.stdout
    assert "no patch is needed, and nothing was changed" in done.stdout


def test_events_that_hold_only_what_is_new():
    with scripted_engine(incremental=True) as made:
        assert "streamed: ids [7, 9]" in run(made.url).stdout


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ({"ids": [7, 9], "fault": "no_ids"}, "whole: the answer has no output_token_logprobs"),
        ({"ids": [7, 9, 8], "logprobs": [-0.5]}, "whole: 3 tokens, but 1 pairs of logprob and id"),
        ({"ids": [7], "logprobs": [float("nan")]}, "whole: a token has no id or no logprob"),
        ({"ids": [7], "fault": "500"}, "answered 500"),
    ],
)
def test_what_is_wrong_is_told(engine: ScriptedEngine, step: dict, why: str):
    engine.script(step)
    done = run(engine.url)
    assert done.returncode == 1
    assert why in done.stderr
    assert "no patch" not in done.stdout


def test_without_a_router_it_says_that_no_patch_is_needed():
    done = run()
    assert done.returncode == 0
    assert "No patch is needed, and none is made." in done.stdout
    assert run("http://127.0.0.1:9").returncode == 1
    assert run("/an/old/argument").returncode == 2


@pytest.mark.slow
def test_the_real_router_between_proxy_and_engine(tmp_path: Path):
    """The script, then a whole session through `polar serve`: the ids that the engine sampled are in its trace."""
    python = program("POLAR_TEST_ROUTER", "sglang-router's Python")
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    with (
        scripted_engine(tokenizer, numbered=True) as engine,
        router(python, engine.url, tmp_path / "router.log") as url,
        polar_serve(tmp_path / "data", url, "--engine", "sglang", "--tokenizer", str(tokenizer)) as chain,
    ):
        done = run(url)
        assert done.returncode == 0, done.stderr
        agent = scripted(("call", "hello"), ("call", "and on"))
        [result] = chain.run("through", evaluator={"strategy": "session_completed"}, **agent)
        [trace] = result["trajectory"]["traces"]
        prompt, said = engine.sampled[-1]
        kept = [token for token, mask in zip(trace["response_ids"], trace["loss_mask"], strict=True) if mask]
        assert trace["prompt_ids"] + trace["response_ids"] == prompt + [token for token, _ in said]
        assert kept[-len(said) :] == [token for token, _ in said]
        assert trace["response_logprobs"][-len(said) :] == [logprob for _, logprob in said]
        assert result["trajectory"]["metadata"]["calls"]["continued"] == 1
