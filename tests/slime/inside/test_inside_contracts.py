"""Slime's own contract tests for plugins, over the bridge's four hooks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.bridge.conftest import Gateway
from tests.server.conftest import TOKEN, Server

CHECKOUT = Path(os.environ["POLAR_INSIDE_SLIME"])
HOOKS = {
    "SLIME_CONTRACT_CUSTOM_RM_PATH": "slime_bridge.reward.reward_func",
    "SLIME_CONTRACT_CUSTOM_REWARD_POST_PROCESS_PATH": "slime_bridge.reward_post_process.post_process_rewards",
    "SLIME_CONTRACT_DATA_SOURCE_PATH": "slime_bridge.data_source.CeilEpochRolloutDataSourceWithBuffer",
    "SLIME_CONTRACT_ROLLOUT_FUNCTION_PATH": "tests.slime.inside.contract_shim.generate",
    "SLIME_CONTRACT_EVAL_FUNCTION_PATH": "tests.slime.inside.contract_shim.generate",
}


def test_the_four_hooks_keep_slimes_plugin_contracts(server: Server, gateway: Gateway, tmp_path: Path):
    prompts = tmp_path / "eval.jsonl"
    prompts.write_text('{"input": "e0"}\n')
    here = {"POLAR_TEST_SERVER": server.url, "POLAR_TEST_PROMPTS": str(prompts), "POLAR_CONTROL_PLANE_TOKEN": TOKEN}
    path = f"{os.environ['PYTHONPATH']}:{Path.cwd()}"
    names = ("rollout", "path_loading", "runtime_hook")
    contracts = [f"tests/plugin_contracts/test_plugin_{name}_contracts.py" for name in names]
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *contracts],
        cwd=CHECKOUT,
        env=os.environ | HOOKS | here | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert finished.returncode == 0, finished.stdout[-5000:] + finished.stderr[-1000:]
    assert {task["task_id"].split("-")[0] for task in gateway.tasks()} == {"contract"}
