"""SWE-Gym's reward: 1.0 when every test of FAIL_TO_PASS and PASS_TO_PASS passes after the hidden test patch, else 0.0.

The tests come into the sandbox only when every process of the agent is dead. Files that the test patch touches are
put back first, so that what the agent made of them counts for nothing. Tests that hang, or that the agent broke,
are not passed: a 0, not a fault.
"""

from __future__ import annotations

import re
import shlex
from typing import Annotated, ClassVar

from pydantic import Field

from polar.errors import EvaluationFault
from polar.evaluators.base import BaseEvaluator, Config
from polar.protocols import EvaluationContext, Runtime
from polar.records import EvaluationResult

_TOUCHED = re.compile(r"^diff --git a/(\S+) b/(\S+)$", re.MULTILINE)
_PASSED = ("PASSED ", "XFAIL ")
"""lines of pytest's summary (-rA)"""
_SHOWN = 20


class SweGymConfig(Config):
    """`test_command` prints pytest's summary; it is ended after `test_seconds`."""

    base_commit: str
    test_patch: str
    test_command: str
    fail_to_pass: Annotated[list[str], Field(min_length=1)]
    pass_to_pass: list[str]
    test_seconds: Annotated[float, Field(gt=0)] = 600.0


class SweGym(BaseEvaluator):
    Config: ClassVar[type[Config]] = SweGymConfig

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        runtime = context.runtime
        if runtime is None:
            raise EvaluationFault("SWE-Gym's tests need a sandbox, and the session has none left")
        passed = await self._passed(runtime, context)
        wanted = [*self.config.fail_to_pass, *self.config.pass_to_pass]
        missing = [name for name in wanted if _word(name) not in passed]
        solved = sum(_word(name) in passed for name in self.config.fail_to_pass)
        metadata = {
            "fail_to_pass": f"{solved}/{len(self.config.fail_to_pass)}",
            "not_passed": missing[:_SHOWN],
            "passed": len(passed),
        }
        return EvaluationResult(outcome_reward=float(not missing), metadata=metadata)

    async def _passed(self, runtime: Runtime, context: EvaluationContext) -> set[str]:
        """The tests that passed. Raises EvaluationFault where the test command cannot be started."""
        patch, log = f"{runtime.session_dir}/hidden_tests.patch", f"{runtime.session_dir}/hidden_tests.log"
        await runtime.write(patch, self.config.test_patch.encode())
        await self.execute(context, f"{restored(self.config)}git apply {patch}")
        await runtime.write(log, b"")
        limited = f"timeout -k 10 {self.config.test_seconds:g} sh -c {shlex.quote(self.config.test_command)}"
        await self.execute(context, f"{limited} > {log} 2>&1")
        lines = (await runtime.read(log)).decode(errors="replace").splitlines()
        return {line.split()[1] for line in lines if line.startswith(_PASSED) and len(line.split()) > 1}


def restored(config: SweGymConfig) -> str:
    """Commands that put the test patch's files back as they were, and remove those that were not there."""
    touched = {path for pair in _TOUCHED.findall(config.test_patch) for path in pair}
    base = shlex.quote(config.base_commit)
    quoted = (shlex.quote(path) for path in sorted(touched))
    return "".join(f"git checkout -q {base} -- {path} 2>/dev/null || rm -rf {path}; " for path in quoted)


def _word(name: str) -> str:
    """A test's name up to its first space: so long the data set has it."""
    return name.split()[0]
