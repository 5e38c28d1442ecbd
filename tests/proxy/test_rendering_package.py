"""The package renderers behind our protocol: only on request, every bridge checked, what is malformed stays text."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peers.chat_templates import Style
from peers.engine import scripted_engine
from polar.config import InferenceSettings, NodeSettings
from polar.errors import ConfigError
from polar.gateway.engine_watch import EngineWatch
from polar.protocols import Rendering
from polar.proxy import load_rendering, make_engine
from running_proxy import user

pytest.importorskip("renderers", reason="the extra renderers is not installed")

TOOLS = [{"type": "function", "function": {"name": "bash", "description": "d", "parameters": {"type": "object"}}}]
MARKUP = [f"<{end}{name}>" for name in ("tool_call", "tool_response", "think") for end in ("", "/")]
STYLE = Style(template="", markup=tuple(MARKUP))


def called(arguments: Any, name: str = "bash") -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "name": "bash", "content": content}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return STYLE.make(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def package(folder: Path) -> Rendering:
    return load_rendering(folder, "renderers:qwen3")


def ids_of(rendering: Rendering, text: str) -> np.ndarray:
    """As it stands in a prompt, between the words around it."""
    around = [rendering.render([user(said)], None) for said in ("", text)]
    behind = next(n for n in range(1, len(around[0])) if around[0][-n] != around[1][-n])
    return around[1][len(around[0]) - behind + 1 : len(around[1]) - behind + 1]


def test_it_needs_no_template_and_writes_one_prompt(package: Rendering) -> None:
    text = package.decode(package.render([user("hello"), called('{"a": 1}'), result("x")], TOOLS))
    assert text.endswith("<tool_response>\nx\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert [package.decode(np.asarray([end])) for end in package.stop_ids] == ["<|im_end|>", "<|endoftext|>"]


@pytest.mark.parametrize("new", [[user("b")], [result("1")], [result("1"), result("2")], [result("1"), user("b")]])
def test_a_bridge_starts_with_prompt_and_sampled_ids(package: Rendering, new: list[dict[str, Any]]) -> None:
    answer = called('{"a": 1}')
    one_shot = package.render([user("a"), answer, *new], TOOLS)
    prompt = package.render([user("a")], TOOLS)
    end = len(prompt) + int(np.flatnonzero(one_shot[len(prompt) :] == package.stop_ids[0])[0]) + 1
    added = package.bridge(one_shot[:end], new, TOOLS, sampled=end - len(prompt))
    np.testing.assert_array_equal(added, one_shot[end:])
    cut = package.bridge(one_shot[: end - 1], new, TOOLS, sampled=end - 1 - len(prompt))
    np.testing.assert_array_equal(cut, one_shot[end - 1 :])


def test_no_bridge_where_the_package_gives_none(package: Rendering) -> None:
    prompt = package.render([user("a")], None)
    assert package.bridge(prompt, [{"role": "assistant", "content": "made up"}], None, sampled=0) is None
    assert package.bridge(prompt, [], None, sampled=0) is None


def test_answers_are_read_and_malformed_calls_stay_text(package: Rendering) -> None:
    good = '<think>\nhm\n</think>\n\nso <tool_call>\n{"name": "bash", "arguments": {"a": 1}}\n</tool_call>'
    read = package.parse(ids_of(package, good), TOOLS)
    assert (read["content"], read["reasoning_content"]) == ("so", "hm")
    assert json.loads(read["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    for bad in ('<tool_call>\n{"name": "bash", "arg</tool_call>', '<tool_call>\n{"name": "bash", "arguments": [1]}'):
        assert package.parse(ids_of(package, bad), TOOLS) == {"role": "assistant", "content": bad}
    assert "tool_calls" not in package.parse(ids_of(package, good), None)
    assert package.reader(TOOLS, []).feed(ids_of(package, "hello")) == []


@pytest.mark.parametrize("arguments", ["{}", {}, "", None, '{"a":1', [1]])
def test_any_arguments_render(package: Rendering, arguments: Any) -> None:
    """Case 9."""
    text = package.decode(package.render([user("a"), called(arguments), result("1")], None))
    said = text.partition('"arguments": ')[2].rpartition("}\n</tool_call>")[0]
    assert json.loads(said) == ({"arguments": arguments} if arguments not in ("{}", {}, "", None) else {})


def test_what_cannot_be_used_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no 'qwen'"):
        load_rendering(folder, "renderers:qwen")
    with pytest.raises(ConfigError, match="cannot be used"):
        load_rendering(folder, "renderers:llama-3")
    with pytest.raises(ConfigError, match="neither template nor renderers:NAME"):
        load_rendering(folder, "renderer")
    with pytest.raises(ConfigError, match="no chat template"):
        load_rendering(folder)


@pytest.mark.parametrize(("name", "problem"), [("qwen3", None), ("qwen", "has no 'qwen'")])
def test_a_gateways_settings_choose_it(folder: Path, name: str, problem: str | None) -> None:
    async def watched(url: str) -> EngineWatch:
        engine = await make_engine("sglang", url)
        inference = InferenceSettings(base_url=url, tokenizer=str(folder), rendering=f"renderers:{name}")
        news = asyncio.Event()
        watch = EngineWatch(engine, NodeSettings(inference=inference), news)
        task = asyncio.create_task(watch.watch())
        async with asyncio.timeout(30):
            while watch.state.problem == "not probed yet":
                await asyncio.sleep(0.01)
        task.cancel()
        await engine.close()
        return watch

    with scripted_engine(folder) as engine:
        watch = asyncio.run(watched(engine.url))
    assert (watch.proxy is None) == (problem is not None)
    assert (problem or "") in (watch.state.problem or "")


def real(name: str) -> Path:
    folder = Path(os.environ.get("POLAR_TEST_TOKENIZERS", "")) / name
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"POLAR_TEST_TOKENIZERS names no folder with {name}/tokenizer.json")
    return folder


@pytest.mark.slow
def test_the_package_and_the_real_template_of_qwen3_write_the_same() -> None:
    ours, theirs = load_rendering(real("qwen3")), load_rendering(real("qwen3"), "renderers:qwen3")
    messages = [{"role": "system", "content": "s é"}, user("a"), called('{"a": "é"}'), result("x"), result("y")]
    for conversation in (messages[1:2], messages, [*messages, user("b")]):
        np.testing.assert_array_equal(ours.render(conversation, TOOLS), theirs.render(conversation, TOOLS))
    sequence = np.append(ours.render(messages, TOOLS), ours.stop_ids[0])
    for new in ([user("c")], [result("z")], [result("z"), result("z")]):
        bridges = [one.bridge(sequence, new, TOOLS, sampled=1) for one in (ours, theirs)]
        np.testing.assert_array_equal(*bridges)


@pytest.mark.slow
def test_the_package_speaks_harmony_with_the_vocabulary_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's encoder reads o200k_base.tiktoken; the tokenizer says the same, spelt otherwise."""
    (tmp_path / "o200k_base.tiktoken").write_bytes(o200k(real("gptoss")))
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    rendering = load_rendering(real("gptoss"), "renderers:gpt-oss")
    prompt = rendering.render([user("hello")], TOOLS)
    said = 'hm<|end|><|start|>assistant<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"a": 2}'
    sampled = np.append(load_ids(real("gptoss"), said), rendering.stop_ids[1])
    read = rendering.parse(sampled, TOOLS)
    assert (read["reasoning_content"], read["tool_calls"][0]["function"]["name"]) == ("hm", "bash")
    added = rendering.bridge(np.concatenate([prompt, sampled]), [result("x")], TOOLS, sampled=len(sampled))
    assert rendering.decode(added).startswith("<|start|>functions.bash to=assistant<|channel|>commentary<|message|>x")


def load_ids(folder: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids


def o200k(folder: Path) -> bytes:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (number for number in range(256) if number not in printable)
    letters = {chr(number): number for number in printable} | {chr(256 + at): n for at, n in enumerate(others)}
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    ranks = sorted((number, text) for text, number in vocabulary.items() if number < 199_998)
    lines = [(base64.b64encode(bytes(letters[one] for one in text)), number) for number, text in ranks]
    return b"".join(b"%s %d\n" % line for line in lines)
