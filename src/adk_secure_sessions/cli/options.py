"""Define the options that several commands share, and create databases and backends from them."""

import functools
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import click

from adk_secure_sessions import audit
from adk_secure_sessions.backends.named import DEFAULT, NAMES, NO_OP, backends_for
from adk_secure_sessions.cli import metrics
from adk_secure_sessions.cli.config import CONFIG_VARIABLE, read_config, variable
from adk_secure_sessions.cli.program import one_line_errors
from adk_secure_sessions.formats.flags import COMPRESSIONS, PADDINGS, Packing

Command = Callable[..., Any]

_BACKENDS = click.Choice(NAMES)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

with_speed: Callable[[Command], Command] = click.option(
    "--rows-per-second",
    type=click.FloatRange(min=0, min_open=True),
    help="Process at most this many rows per second.",
)
with_dry_run: Callable[[Command], Command] = click.option(
    "--dry-run", is_flag=True, help="Report what would be done, but change nothing."
)


def age(context: click.Context, parameter: click.Parameter, value: str | None) -> timedelta | None:
    """Convert the value of an option such as --older-than to a `timedelta`.  click calls this.

    Raises:
        click.BadParameter: The value is not an age.
    """
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,6})([smhdw])", value)
    if match is None:
        raise click.BadParameter("write a number and a unit: s, m, h, d or w, such as 90d")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def on_database(command: Command) -> Command:
    """Add --db, --key-db, --config, --audit-log, --metrics-file and --json to *command*.

    The decorated function calls *command* with the arguments `db` (a `Database`) and `as_json`.
    """
    return _with_database("--db", _DB_HELP)(command)


def on_target(command: Command) -> Command:
    """Add --to, --key-db, --config, --audit-log, --metrics-file and --json to *command*.

    --to names the database that `on_database` calls --db.  The decorated function calls *command*
    with the arguments `db` (a `Database`) and `as_json`.
    """
    return _with_database("--to", _TO_HELP)(command)


def _with_database(option: str, text: str) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        @click.option(option, "db", envvar=variable("db"), required=True, metavar="URL", help=text)
        @click.option("--key-db", envvar=variable("key-db"), metavar="URL", help=_KEY_DB_HELP)
        @click.option(
            "--config",
            envvar=CONFIG_VARIABLE,
            metavar="FILE",
            type=click.Path(),
            is_eager=True,
            expose_value=False,
            callback=read_config,
            help=_CONFIG_HELP,
        )
        @click.option(
            "--audit-log",
            envvar=variable("audit-log"),
            metavar="FILE",
            type=click.Path(),
            help=_AUDIT_LOG_HELP,
        )
        @click.option(
            "--metrics-file",
            metavar="FILE",
            type=click.Path(),
            is_eager=True,
            expose_value=False,
            callback=metrics.to_file,
            help=_METRICS_HELP,
        )
        @click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
        @functools.wraps(command)
        def run(db: str, key_db: str | None, audit_log: str | None, **options: Any) -> Any:
            from adk_secure_sessions.maintenance import Database

            options.setdefault("backends", ())
            packing = Packing(options.pop("compression", None), options.pop("padding", None))
            with one_line_errors():
                database = Database(
                    db, *options.pop("backends"), key_db_url=key_db, packing=packing
                )
                log = None if audit_log is None else audit.open_file(audit_log)
            with audit.appending_to(log):
                return command(db=database, **options)

        return run

    return decorate


def with_packing(command: Command) -> Command:
    """Add the options --compression and --padding.

    Write this decorator above `on_database` or `on_target`, which creates the `Database` object
    with the values.
    """
    compression = click.option(
        "--compression",
        type=click.Choice(list(COMPRESSIONS)),
        help="Compress the values of 1 KB or more that are written, as the services do.",
    )
    padding = click.option(
        "--padding",
        type=click.Choice(PADDINGS),
        help="Pad the values that are written, as the services do.",
    )
    return compression(padding(command))


def with_keys(*, required: bool) -> Callable[[Command], Command]:
    """Return a decorator that adds the options for root keys and backends.

    Write this decorator above `on_database` or `on_target`, which creates the `Database` object
    with these backends.

    Args:
        required: False if the command also works without a root key.
    """

    def decorate(command: Command) -> Command:
        @click.option(
            "--backend",
            envvar=variable("backend"),
            type=_BACKENDS,
            default=DEFAULT,
            show_default=True,
            help=_BACKEND_HELP,
        )
        @click.option("--key", envvar=variable("key"), metavar="SPEC", help=_KEY_HELP)
        @click.option(
            "--also-key",
            envvar=variable("also-key"),
            multiple=True,
            metavar="SPEC",
            help=_ALSO_KEY_HELP,
        )
        @click.option(
            "--also-backend",
            envvar=variable("also-backend"),
            multiple=True,
            type=_BACKENDS,
            help=_ALSO_BACKEND_HELP,
        )
        @functools.wraps(command)
        def run(
            backend: str,
            key: str | None,
            also_key: Sequence[str],
            also_backend: Sequence[str],
            **options: Any,
        ) -> Any:
            specs = [spec for spec in (key, *also_key) if spec is not None]
            if key is None and backend != NO_OP and (required or specs):
                raise click.UsageError(
                    f"give --key SPEC or set {variable('key')}: it names the root key"
                )
            names = [backend, *also_backend]
            # A command that works without keys gets no backends unless a key or no-op is given:
            # the default backend cannot be created without a key.
            backends: tuple[Any, ...] = ()
            if required or specs or NO_OP in names:
                with one_line_errors():
                    backends = backends_for(names, specs)
            return command(backends=backends, **options)

        return run

    return decorate


_DB_HELP = f"URL of the database, such as sqlite:///sessions.db; or set {variable('db')}."
_TO_HELP = (
    "URL of the encrypted database to copy to, which is created if it does not exist; or set "
    f"{variable('db')}."
)
_KEY_DB_HELP = f"URL of the key database, if there is one; or set {variable('key-db')}."
_AUDIT_LOG_HELP = f"Append audit records to this file, as JSON; or set {variable('audit-log')}."
_METRICS_HELP = "Replace this file, NAME.prom, with metrics of this run for Prometheus."
_CONFIG_HELP = f"TOML file with defaults of options such as db and key; or set {CONFIG_VARIABLE}."
_BACKEND_HELP = (
    "Backend with which the services write; no-op stores plaintext and needs no key; or set "
    f"{variable('backend')}."
)
_KEY_HELP = (
    "Key spec of the root key: env:NAME, file:PATH and others; never the key itself; or set "
    f"{variable('key')}."
)
_ALSO_KEY_HELP = (
    "Another root key that may wrap master keys; repeatable; or set "
    f"{variable('also-key')}, separated by spaces."
)
_ALSO_BACKEND_HELP = (
    "Another backend whose records may be decrypted; repeatable; or set "
    f"{variable('also-backend')}, separated by spaces."
)


def with_store(*, required: bool) -> Callable[[Command], Command]:
    """Return a decorator that adds the options --store and --allow-http.

    Args:
        required: Whether --store, which names the store of the contents of artifacts, is required.
    """
    store = click.option(
        "--store",
        required=required,
        metavar="STORE",
        help="Where the contents of artifacts are: a directory, s3://BUCKET/PREFIX, "
        "gs://BUCKET/PREFIX or az://CONTAINER/PREFIX.",
    )
    allow_http = click.option(
        "--allow-http", is_flag=True, help="Accept a store on another machine without TLS."
    )
    return lambda command: store(allow_http(command))
