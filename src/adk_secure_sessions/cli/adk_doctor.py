"""The command `adk doctor`: finds where google-adk writes user content as plaintext."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from adk_secure_sessions.cli.adk_commands import URI_VARIABLE, adk, names_among
from adk_secure_sessions.cli.output import print_result
from adk_secure_sessions.cli.program import one_line_errors
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.integrations.plaintext_leaks import (
    LEAK_CHECKS,
    Leak,
    Protection,
    ServiceStore,
)
from adk_secure_sessions.results import Result, aligned, counted


@dataclass
class PlaintextReport(Result):
    """The output of adk doctor.

    Attributes:
        agents: The names of the agents that were checked.
        services: Where adk web would store sessions, artifacts and memory.
        leaks: The places where google-adk writes user content as plaintext.
        notes: The places where it would be plaintext if your own code exported traces.
    """

    agents: tuple[str, ...]
    services: tuple[ServiceStore, ...]
    leaks: tuple[Leak, ...]
    notes: tuple[Leak, ...]

    @property
    def succeeded(self) -> bool:
        return not self.leaks

    def extra_lines(self, dry_run: bool) -> Iterator[str]:
        yield from aligned(self.services)
        why = "note, only if your own code exports traces: "
        for mark, listed in (("", self.leaks), (why, self.notes)):
            for leak in listed:
                yield f"{mark}{leak.name}: {leak.where}"
                yield f"  {leak.remedy.replace('`', '')}"
        if self.leaks:
            places = len({leak.name for leak in self.leaks})
            yield f"google-adk writes plaintext in {counted(places, 'place')}"
        else:
            number = counted(len(self.agents), "agent")
            yield f"{number}: no plaintext outside the services was found"


@adk.command()
@click.argument("agents_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--service_uri",
    metavar="URI",
    envvar=URI_VARIABLE,
    show_envvar=True,
    help="The URI of services without one of their own.",
)
@click.option("--session_service_uri", metavar="URI", help="The URI of the sessions.")
@click.option("--artifact_service_uri", metavar="URI", help="The URI of the artifacts.")
@click.option("--memory_service_uri", metavar="URI", help="The URI of the memory.")
@click.option(
    "--allow",
    metavar="NAMES",
    default="",
    type=names_among(LEAK_CHECKS),
    help="Names of places to leave out, separated by commas, such as eval-sets,logging-plugin.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def doctor(
    agents_dir: Path, allow: set[str], as_json: bool, service_uri: str | None, **uris: str | None
) -> None:
    """Find where google-adk writes user content as plaintext.

    Imports the agents in AGENTS_DIR as google-adk does, with their .env files. Loads services.yaml
    and services.py, and prints where adk web would store sessions, artifacts and memory: give the
    same URIs as to adk web. Then prints each setting, plugin and file by which google-adk writes
    plaintext, and how to prevent that. The exit status is 1 if there is one. Notes say what
    would be plaintext if your own code exported traces, and do not change the exit status.

    \b
    Example:
      adk-secure-sessions adk doctor agents \\
          --service_uri 'encrypted+sqlite:///x.db?key=env:NAME&blobs=artifacts'
    """
    from adk_secure_sessions.integrations import plaintext_guard, plaintext_leaks

    # Importing agents may print texts.  stdout must contain only the result, which may be JSON.
    with one_line_errors(), contextlib.redirect_stdout(sys.stderr):
        agents = _load_agents(agents_dir)
        service_uris = {name: uri or service_uri for name, uri in uris.items()}
        stores = list(plaintext_guard.find_stores(str(agents_dir), service_uris))
        leaks = [
            plaintext_leaks.leak("service-uris", f"{store.service}: {store.where}")
            for store in stores
            if store.protection in (Protection.PLAINTEXT, Protection.UNKNOWN)
        ]
        settings, notes = plaintext_leaks.in_environment(os.environ)
        leaks += [*settings, *plaintext_leaks.in_files(agents_dir)]
        for agent in agents.values():
            leaks += plaintext_leaks.in_plugins(agent)
    found, noted = (
        tuple(leak for leak in dict.fromkeys(listed) if leak.name not in allow)
        for listed in (leaks, notes)
    )
    print_result(PlaintextReport(tuple(sorted(agents)), tuple(stores), found, noted))


def _load_agents(agents_dir: Path) -> dict[str, Any]:
    """Import each `App` or agent as google-adk does, with its `.env` file; return them by name."""
    from google.adk.cli.utils.agent_loader import AgentLoader

    loader = AgentLoader(str(agents_dir))
    is_single = getattr(loader, "is_single_agent", False)  # google-adk 1 has no such attribute
    parts = ("__init__.py", "agent.py", "root_agent.yaml")
    agents: dict[str, Any] = {}
    for name in loader.list_agents():
        try:
            if is_single or any((agents_dir / name / part).is_file() for part in parts):
                agents[name] = loader.load_agent(name)
        except Exception as error:  # whatever the agent's code raises
            reason = str(error).partition("\n")[0]
            raise ConfigurationError(f"the agent {name} cannot be loaded: {reason}") from error
    if not agents:
        raise ConfigurationError(f"{agents_dir} has no agent: give the directory that adk web gets")
    return agents
