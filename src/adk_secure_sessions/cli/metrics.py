"""Write what a command did to a file that node_exporter's textfile collector reads.

`Program.main` writes the file when a command ends, from what the command has shown and from its
exit status.  So no command needs code of its own for it.
"""

import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from adk_secure_sessions.cli.lazy_packages import maintenance
from adk_secure_sessions.results import Result

_COMMAND = "adk_secure_sessions_command"
_LAST_RUN = f"{_COMMAND}_last_run_timestamp_seconds"
_LAST_SUCCESS = f"{_COMMAND}_last_success_timestamp_seconds"
_DURATION = f"{_COMMAND}_duration_seconds"
_PROBLEMS = f"{_COMMAND}_problems"
_KEY_AGE = "adk_secure_sessions_key_age_seconds"
_HELP = {
    _LAST_RUN: "When the command last ended.",
    _LAST_SUCCESS: "When the command last ended with exit status 0; 0 if it never did.",
    _DURATION: "How long the last run took.",
    _PROBLEMS: "Bad rows that the last run found; at least 1 if its exit status was not 0.",
    _KEY_AGE: "Age of a master key when status last ran.",
}
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class RunMetrics:
    """What a run of the program writes to the file of --metrics-file."""

    def __init__(self) -> None:
        self.file: Path | None = None  # for the metrics; None if none was given
        self.command: str = ""  # the words that call the command
        self.result: Result | None = None  # what the command has shown, if it has shown something
        self._began = time.monotonic()

    def write(self, file: Path, *, succeeded: bool) -> None:
        """Write the metrics.  A reader sees the old file or the new one, never a part of one."""
        now = time.time()
        values: dict[str, dict[str, float]] = {  # by name, and by the labels of that metric alone
            _LAST_RUN: {"": now},
            _LAST_SUCCESS: {"": now if succeeded else self._last_success(file)},
            _DURATION: {"": time.monotonic() - self._began},
            _PROBLEMS: {"": max(getattr(self.result, "bad", 0), 0 if succeeded else 1)},
        }
        if ages := dict(self._key_ages()):
            values[_KEY_AGE] = ages
        labels = f'command="{self.command}",file="{_escaped(file.name)}"'
        lines = []
        for name, samples in values.items():
            lines += [f"# HELP {name} {_HELP[name]}", f"# TYPE {name} gauge"]
            lines += [f"{name}{{{labels}{more}}} {value:.3f}" for more, value in samples.items()]
        _replace_file(file, "\n".join([*lines, ""]))

    def _last_success(self, file: Path) -> float:
        """Return when the command last succeeded, as *file* says; 0 if it does not say it."""
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return 0.0
        line = rf'^{_LAST_SUCCESS}\{{command="{self.command}",.*\}} (\d+\.\d+)$'
        match = re.search(line, text, re.MULTILINE)
        return float(match[1]) if match else 0.0

    def _key_ages(self) -> Iterator[tuple[str, float]]:
        """Yield the labels and the age of each master key that `status` has found."""
        if isinstance(self.result, maintenance.Status):
            for key in self.result.master_keys:
                yield f',purpose="{_escaped(key.purpose)}",key="{_escaped(key.id)}"', key.age


def set_metrics_file(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Check the value of --metrics-file, and keep it.  click calls this function."""
    if value is None:
        return
    file = Path(value)
    if file.suffix != ".prom":  # the collector reads no other files
        raise click.BadParameter("the name must end with .prom")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise click.BadParameter("its directory does not exist or cannot be written")
    run = context.ensure_object(RunMetrics)
    run.file = file
    run.command = context.command_path.removeprefix(context.find_root().command_path).strip()


def keep_result(result: Result) -> None:
    click.get_current_context().ensure_object(RunMetrics).result = result


@contextmanager
def writing_metrics() -> Iterator[RunMetrics]:
    """Yield the run, and write its metrics at the end, also after a failure.

    A run without a result that did not fail, such as that of --help, writes nothing.
    """
    run = RunMetrics()
    succeeded = False
    try:
        yield run
    except SystemExit as end:
        succeeded = not end.code
        raise
    finally:
        if run.file is not None and (run.result is not None or not succeeded):
            try:
                run.write(run.file, succeeded=succeeded)
            except OSError as error:
                reason = error.strerror or type(error).__name__
                click.echo(f"the metrics were not written to {run.file}: {reason}", err=True)


def _escaped(value: object) -> str:
    """Return *value*, which may be of any type in a tampered database, as the value of a label."""
    return str(value).translate(_ESCAPES)


def _replace_file(file: Path, text: str) -> None:
    """Replace *file* by a new one with *text*, which every account may read."""
    number, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(number, "wb") as stream:
            stream.write(text.encode("utf-8", "backslashreplace"))
        os.chmod(temporary, 0o644)  # the collector runs as another account
        os.replace(temporary, file)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
