"""What became of every call of a session: trainable in one chain, or excluded under one name.

`sampled = trainable + Σ excluded` holds because each call's tokens go one way as a whole.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from polar.records import BuildResult, CallCounts, Exclusion, TokenLedger, Trace
from polar.sessionlog import Call, SessionLog
from polar.trajectory.audit import audit
from polar.trajectory.calls import answered, exclusion, usable_logprobs, without_ids
from polar.trajectory.sequences import Sequences


class Session:
    """A log with its sequences and the fate of every call that sampled: it is in `trainable` or in `excluded`."""

    def __init__(self, log: SessionLog, *, include_auxiliary: bool = False) -> None:
        self.log = log
        self.sequences = Sequences(log)
        continued = {self.sequences.continued_by(call) for call in log.calls}
        self.trainable: dict[int, Call] = {}
        self.excluded: dict[int, Exclusion] = {}
        for call in log.calls:
            if not len(call.ids):
                continue
            kept = call.number in continued
            reason = exclusion(call, continued=kept, include_auxiliary=include_auxiliary)
            if reason is None:
                self.trainable[call.number] = call
            else:
                self.excluded[call.number] = reason

    def chains(self, *, unbroken: bool = False) -> list[list[Call]]:
        """The trainable calls in chains, each call's prompt keeping the whole sequence of the one before it.

        A call joins the chain whose last call it continues; else it starts one. A call without usable logprobs is the
        last of its chain, unless `unbroken`.
        """
        chains: list[list[Call]] = []
        growing: dict[int, list[Call]] = {}
        for call in self.trainable.values():
            before = self.sequences.continued_by(call, self.trainable)
            chain = growing.pop(before, None) if before is not None else None
            if chain is None:
                chain = []
                chains.append(chain)
            chain.append(call)
            if unbroken or usable_logprobs(self.log.header, call):
                growing[call.number] = chain
        return chains

    def sequence(self, call: Call) -> np.ndarray:
        """Prompt and sampled ids of the call; not writable, because traces share it."""
        sequence = self.sequences.sequence(call.number)
        sequence.flags.writeable = False
        return sequence

    def result(self, traces: list[Trace]) -> BuildResult:
        """The audited result. Raises BuildFault."""
        result = BuildResult(traces=traces, tokens=self._ledger(), calls=self._counts())
        audit(self.log, result)
        return result

    def _ledger(self) -> TokenLedger:
        tokens: Counter[Exclusion] = Counter()
        for number, reason in self.excluded.items():
            tokens[reason] += len(self.log.call(number).ids)
        return TokenLedger(
            sampled=sum(len(call.ids) for call in self.log.calls),
            trainable=sum(len(call.ids) for call in self.trainable.values()),
            excluded={reason.value: tokens[reason] for reason in Exclusion if reason in tokens},
        )

    def _counts(self) -> CallCounts:
        completions = [call for call in self.log.calls if answered(call)]
        prompts = {call.number: call.prompt for call in completions if call.prompt is not None}
        sources = Counter(prompt.source for prompt in prompts.values())
        whys = Counter(prompt.why for prompt in prompts.values())
        lost = {call.number: count for call in completions if (count := self._lost(call)) is not None}
        reported = [call.finished.usage for call in completions if call.finished and without_ids(call)]
        forks = Counter(prompts[number].source for number in lost)
        return CallCounts(
            completions=len(completions),
            continued=sources["continued"],
            rendered=sources["rendered"],
            rendered_reasoning=whys["reasoning"],
            rendered_no_bridge=whys["no_bridge"],
            forks=forks.total(),
            drift=forks["engine"],
            joined=sum(call.joined for call in self.log.calls),
            refused=len(self.log.refusals),
            prompt_tokens=sum(call.prompt_length for call in completions),
            prefilled_again=sum(lost.values()),
            missing_logprobs=sum(
                len(call.ids) > 0 and not usable_logprobs(self.log.header, call) for call in completions
            ),
            without_ids=len(reported),
            reported_prompt_tokens=sum(usage.get("prompt_tokens", 0) for usage in reported),
            reported_completion_tokens=sum(usage.get("completion_tokens", 0) for usage in reported),
        )

    def _lost(self, call: Call) -> int | None:
        """Of a fork, how many ids of its prompt stand where the call that its messages continue had others."""
        expected = call.prompt.expected if call.prompt is not None else None
        if expected is None or not self.sequences.knows(expected):
            return None
        kept, length = self.sequences.kept(call, expected), self.log.call(expected).length
        return min(length, call.prompt_length) - kept if kept < length else None
