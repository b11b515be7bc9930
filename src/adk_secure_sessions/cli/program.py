"""The group of all commands, and functions that run a command and report failures in one line."""

import asyncio
import atexit
import gc
import json
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from adk_secure_sessions.cli import metrics
from adk_secure_sessions.cli.lazy_packages import Database
from adk_secure_sessions.cli.output import escape_controls, option_value, progress, to_json_value
from adk_secure_sessions.errors import SecureSessionError
from adk_secure_sessions.results import counted, utc_text

if TYPE_CHECKING:
    from adk_secure_sessions.maintenance.database import Description

T = TypeVar("T")

AGAIN = "run the same command again"


class Failure(click.ClickException):
    """Ends the command with one line on stderr and, with --json, with a JSON object on stdout.

    *error_name* is for scripts, and *retryable* says that the same command may succeed later.
    """

    def __init__(
        self, message: str, error_name: str, *, retryable: bool = False, exit_code: int = 2
    ) -> None:
        super().__init__(escape_controls(" ".join(message.split())))
        self.error_name: str = error_name
        self.retryable: bool = retryable
        self.exit_code = exit_code  # type: ignore[misc]  # click declares it for classes


def _interruption_failure(resume_hint: str | None) -> Failure:
    """Return the failure for Ctrl-C; *resume_hint* is None if nothing was changed."""
    text = "interrupted; nothing was changed"
    if resume_hint is not None:
        text = (
            "interrupted, which is safe: each change is complete or undone; to continue, "
            f"{resume_hint}"
        )
    return Failure(text, "Interrupted", retryable=True, exit_code=130)


class CommonOption(click.Option):
    """An option that many commands have: only --help-all describes it."""


class Command(click.Command):
    """A command that rejects an option which is given twice: click would use the last value only.

    Otherwise `erase-user --user ada --user eve` would exit 0, and ada would not be erased.
    """

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own_records: list[tuple[str, str]] = []
        common_records: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                (common_records if isinstance(param, CommonOption) else own_records).append(record)
        with formatter.section("Options"):
            formatter.write_dl(own_records)
        if common_records and ctx.meta.get(_HELP_ALL):
            with formatter.section("Options of all commands with a database"):
                formatter.write_dl(common_records)
        elif common_records:
            names = ", ".join(record[0].split()[0].rstrip(",") for record in common_records)
            formatter.write_paragraph()
            formatter.write_text(f"Common options, which --help-all describes: {names}")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(list(args))
        for param in given:
            is_single = isinstance(param, click.Option) and not (param.multiple or param.is_flag)
            if is_single and given.count(param) > 1:
                raise click.UsageError(f"{param.opts[0]} is given more than once", ctx)
        return super().parse_args(ctx, args)


_HELP_ALL = f"{__name__}.help_all"


