"""Prepare actions, and the sandbox protocol's small print that the gateway relies on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import TaskFault
from polar.requests import PrepareAction
from polar.runtimes import prepare
from polar.runtimes.inside.framing import Inbox, pack
from sandboxing import both, run, sh, standing


@both
def test_actions_are_carried_out_in_order(tmp_path, kind):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("from the host")

    async def story():
        async with standing(tmp_path, kind) as box:
            home = box.session_dir
            actions = [
                PrepareAction(type="upload_dir", source=str(tmp_path / "data"), target=f"{home}/in"),
                PrepareAction(type="upload_file", content="text itself", target=f"{home}/in/b"),
                PrepareAction(type="exec", command='cat a b > "$OUT"; sleep 100 &', cwd=f"{home}/in", env={"OUT": "c"}),
            ]
            await prepare(box, actions, 30)
            assert await box.read(f"{home}/in/c") == b"from the hosttext itself"
            await box.kill_processes()
            assert (await sh(box, f"cat {home}/in/b")).output == "text itself"

    run(story())


@both
@pytest.mark.parametrize(
    ("action", "said"),
    [
        ({"type": "exec", "command": "echo why >&2; exit 4"}, r"prepare action 1 \(exec\): exit code 4: why"),
        ({"type": "exec", "command": "sleep 100"}, r"prepare action 1 \(exec\): not done within the 3 s"),
        (
            {"type": "upload_file", "source": "/not/there", "target": "/tmp/x"},
            r"prepare action 1 \(upload_file\):.*/not/there",
        ),
        ({"type": "upload_file", "content": "x", "target": "/proc/x/y"}, r"prepare action 1 \(upload_file\):.*/proc/x"),
        ({"type": "upload_file", "source": "/etc", "target": "/tmp/x"}, "/etc is a folder"),
        ({"type": "upload_dir", "source": "/etc/passwd", "target": "/tmp/x"}, "/etc/passwd is no folder"),
        ({"type": "upload_file", "content": "x", "target": "/session" + "/y" * 2000}, "RecursionError"),
        ({"type": "exec", "command": "#" * (1 << 18)}, r"prepare action 1 \(exec\): the command is longer"),
    ],
)
def test_a_failing_action_is_the_tasks_fault_and_named(tmp_path, kind, action, said):
    async def story():
        async with standing(tmp_path, kind) as box:
            actions = [PrepareAction(type="exec", command="true"), PrepareAction(**action)]
            with pytest.raises(TaskFault, match=said) as caught:
                await prepare(box, actions, 3)
            assert caught.value.name == "prepare"
            assert not caught.value.retryable

    run(story())


@given(st.lists(st.dictionaries(st.text(), st.text(), max_size=3), max_size=5), st.data())
def test_messages_arrive_whole_however_the_stream_is_cut(messages, data):
    """Descriptors come with their message or before it; each message gets its own, in order."""
    counts = data.draw(st.lists(st.integers(0, 2), min_size=len(messages), max_size=len(messages)))
    sent = [message | {"fds": count} for message, count in zip(messages, counts, strict=True)]
    stream = b"".join(pack(message) for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    numbers = list(range(sum(counts)))
    inbox, received = Inbox(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += inbox.feed(stream[start:end], numbers)
        numbers = []
    assert [message for message, _ in received] == [
        {key: value for key, value in message.items() if key != "fds"} for message in sent
    ]
    assert [len(fds) for _, fds in received] == counts
    assert [fd for _, fds in received for fd in fds] == list(range(sum(counts)))
