"""What the validators of a task ask beyond the types of its fields, said in JSON Schema for the API's description."""

from __future__ import annotations

from typing import Any

from polar.evaluators import EVALUATORS
from polar.requests import LONGEST_IDENTIFIER
from polar.trajectory import BUILDERS

Schema = dict[str, Any]
_NULL: Schema = {"type": "null"}
_TEXT: Schema = {"type": "string", "minLength": 1, "pattern": r"^[^\x00]+$"}
_PLUG_IN: Schema = {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$"}


def narrow(schemas: dict[str, Schema]) -> None:
    """Writes them into the schemas of TaskRequest and what it holds."""
    task = schemas["TaskRequest"]["properties"]
    task["task_id"] |= {"minLength": 1, "maxLength": LONGEST_IDENTIFIER, "pattern": r"^[^/\\\x00\n.][^/\\\x00\n]*$"}
    task["instruction"]["pattern"] = r"\S"
    task["callback_url"] = _nullable({"type": "string", "format": "uri", "pattern": "^https?://[a-z0-9]+(:80|/|$)"})
    schemas["StrategySpec"]["properties"]["strategy"] |= _named(BUILDERS)
    schemas["EvaluatorSpec"]["properties"]["strategy"] |= _named(EVALUATORS)
    schemas["ExecInput"]["properties"]["command"] |= _TEXT
    for schema in schemas.values():
        if "env" in schema["properties"]:
            schema["properties"]["env"]["propertyNames"] = {"pattern": r"^[^=\x00]+$"}
            schema["properties"]["env"]["additionalProperties"]["pattern"] = r"^[^\x00]*$"
    schemas["AgentSpec"]["oneOf"] = [
        _with(harness={"const": "shell"}, custom_shell={"type": "object"}, import_path=None),
        _with(harness=_TEXT | {"not": {"const": "shell"}}, custom_shell=None, import_path=None),
        _with(import_path=_PLUG_IN, harness=None, custom_shell=None),
    ]
    schemas["RuntimeSpec"]["properties"]["import_path"] = _nullable(_PLUG_IN)
    schemas["RuntimeSpec"]["not"] = _with(backend=_TEXT, import_path=_TEXT)
    schemas["PrepareAction"]["oneOf"] = [
        _with(type={"const": "exec"}, command=_TEXT, source=None, target=None, content=None),
        _with(type={"const": "upload_file"}, source=_TEXT, target=_TEXT, content=None, command=None),
        _with(type={"const": "upload_file"}, content={"type": "string"}, target=_TEXT, source=None, command=None),
        _with(type={"const": "upload_dir"}, source=_TEXT, target=_TEXT, content=None, command=None),
    ]


def _with(**fields: Schema | None) -> Schema:
    """An object that has these fields; None: that does not."""
    properties = {name: _NULL if schema is None else schema for name, schema in fields.items()}
    return {"required": [name for name, schema in fields.items() if schema is not None], "properties": properties}


def _named(known: Any) -> Schema:
    """One of the house's, or a plug-in of the caller's own."""
    return {"anyOf": [{"enum": sorted(known)}, _PLUG_IN]}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, _NULL], "default": None}
