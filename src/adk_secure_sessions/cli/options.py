"""Define the options that several commands share, and create databases and backends from them."""

import functools
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import click

from adk_secure_sessions import audit
from adk_secure_sessions.backends.registry import DEFAULT, NAMES, NO_OP, backends_for
from adk_secure_sessions.cli import metrics
from adk_secure_sessions.cli.config import CONFIG_VARIABLE, IN_ENVIRONMENT, envvar, read_config
from adk_secure_sessions.cli.lazy_packages import ArtifactStore, maintenance
from adk_secure_sessions.cli.program import CommonOption, help_all, one_line_errors
from adk_secure_sessions.formats import times
from adk_secure_sessions.formats.records import COMPRESSIONS, PADDINGS, Packing

CommandFunction = Callable[..., Any]
Decorator = Callable[[CommandFunction], CommandFunction]

_BACKEND_NAME = click.Choice(NAMES)


def with_all(*decorators: Decorator) -> Decorator:
    """Return the decorator that applies *decorators*, the last one first."""
    return lambda command: functools.reduce(
        lambda made, apply: apply(made), decorators[::-1], command
    )


class _PositiveNumber(click.FloatRange):
    name = "number"  # for the help and error texts

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):  # it is in every range, and limits no speed
            self.fail(f"{value!r} is not a valid number.", param, ctx)
        return number


POSITIVE_NUMBER = _PositiveNumber(min=0, min_open=True)
with_rate: Decorator = click.option(
    "--rows-per-second", type=POSITIVE_NUMBER, help="Process at most this many rows per second."
)
with_dry_run: Decorator = click.option(
    "--dry-run", is_flag=True, help="Report what would be done, but change nothing."
)


with_show_ids: Decorator = click.option(
    "--show-ids", is_flag=True, help="Print readable ids, not only blind indexes."
)
with_confirm: Decorator = click.option(
    "--confirm",
    metavar="NAME",
    help="Name of what the command may change: the database (SQLite: path of the file), or the "
    "directory or the bucket.  Without this option, the command asks on a terminal.",
)


def _parse_age(value: str) -> timedelta:
    if (age := times.parse_age(value)) is None:
        raise click.BadParameter(
            "write a number up to 999999 and a unit: s, m, h, d or w, such as 90d"
        )
    return age


def parse_time(value: str) -> datetime:
    """Convert the value of --since or --until; the default zone is UTC."""
    try:
        moment = datetime.fromisoformat(value)
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        moment.timestamp()
    except (ValueError, OverflowError):
        raise click.BadParameter(
            "write a date or a time in UTC, such as 2026-03-31 or 2026-03-31T18:00"
        ) from None
    return moment


def age_option(name: str, help_text: str, **settings: Any) -> Decorator:
    text = f"{help_text}  A number and a unit: s, m, h, d or w.  Example: 90d."
    return click.option(name, type=_parse_age, metavar="AGE", help=text, **settings)


with_one_app: Decorator = click.option(
    "--app", "app_name", required=True, metavar="NAME", help="The app's name."
)
with_app_and_user: Decorator = with_all(
    click.option("--app", "app_name", metavar="NAME", help="Only sessions of this app."),
    click.option("--user", "user_id", metavar="ID", help="Only sessions of users with this id."),
)


def _common_option(option: str, *names: str, **settings: Any) -> Decorator:
    if (name := option.removeprefix("--")) in IN_ENVIRONMENT:
        settings["envvar"] = envvar(name)
    return click.option(option, *names, cls=CommonOption, show_envvar=True, **settings)


# Names the database of `migrate`; other commands have `_URL_OPTION`.
TARGET_URL_OPTION = click.option(
    "--to",
    "db",
    envvar=envvar("db"),
    show_envvar=True,
    required=True,
    metavar="URL",
    help="URL of the encrypted database to copy to.  Only `copy` creates it, if it does not exist.",
)
_URL_OPTION = _common_option(
    "--db", required=True, metavar="URL", help="URL of the database, such as sqlite:///sessions.db."
)
_DATABASE_OPTIONS = (
    _common_option("--key-db", metavar="URL", help="URL of the key database, if there is one."),
    _common_option(
        "--config",
        envvar=CONFIG_VARIABLE,
        metavar="FILE",
        type=click.Path(),
        is_eager=True,
        expose_value=False,
        callback=read_config,
        help="TOML file with defaults of options such as db and key.",
    ),
    _common_option(
        "--audit-log",
        metavar="FILE",
        type=click.Path(),
        help="Append audit records to this file, as JSON.",
    ),
    _common_option(
        "--metrics-file",
        metavar="FILE",
        type=click.Path(),
        is_eager=True,
        expose_value=False,
        callback=metrics.set_metrics_file,
        help="Replace this file, NAME.prom, with metrics of this run for Prometheus.",
    ),
    _common_option("--json", "as_json", is_flag=True, help="Print JSON, for scripts."),
    click.option(
        "--help-all",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=help_all,
        help="Show this message with the common options, and exit.",
    ),
)


