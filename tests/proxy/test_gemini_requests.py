"""What a Gemini request is read as: ids and signatures that clients keep or drop, both spellings, refusals by name."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from polar.proxy.canonical import Refusal
from polar.proxy.dialects.gemini import Gemini

PATH = "/v1beta/models/policy:generateContent"
BASH = {"name": "bash", "parameters": {"type": "OBJECT", "properties": {"cmd": {"type": "STRING"}}}}


def parse(**body: Any) -> Any:
    return Gemini(sse=True).parse({"contents": [{"parts": [{"text": "x"}]}]} | body, PATH)


def contents(*turns: tuple[str, list[Any]]) -> dict[str, Any]:
    return {"contents": [{"role": role, "parts": parts} for role, parts in turns]}


def test_results_without_ids_answer_calls_by_name_and_order() -> None:
    def call(name: str, **fields: Any) -> dict[str, Any]:
        return {"functionCall": {"name": name, "args": {}} | fields}

    def result(name: str, **fields: Any) -> dict[str, Any]:
        return {"functionResponse": {"name": name, "response": {"output": name}} | fields}

    turns = [("user", [{"text": "go"}]), ("model", [call("f"), call("g"), call("f", id="c3")])]
    turns += [("user", [result("g"), result("f"), result("f", id="c3"), {"text": "now"}]), ("model", [call("f")])]
    turns += [("user", [result("f")])]
    messages = parse(**contents(*turns)).messages
    first, second = [[call["id"] for call in message["tool_calls"]] for message in messages if "tool_calls" in message]
    assert len({*first, *second}) == 4
    answered = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
    assert answered == [first[1], first[0], "c3", second[0]]
    assert [message["role"] for message in messages] == [
        *("user", "assistant", "tool", "tool", "tool", "user", "assistant", "tool")
    ]


def test_a_signature_is_ours_or_ignored() -> None:
    """SDKs write it in base64's other alphabet; Gemini CLI puts words of its own where there is none."""

    def thought(signature: str) -> Any:
        part = {"functionCall": {"name": "f", "args": {}}, "thought_signature": signature}
        return parse(**contents(("user", [{"text": "x"}]), ("model", [part]))).messages[1].get("reasoning_content")

    signed = base64.b64encode("polar:so ~~? 水".encode()).decode()
    assert thought(signed) == thought(signed.translate(str.maketrans("+/", "-_")).rstrip("=")) == "so ~~? 水"
    for foreign in ("skip_thought_signature_validator", "", "AAAA", "é"):
        assert thought(foreign) is None


def test_both_spellings_of_fields_and_googles_schemas_are_read() -> None:
    schema = {
        "type": "OBJECT",
        "property_ordering": ["list_of"],
        "properties": {
            "list_of": {"type": "ARRAY", "min_items": "1", "items": {"type": "STRING", "nullable": True}},
            "either": {"anyOf": [{"type": "INTEGER"}, {"type": "BOOLEAN"}]},
        },
    }
    ask = parse(
        system_instruction={"parts": [{"text": "be"}, {"text": "brief"}]},
        tools=[{"function_declarations": [{"name": "f", "parameters": schema}, BASH]}],
        tool_config={"function_calling_config": {"mode": "ANY", "allowed_function_names": ["f"]}},
        generation_config={"max_output_tokens": 5, "topK": 40.0, "stopSequences": ["END"], "top_p": 0.5},
    )
    assert ask.messages[0] == {"role": "system", "content": "be\nbrief"}
    assert ask.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "list_of": {"type": "array", "minItems": 1, "items": {"type": ["string", "null"]}},
            "either": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
        },
    }
    assert ask.tool_choice == {"name": "f"}
    assert ask.sampling == {"max_tokens": 5, "top_k": 40, "stop": ["END"], "top_p": 0.5}
    calling = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f", "g"]}}
    ask = parse(tools=[{"functionDeclarations": [{"name": name} for name in "fgh"]}], toolConfig=calling)
    assert ([tool["function"]["name"] for tool in ask.tools], ask.tool_choice) == (["f", "g"], "required")
    assert parse(toolConfig={"functionCallingConfig": {"mode": "NONE"}}).tool_choice == "none"


REFUSED = [
    (contents(("user", [{"inlineData": {"mimeType": "image/png", "data": ""}}])), "inlineData"),
    (contents(("user", [{"fileData": {"fileUri": "x"}}])), "fileData"),
    (contents(("model", [{"executableCode": {"code": "1"}}])), "executableCode"),
    (contents(("user", [{"functionResponse": {"name": "f", "parts": [{"fileData": {}}]}}])), "fileData"),
    ({"tools": [{"googleSearch": {}}]}, "googleSearch"),
    ({"cachedContent": "cachedContents/1"}, "cachedContent"),
    ({"generationConfig": {"candidateCount": 2}}, "candidateCount"),
    ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "text/x.enum"),
    ({"generationConfig": {"response_schema": {"type": "STRING"}}}, "responseSchema"),
    ({"generationConfig": {"responseFormat": {}}}, "responseFormat"),
    ({"generationConfig": {"responseModalities": ["TEXT", "IMAGE"]}}, "IMAGE"),
    ({"contents": []}, "contents"),
    (contents(("system", [{"text": "x"}])), "'system'"),
    ({"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}}, "'SOME'"),
]


@pytest.mark.parametrize(("body", "name"), REFUSED, ids=[name for _, name in REFUSED])
def test_what_is_not_taken_is_refused_by_name(body: dict[str, Any], name: str) -> None:
    with pytest.raises(Refusal, match=name) as refused:
        parse(**body)
    assert Gemini(sse=True).error(refused.value)[0] == 400
