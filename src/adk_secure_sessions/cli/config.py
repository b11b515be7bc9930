"""Options from environment variables and from a configuration file."""

import os
import tomllib
from pathlib import Path
from typing import Any

import click

PREFIX = "ADK_SECURE_SESSIONS_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
_TEXT, _TEXTS, _NUMBER = "a text", "a list of texts", "a number"
# The options that a configuration file may set: the name without the leading dashes, and the type.
SETTINGS = {
    "db": _TEXT,
    "key-db": _TEXT,
    "key": _TEXT,
    "also-key": _TEXTS,
    "backend": _TEXT,
    "also-backend": _TEXTS,
    "audit-log": _TEXT,
    "rows-per-second": _NUMBER,
}
# The options that an environment variable may set.
IN_ENVIRONMENT = tuple(name for name in SETTINGS if name != "rows-per-second")


def envvar(option: str) -> str:
    """Return the name of the environment variable for *option*, such as `also-key`."""
    return PREFIX + option.upper().replace("-", "_")


def read_config(context: click.Context, _parameter: click.Parameter, file: str | None) -> None:
    """Read defaults of the command's options from a TOML file.  click calls this function."""
    if file is None:
        return
    settings: dict[str, Any] = {}
    problem = None
    try:
        settings = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        problem = error.strerror or "it cannot be read"
    except UnicodeDecodeError:
        problem = "it is not UTF-8"
    except tomllib.TOMLDecodeError as error:
        problem = f"it is not TOML: {error}"
    problem = problem or next(filter(None, map(_problem, settings, settings.values())), None)
    if problem is not None:
        raise click.UsageError(f"the configuration file {file!r}: {problem}", context)
    context.default_map = {name.replace("-", "_"): value for name, value in settings.items()}


def _problem(name: str, value: object) -> str | None:
    """Return why the setting *name* with this *value* cannot be used; None if it can be used."""
    kind = SETTINGS.get(name)
    if kind is None:
        return f"there is no setting {name!r}; there are {', '.join(SETTINGS)}"
    fits = {
        _TEXT: isinstance(value, str),
        _TEXTS: isinstance(value, list) and all(isinstance(text, str) for text in value),
        _NUMBER: isinstance(value, int | float) and not isinstance(value, bool),
    }
    if not fits[kind]:
        return f"{name} must be {kind}"
    # If the file and the environment both have the setting, do not guess which value is meant: a
    # command may delete sessions.
    if name in IN_ENVIRONMENT and os.environ.get(envvar(name)):
        return f"it has {name}, and so has the environment, {envvar(name)}: remove one of them"
    return None