# The options --compression and --padding; write this above `on_database`.
with_packing: Decorator = with_all(
    click.option(
        "--compression",
        type=click.Choice(list(COMPRESSIONS)),
        help="Compress the values of 1 KB or more that are written, as the services do.",
    ),
    click.option(
        "--padding",
        type=click.Choice(PADDINGS),
        help="Pad the values that are written, as the services do.",
    ),
)


_KEY_OPTIONS = (
    _common_option(
        "--backend",
        type=_BACKEND_NAME,
        default=DEFAULT,
        show_default=True,
        help="Backend with which the services write; no-op stores plaintext and needs no key.",
    ),
    _common_option(
        "--key",
        metavar="SPEC",
        help="Key spec of the root key: env:NAME, file:PATH and others; never the key itself.",
    ),
    _common_option(
        "--also-key",
        multiple=True,
        metavar="SPEC",
        help="Another root key that may wrap master keys; repeatable (in the variable: spaces "
        "between them).",
    ),
    _common_option(
        "--also-backend",
        multiple=True,
        type=_BACKEND_NAME,
        help="Another backend whose records may be decrypted; repeatable (in the variable: "
        "spaces between them).",
    ),
)


def on_database(
    *, keys: Literal["required", "optional", "none"] = "required", url: Decorator = _URL_OPTION
) -> Decorator:
    """Return a decorator for a command with the argument `db`, a `Database`.

    It adds the options of *url*, which names the database, and those that all such commands have.
    *keys* says whether the root key is required; if it is "none", there are no options for keys.
    """

    def decorate(command: CommandFunction) -> CommandFunction:
        @functools.wraps(command)
        def wrapper(db: str, key_db: str | None, audit_log: str | None, **options: Any) -> Any:
            del options["as_json"]  # `print_result` asks click for it
            packing = Packing(options.pop("compression", None), options.pop("padding", None))
            backends = () if keys == "none" else _backends(options, required=keys == "required")
            engine_options: dict[str, Any] = {}
            if "timeout" in options and db.startswith("sqlite"):
                # `check` waits for its thread, which waits for a lock on the file: for a second
                # more, so that the error says that the time is over, not that the file is locked.
                engine_options["connect_args"] = {"timeout": min(options["timeout"] + 1, 30.0)}
            with one_line_errors():
                database = maintenance.Database(
                    db, *backends, key_db_url=key_db, packing=packing, **engine_options
                )
                database.reject_in_memory()
                log = None if audit_log is None else audit.open_file(audit_log)
            with audit.appending_to(log):
                return command(db=database, **options)

        return with_all(*([] if keys == "none" else _KEY_OPTIONS), url, *_DATABASE_OPTIONS)(wrapper)

    return decorate


def _backends(options: dict[str, Any], *, required: bool) -> tuple[Any, ...]:
    """Remove the values of `_KEY_OPTIONS` from *options*; return the backends."""
    key, backend = options.pop("key"), options.pop("backend")
    specs = [spec for spec in (key, *options.pop("also_key")) if spec is not None]
    names = [backend, *options.pop("also_backend")]
    if key is None and backend != NO_OP and (required or specs):
        raise click.UsageError(f"give --key SPEC or set {envvar('key')}: it names the root key")
    # A command that works without keys gets no backends unless a key or no-op is given: the default
    # backend cannot be created without a key.
    if not (required or specs or NO_OP in names):
        return ()
    with one_line_errors():
        return backends_for(names, specs)


def with_store(*, required: bool) -> Decorator:
    """Return a decorator for a command with the argument `store`, an `ArtifactStore` or None."""
    return with_all(
        click.option(
            "--store",
            required=required,
            metavar="STORE",
            callback=_open_store,
            help="Where the contents of artifacts are: a directory, s3://BUCKET/PREFIX, "
            "gs://BUCKET/PREFIX or az://CONTAINER/PREFIX.",
        ),
        click.option(
            "--allow-http",
            is_flag=True,
            is_eager=True,
            help="Accept a store on another machine without TLS.",
        ),
    )


def _open_store(
    context: click.Context, _parameter: click.Parameter, store: str | None
) -> ArtifactStore | None:
    allow_http = context.params.pop("allow_http")  # it is parsed first, because it is eager
    if context.resilient_parsing:
        return None
    if store is None:
        if allow_http:
            raise click.UsageError("--allow-http is for a store: add --store STORE", context)
        return None
    from adk_secure_sessions.integrations import artifact_store

    with one_line_errors():
        return artifact_store.ArtifactStore(store, allow_http=allow_http)
