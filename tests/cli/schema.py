"""Make docs/cli.schema.json: `python -m tests.cli.schema`.

The types of the fields come from the classes of the results, and the descriptions from the sections
Attributes of their docstrings.
"""

import enum
import functools
import inspect
import json
import re
import sys
import types
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from urllib.parse import quote

import pytest

from adk_secure_sessions import maintenance, migration
from adk_secure_sessions.cli.adk_doctor import PlaintextReport
from adk_secure_sessions.cli.database_commands import VerifyOutput
from adk_secure_sessions.integrations.artifact_migration import ArtifactMigration
from adk_secure_sessions.integrations.blob_maintenance import BlobPurge
from adk_secure_sessions.maintenance.debug import Location, RecordHeader
from adk_secure_sessions.migration import Export
from adk_secure_sessions.results import Result
from tests.pages import DOCS

FILE = DOCS / "cli.schema.json"
DRY_RUN = {"dry_run": (bool, "Whether nothing was changed: the numbers are the expected ones.")}
ROWS = "What the command found."
# The fields of each command: a class, or the type and the description of each field, or both.
OUTPUTS: dict[str, list[Any]] = {
    "init": [maintenance.Initialization],
    "check": [maintenance.Check],
    "status": [maintenance.Status],
    "verify": [VerifyOutput],
    "debug lookup": [{"rows": (tuple[Location, ...], ROWS)}],
    "debug inspect": [{"rows": (tuple[RecordHeader, ...], ROWS)}],
    "purge sessions": [DRY_RUN, maintenance.SessionPurge],
    "purge audit": [DRY_RUN, maintenance.AuditPurge],
    "purge blobs": [DRY_RUN, BlobPurge],
    "erase-user": [DRY_RUN, maintenance.Erasure],
    "rotate root": [DRY_RUN, maintenance.RootRotation],
    "rotate master": [DRY_RUN, maintenance.MasterRotation],
    "rotate data": [DRY_RUN, maintenance.DataRotation],
    "retire": [DRY_RUN, maintenance.Retirement],
    "separate": [maintenance.Separation],
    "move-keys": [maintenance.KeyMove],
    "index fill": [maintenance.IndexChange],
    "index drop": [maintenance.IndexChange],
    "migrate copy": [DRY_RUN, migration.Migration],
    "migrate compare": [migration.Comparison],
    "migrate erase-source": [DRY_RUN, migration.SourceErasure],
    "migrate artifacts": [DRY_RUN, ArtifactMigration],
    "export": [Export],
    "audit export": [maintenance.AuditExport],
    "vacuum": [maintenance.Vacuum],
    "adk doctor": [PlaintextReport],
}


def is_class(hint: Any) -> bool:
    named = isinstance(hint, type) and hasattr(hint, "_fields")
    return named or (isinstance(hint, type) and issubclass(hint, Result))


def described(cls: type) -> dict[str, str]:
    """Return the descriptions of the fields in the docstrings of *cls* and its bases, by name."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        section = re.split(r"\n\s*Attributes:\n", inspect.cleandoc(one.__doc__ or ""))[-1]
        found |= re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.replace("`None`", "null").split()) for name, text in found.items()}


def of_type(hint: Any, name: str = "") -> dict[str, Any]:
    parts = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        (one,) = (part for part in parts if part is not types.NoneType)
        schema = of_type(one, name)
        if isinstance(schema.get("type"), str) and schema["type"] not in ("object", "array"):
            return {"type": [schema["type"], "null"]}
        return {"anyOf": [schema, {"type": "null"}]}
    if get_origin(hint) is Literal:
        return {"enum": list(parts)}
    if hint is maintenance.Problem and name:
        return {"$ref": "#/$defs/problem"}
    if is_class(hint):
        return of_fields(hint.__doc__.partition("\n")[0], [hint])
    if get_origin(hint) in (tuple, list):
        if parts[-1] is Ellipsis or get_origin(hint) is list:
            element = "id" if name.endswith("_ids") else f"{name}[]"
            return {"type": "array", "items": of_type(parts[0], element)}
        items = [of_type(part) for part in parts]
        return {"type": "array", "prefixItems": items, "items": False}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [one.value for one in hint]}
    if hint is int and (name in ("id", "row") or name.endswith("_id")):
        return {"type": "string"}
    types_of = {int: "integer", float: "number", bool: "boolean", str: "string"}
    return {"type": types_of[hint]} if hint in types_of else {}


def of_fields(description: str, parts: list[Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, dict):
            for name, (hint, text) in part.items():
                properties[name] = of_type(hint, name) | {"description": text}
            continue
        texts = described(part)
        hints = get_type_hints(part)
        names = getattr(part, "_fields", None) or [one.name for one in fields(part)]
        for name in names:
            properties[name] = of_type(hints[name], name) | {"description": texts[name]}
    return {
        "description": description,
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def schema() -> dict[str, Any]:
    """Return the schema; failures are kept as they are."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    failure = found["$defs"]["failure"]
    made = {name: of_fields(f"The output of {name}.", parts) for name, parts in OUTPUTS.items()}
    problem = of_type(maintenance.Problem)
    return found | {"$defs": {"failure": failure, "problem": problem, **made}}


@functools.cache
def validator(name: str) -> Any:
    """Return the validator of an output by the file; *name* is a command, or `failure`."""
    with pytest.MonkeyPatch.context() as patch:
        # To know the format of an internationalized address, it would compile a grammar for 1.5 s.
        patch.setitem(sys.modules, "rfc3987_syntax", None)
        import jsonschema
    schema = json.loads(FILE.read_text(encoding="utf-8"))
    return jsonschema.Draft202012Validator({**schema, "$ref": f"#/$defs/{quote(name)}"})


def text() -> str:
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
