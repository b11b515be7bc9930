"""Commands pass their options to functions under the same names, which mypy does not check."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from adk_secure_sessions import maintenance
from adk_secure_sessions.cli import rotate
from adk_secure_sessions.cli.program import CommonOption
from adk_secure_sessions.integrations.blob_maintenance import purge_blobs
from adk_secure_sessions.migration import (
    compare,
    erase_source,
    export_lines,
    export_to_adk,
    migrate,
    open_source,
)
from tests.cli.support import commands

# The functions to which each command passes `**options`.
FUNCTIONS: dict[str, list[Callable[..., Any]]] = {
    "status": [maintenance.status],
    "verify": [maintenance.verify, maintenance.verify_audit],
    "rotate root": [maintenance.rotate_root],
    "debug lookup": [maintenance.lookup],
    "debug inspect": [maintenance.inspect_records],
    "purge sessions": [maintenance.purge_sessions],
    "purge audit": [maintenance.purge_audit],
    "purge blobs": [purge_blobs],
    "rotate master": [rotate._rotate],
    "rotate data": [rotate._rotate],
    "retire": [maintenance.retire],
    "separate": [maintenance.separate],
    "move-keys": [maintenance.move_keys],
    "index fill": [maintenance.fill_index],
    "index drop": [maintenance.drop_index],
    "erase-user": [maintenance.erase_user],
    "audit export": [maintenance.export_audit],
    "export": [export_lines, export_to_adk],
    "migrate copy": [migrate],
    "migrate compare": [compare],
    "migrate erase-source": [erase_source],
}
OF_SOURCE = ("migrate copy", "migrate compare", "migrate erase-source")


def passed(name: str) -> set[str]:
    """The names of the options that the command passes on."""
    command = commands()[name]
    assert command.callback is not None
    kinds = inspect.signature(command.callback).parameters
    if all(one.kind is not one.VAR_KEYWORD for one in kinds.values()):
        return set()
    options = [one for one in command.params if one.expose_value]
    own = {one.name for one in options if not isinstance(one, CommonOption)}
    # `on_database` and `with_store` convert some options to `db` and `store`, those of `migrate`
    # some to a source and a selection, and `run` asks for the confirmation.
    converted = {"db", "compression", "padding", "allow_http", "confirm"}
    if name in OF_SOURCE:
        converted |= {"app", "since", *inspect.signature(open_source).parameters}
    return {name for name in own if name} - kinds.keys() - converted


def test_functions_of_all_commands_that_pass_options_are_known() -> None:
    others = {"adk doctor"}  # it passes URIs by their names in google-adk
    assert {name for name in commands() if passed(name)} == FUNCTIONS.keys() | others


@pytest.mark.parametrize("name", FUNCTIONS)
def test_options_are_parameters_of_the_function(name: str) -> None:
    for function in FUNCTIONS[name]:
        assert passed(name) <= inspect.signature(function).parameters.keys()
