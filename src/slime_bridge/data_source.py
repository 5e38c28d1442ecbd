"""Prompt groups for whole epochs: an epoch is rounded up to whole batches, so that its tail is trained too.

Epoch e is e's order of all prompts, then as many of its first again (counted) as fill the last batch. No prompt is
lost: `save(r)` writes every group that was taken and not returned by rollout r or before; `load` gives them out first.
No two groups that are out have the same numbers.
"""

from __future__ import annotations

import copy
import logging
import threading
from pathlib import Path
from typing import Any

import msgspec

from polar.errors import ConfigError
from slime_bridge.prompt_rows import check_prompts
from slime_bridge.slime_types import RolloutDataSourceWithBuffer, Sample

log = logging.getLogger(__name__)
PromptGroup = list[Any]


class _State(msgspec.Struct, kw_only=True):
    epoch_id: int
    sample_offset: int
    sample_group_index: int
    sample_index: int
    surplus_prompts: int
    metadata: dict[str, Any]
    buffer: list[list[dict[str, Any]]]


class CeilEpochRolloutDataSourceWithBuffer(RolloutDataSourceWithBuffer):
    """Safe to use from the bridge's worker while the trainer saves."""

    def __init__(self, args: Any) -> None:
        if getattr(args, "rollout_global_dataset", True) and getattr(args, "prompt_data", None) is not None:
            check_prompts(args)
        super().__init__(args)
        if self.dataset is not None and len(self.dataset) == 0:
            raise ConfigError(f"prompt_data: {args.prompt_data} has no prompts")
        self.surplus_prompts = 0
        self.resumed_groups = 0
        self._lock = threading.RLock()
        self._taken: dict[int, PromptGroup] = {}
        """by group_index"""
        self._returned: dict[int, list[PromptGroup]] = {}
        """by rollout"""

    def __len__(self) -> int:
        """Prompts of an epoch, rounded up to whole batches: length // rollout_batch_size = rollouts of an epoch."""
        if self.dataset is None:
            return 0
        batch = self.args.rollout_batch_size
        return -(-len(self.dataset) // batch) * batch

    def get_samples(self, num_samples: int) -> list[PromptGroup]:
        """Exactly `num_samples` groups of n_samples_per_prompt samples; the buffer's first."""
        with self._lock:
            groups = self._get_samples_from_buffer(num_samples)
            return groups + [self._next_group() for _ in range(num_samples - len(groups))]

    def take(self, num_samples: int) -> list[PromptGroup]:
        """As get_samples, for a caller that reports what became of them (`returned`, `dropped`, `add_samples`)."""
        with self._lock:
            groups = self.get_samples(num_samples)
            self._taken.update({group[0].group_index: group for group in groups})
            return groups

    def returned(self, rollout_id: int, groups: list[PromptGroup]) -> None:
        """These went to the trainer in this rollout. A trainer may save rollout r after r + 1 was generated."""
        with self._lock:
            for group in groups:
                self._taken.pop(group[0].group_index, None)
            self._returned[rollout_id] = groups
            self._returned = {each: kept for each, kept in self._returned.items() if each >= rollout_id - 1}

    def dropped(self, group: PromptGroup) -> None:
        """This one was given up, and is counted elsewhere."""
        with self._lock:
            self._taken.pop(group[0].group_index, None)

    def add_samples(self, samples: list[PromptGroup]) -> None:
        """Groups that come back, and others: one without numbers, or with another's, gets its own."""
        with self._lock:
            for group in samples:
                super().add_samples([self._numbered(group)])
                if group and self._taken.get(group[0].group_index) is group:
                    del self._taken[group[0].group_index]

    def save(self, rollout_id: int) -> None:
        path = self._path(getattr(self.args, "save", None), rollout_id)
        if path is None:
            return
        with self._lock:
            unconsumed = list(self._taken.values())
            unconsumed += [group for each, groups in self._returned.items() if each > rollout_id for group in groups]
            unconsumed.sort(key=lambda group: group[0].group_index)
            state = _State(
                epoch_id=self.epoch_id,
                sample_offset=self.sample_offset,
                sample_group_index=self.sample_group_index,
                sample_index=self.sample_index,
                surplus_prompts=self.surplus_prompts,
                metadata=self.metadata,
                buffer=[[sample.to_dict() for sample in group] for group in unconsumed + self.buffer],
            )
            document = msgspec.json.encode(state, enc_hook=_plain)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(document)
        partial.replace(path)

    def load(self, rollout_id: int | None = None) -> None:
        """A state that only Slime's own source has written is read by Slime's own rules."""
        path = self._path(getattr(self.args, "load", None), rollout_id)
        if path is None or not path.exists():
            if path is not None and not _slimes(path, rollout_id).exists() and (rollout_id or 0) >= 0:
                log.warning("load: there is no %s: the prompts begin anew behind rollout %s", path, rollout_id)
            super().load(rollout_id)
            return
        try:
            state = msgspec.json.decode(path.read_bytes(), type=_State)
        except msgspec.DecodeError as error:
            raise ConfigError(f"load: {path} is no state of the data source: {error}") from error
        with self._lock:
            self.epoch_id, self.sample_offset = state.epoch_id, state.sample_offset
            self.sample_group_index, self.sample_index = state.sample_group_index, state.sample_index
            self.surplus_prompts, self.metadata = state.surplus_prompts, state.metadata
            self.buffer = [[Sample.from_dict(sample) for sample in group] for group in state.buffer]
            self.resumed_groups = len(self.buffer)
            self._taken.clear()
            self._returned.clear()
            self._shuffle()

    def _next_group(self) -> PromptGroup:
        prompt = Sample() if self.dataset is None else self._next_prompt()
        return self._number([copy.deepcopy(prompt) for _ in range(self.args.n_samples_per_prompt)])

    def _number(self, group: PromptGroup) -> PromptGroup:
        for sample in group:
            sample.group_index, sample.index = self.sample_group_index, self.sample_index
            self.sample_index += 1
        self.sample_group_index += 1
        return group

    def _numbered(self, group: PromptGroup) -> PromptGroup:
        return group if self._has_its_own(group) else self._number([copy.copy(sample) for sample in group])

    def _has_its_own(self, group: PromptGroup) -> bool:
        number = group[0].group_index if group else None
        if number is None or number >= self.sample_group_index or any(sample.index is None for sample in group):
            return False
        waits = any(number == other[0].group_index for other in self.buffer)
        return not waits and self._taken.get(number, group) is group

    def _next_prompt(self) -> Any:
        assert self.dataset is not None
        if self.sample_offset >= len(self):
            self.epoch_id, self.sample_offset = self.epoch_id + 1, 0
            self._shuffle()
        position, prompts = self.sample_offset, len(self.dataset)
        self.sample_offset += 1
        self.surplus_prompts += position >= prompts
        return self.dataset.samples[position % prompts]

    def _shuffle(self) -> None:
        if self.dataset is not None and getattr(self.args, "rollout_shuffle", False):
            self.dataset.shuffle(self.epoch_id)

    def _path(self, folder: str | None, rollout_id: int | None) -> Path | None:
        if folder is None or not getattr(self.args, "rollout_global_dataset", True):
            return None
        return Path(folder) / "rollout" / f"polar_data_source_{rollout_id}.json"


def _slimes(path: Path, rollout_id: int | None) -> Path:
    return path.with_name(f"global_dataset_state_dict_{rollout_id}.pt")


def _plain(value: Any) -> Any:
    """What a prompt's metadata may hold beside JSON: numpy's arrays and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ConfigError(
        f"metadata_key: {type(value).__name__} {str(value)[:60]!r} cannot be saved; use plain JSON values"
    )