def help_all(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Print the help with the common options, and exit.  click calls this function."""
    if value and not context.resilient_parsing:
        context.meta[_HELP_ALL] = True
        click.echo(context.get_help())
        context.exit()


class Program(click.Group):
    """The group of all commands.  With --json, a failure is also printed as JSON on stdout."""

    command_class: type[click.Command] | None = Command
    group_class: type[click.Group] | type[type] | None = type  # groups in it have its class

    def main(self, args: Sequence[str] | None = None, *values: Any, **extra: Any) -> NoReturn:
        if args is None:
            # This process ends with the command.  Without `freeze`, Python searches all objects for
            # cycles before it ends, which takes a tenth of a second.
            atexit.register(gc.freeze)
            # If a daemon closed a standard stream, the next opened file would get its number.
            for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
                if getattr(sys, name) is None:
                    setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the end
        arguments = sys.argv[1:] if args is None else list(args)
        failure: click.ClickException
        with metrics.writing_metrics() as extra["obj"]:
            try:
                status = super().main(arguments, *values, **extra | {"standalone_mode": False})
                sys.exit(status if isinstance(status, int) else 0)
            except click.ClickException as error:
                failure = error
            except click.Abort:  # Ctrl-C before the command began its work, or at a question
                failure = _interruption_failure(None)
            except OSError as error:  # the output cannot be written: discard the rest of it
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                failure = _os_failure(error)
            if "--json" in arguments:
                facts = {
                    "error": getattr(failure, "error_name", "UsageError"),
                    "message": failure.format_message(),
                    "retryable": getattr(failure, "retryable", False),
                    "result": to_json_value(extra["obj"].result),
                }
                click.echo(json.dumps(facts, indent=2))
            failure.show()
            sys.exit(failure.exit_code)


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="adk-secure-sessions")
def main() -> None:
    """Maintain databases of encrypted sessions.

    Exit status: 0 on success; 1 if something is wrong or left to do; 2 if the usage, a key or the
    configuration is wrong; 130 after Ctrl-C.
    """


@contextmanager
def runner_for(db: Database, *, resume_hint: str | None = AGAIN) -> Iterator[asyncio.Runner]:
    """Yield a runner for coroutines that use *db*, and close *db* at the end.

    Between two coroutines, the command may ask the user a question.  *resume_hint* says how to
    continue after Ctrl-C; it is None if the command changes nothing, even without --dry-run.
    """

    with one_line_errors():
        try:
            with asyncio.Runner() as runner:
                try:
                    yield runner
                finally:
                    runner.run(db.close())
        except KeyboardInterrupt:
            raise _interruption_failure(None if option_value("dry_run") else resume_hint) from None


def run(
    db: Database,
    work: Callable[..., Coroutine[Any, Any, T]],
    *,
    label: str = "",
    nouns: str = "rows",
    resume_hint: str | None = AGAIN,
    change: str = "",
    confirm: str | None = None,
    **options: Any,
) -> T:
    """Run *work* with *db* and *options*, close *db*, and return the result.

    If *label* is given, show the progress with this text; *nouns* is what *work* counts.
    *resume_hint* is as in `runner_for`.  If *change* is given, first call `require_confirmation`.
    """
    with runner_for(db, resume_hint=resume_hint) as runner:
        if change:
            require_confirmation(runner.run(db.describe()), confirm, change)
        if not label:
            return runner.run(work(db, **options))
        with progress(label, nouns) as report:
            return runner.run(work(db, progress=report, **options))


def require_confirmation(described: "Description", name: str | None, change: str) -> None:
    """Raise an error unless the user names what is *described*: the URL may be a wrong one.

    *name* is the value of --confirm; if it is None, ask on the terminal.  *change* is what the
    command does, such as `erase the user`.  Commands that a scheduler runs, such as `purge`, do not
    call this function.
    """
    server, own_name, number, updated_at, kind, noun = described
    where = "" if server is None else f" on {server}"
    last = "" if updated_at is None else f", last updated {utc_text(updated_at)}"
    text = f"the {kind} {own_name}{where} has {counted(number, noun)}{last}"
    if name is None and sys.stdin.isatty():
        click.echo(escape_controls(text), err=True)
        question = f"To {change}, enter its name"
        answer = click.prompt(question, default="", show_default=False, err=True)
        if not _is_name(described, answer):
            raise Failure("nothing was changed: this is not its name", "Declined", exit_code=1)
    elif name is None or not _is_name(described, name):
        raise Failure(
            f"nothing was changed: to {change}, give its name with --confirm; {text}",
            "NotConfirmed",
        )


def _is_name(described: "Description", name: str) -> bool:
    if described.server is None and name:  # a relative path is a name, too
        return os.path.realpath(name) == os.path.realpath(described.name)
    return name == described.name


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Raise Failure instead of an error of this package or of the operating system.

    This includes errors of databases: executors raise `DatabaseError` instead of errors of
    SQLAlchemy and of drivers.
    """
    try:
        yield
    except BrokenPipeError:  # the reader of the output has ended: click exits with 1
        raise
    except SecureSessionError as error:
        name = type(error).__name__
        raise Failure(str(error), name, retryable=error.retryable) from None
    except OSError as error:
        raise _os_failure(error) from None


def _os_failure(error: OSError) -> Failure:
    reason = error.strerror or str(error)
    if error.filename is None:
        return Failure(f"the output, or a file, cannot be written: {reason}", "OSError")
    name = str(error.filename)
    return Failure(f"{name!r} cannot be used: {reason}: check the path and permissions", "OSError")
