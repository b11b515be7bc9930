"""The command `adk doctor`: finds where google-adk writes user content as plaintext."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from adk_secure_sessions.cli.adk import URI_VARIABLE, adk
from adk_secure_sessions.cli.output import counted, show, table
from adk_secure_sessions.cli.program import one_line_errors

if TYPE_CHECKING:
    from adk_secure_sessions.integrations.leaks import Leak
    from adk_secure_sessions.integrations.service_stores import ServiceStore


def _names(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> set[str]:
    """Convert the values of --allow to a set.  click calls this function.

    Raises:
        click.BadParameter: A value contains an unknown name.
    """
    from adk_secure_sessions.integrations.plaintext_places import PLACES

    names = {name.strip() for text in given for name in text.split(",")} - {""}
    if unknown := sorted(names - set(PLACES)):
        raise click.BadParameter(f"{unknown[0]} is not one of {', '.join(PLACES)}")
    return names


def _with_uris(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `adk web` that name the URIs of services."""
    for name, text in (
        ("memory_service_uri", "The URI of the memory."),
        ("artifact_service_uri", "The URI of the artifacts."),
        ("session_service_uri", "The URI of the sessions."),
        ("service_uri", f"The URI of services without one of their own; or set {URI_VARIABLE}."),
    ):
        variable = URI_VARIABLE if name == "service_uri" else None
        add = click.option(f"--{name}", metavar="URI", envvar=variable, help=text)
        command = add(command)
    return command


@adk.command()
@click.argument("agents_dir", type=click.Path(exists=True, file_okay=False))
@click.option(
    "--allow",
    metavar="NAMES",
    multiple=True,
    callback=_names,
    help="Names of places to leave out, separated by commas, such as eval-sets,logging-plugin.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@_with_uris
def doctor(
    agents_dir: str,
    allow: set[str],
    as_json: bool,
    service_uri: str | None,
    session_service_uri: str | None,
    artifact_service_uri: str | None,
    memory_service_uri: str | None,
) -> None:
    """Find where google-adk writes user content as plaintext.

    Imports the agents in AGENTS_DIR as google-adk does, with their .env files. Checks their
    plugins, the telemetry settings, the logs, and the files that google-adk has written. Prints
    where adk web would store sessions, artifacts and memory: give the same URIs as to adk web.
    Loads services.yaml and services.py, as adk web does. Then prints each place where google-adk
    writes plaintext, and how to prevent that. The exit status is 1 if there is such a place.

    \b
    Example:
      adk-secure-sessions adk doctor agents \\
          --service_uri 'encrypted+sqlite:///x.db?key=env:NAME&blobs=artifacts'
    """
    from adk_secure_sessions.integrations.leaks import (
        check_files,
        check_plaintext_leaks,
        check_stores,
        load_agents,
    )

    uris = {
        "sessions": session_service_uri or service_uri,
        "artifacts": artifact_service_uri or service_uri,
        "memory": memory_service_uri or service_uri,
    }
    # Importing agents may print texts.  stdout must contain only the result, which may be JSON.
    with one_line_errors(), contextlib.redirect_stdout(sys.stderr):
        agents = load_agents(agents_dir)
        stores, found = check_stores(agents_dir, uris)
        found = [*found, *check_plaintext_leaks(), *check_files(agents_dir)]
        for agent in agents.values():
            found += check_plaintext_leaks(agent)
    leaks = [leak for leak in dict.fromkeys(found) if leak.name not in allow]
    result = {"agents": sorted(agents), "services": stores, "leaks": leaks}
    show(result, as_json, _lines(stores, leaks, len(agents)))
    sys.exit(1 if leaks else 0)


def _lines(stores: "list[ServiceStore]", leaks: "list[Leak]", agents: int) -> Iterator[str]:
    yield from table(stores)
    for leak in leaks:
        yield f"{leak.name}: {leak.where}"
        yield f"  {leak.remedy.replace('`', '')}"
    if leaks:
        places = len({leak.name for leak in leaks})
        yield f"google-adk writes plaintext in {counted(places, 'place')}"
    else:
        yield f"{counted(agents, 'agent')}: no plaintext outside the services was found"
