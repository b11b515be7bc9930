"""The command `adk doctor`: finds where google-adk writes user content as plaintext."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from adk_secure_sessions.cli.adk import adk
from adk_secure_sessions.cli.output import counted, show
from adk_secure_sessions.cli.program import one_line_errors

if TYPE_CHECKING:
    from adk_secure_sessions.integrations.leaks import Leak


def _names(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> set[str]:
    from adk_secure_sessions.integrations.plaintext_places import PLACES

    names = {name.strip() for text in given for name in text.split(",")} - {""}
    if unknown := sorted(names - set(PLACES)):
        raise click.BadParameter(f"{unknown[0]} is not one of {', '.join(PLACES)}")
    return names


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
def doctor(agents_dir: str, allow: set[str], as_json: bool) -> None:
    """Find where google-adk writes user content as plaintext.

    Imports the agents in AGENTS_DIR as google-adk does, with their .env files. Checks their
    plugins, the telemetry settings, the logs, and the files that google-adk has written. Each line
    says how to turn one of them off. The exit status is 1 if there is one.

    \b
    Example:
      adk-secure-sessions adk doctor agents
    """
    from adk_secure_sessions.integrations.leaks import (
        check_files,
        check_plaintext_leaks,
        load_agents,
    )

    with one_line_errors(), contextlib.redirect_stdout(sys.stderr):  # agents may print
        agents = load_agents(agents_dir)
        found = [*check_plaintext_leaks(), *check_files(agents_dir)]
        for agent in agents.values():
            found += check_plaintext_leaks(agent)
    leaks = [leak for leak in dict.fromkeys(found) if leak.name not in allow]
    show({"agents": sorted(agents), "leaks": leaks}, as_json, _lines(leaks, len(agents)))
    sys.exit(1 if leaks else 0)


def _lines(leaks: "list[Leak]", agents: int) -> Iterator[str]:
    for leak in leaks:
        yield f"{leak.name}: {leak.where}"
        yield f"  {leak.remedy.replace('`', '')}"
    if leaks:
        places = len({leak.name for leak in leaks})
        yield f"google-adk writes plaintext in {counted(places, 'place')}"
    else:
        yield f"{counted(agents, 'agent')}: no plaintext outside the services was found"
