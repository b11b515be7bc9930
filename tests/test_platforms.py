"""Other systems than Linux: paths of Windows and macOS, and functions that Windows does not have.

No machine with Windows runs these tests.  A file of Linux may have any name of Windows, so the
tests use real files to see which name reaches the system.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    EncryptedSessionService,
    FileKey,
    generate_key,
    key_provider,
)
from adk_secure_sessions.cli import main
from adk_secure_sessions.cli.output import private_file
from adk_secure_sessions.db.sqlite import file_uri
from adk_secure_sessions.integrations import adk
from adk_secure_sessions.integrations.artifact_store import ArtifactStore
from adk_secure_sessions.migration.adk_target import create_private_file
from tests.pages import ROOT

WINDOWS_PATHS = [r"C:\data\clinic", "C:/data/clinic", r"\\server\share\clinic", r"data\clinic"]


def named(path: str, ending: str) -> str:
    """Return the name *path* + *ending*; on Linux, make the directory of a name with slashes."""
    name = f"{path}{ending}"
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    return name


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# --- paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", WINDOWS_PATHS)
def test_key_file_with_a_windows_path_is_found(path: str) -> None:
    name = named(path, ".key")
    Path(name).touch(mode=0o600)
    Path(name).write_text(generate_key())
    assert key_provider(f"file:{name}") == FileKey(name)


@pytest.mark.parametrize("path", WINDOWS_PATHS)
async def test_sqlite_url_with_a_windows_path_opens_this_file(path: str) -> None:
    name = named(path, ".db")
    async with EncryptedSessionService(f"sqlite:///{name}", AesGcmBackend(generate_key())) as one:
        await one.prepare_tables()
    assert Path(name).stat().st_size > 0


@pytest.mark.parametrize("path", WINDOWS_PATHS)
def test_service_uri_keeps_windows_paths(path: str) -> None:
    uri = f"encrypted+sqlite:///{path}.db?key=file:{path}.key&blobs={path}"
    parsed = adk.parse(uri)
    assert parsed.db_url == f"sqlite:///{path}.db"
    assert parsed.keys == (f"file:{path}.key",)
    assert parsed.blobs == path


@pytest.mark.parametrize("path", WINDOWS_PATHS)
def test_windows_path_is_a_directory_of_artifacts_and_no_url(path: str) -> None:
    ArtifactStore(path).prepare(create=True)
    assert Path(path).is_dir()


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        (PurePosixPath("/private/var/a b#1%.db"), "file:///private/var/a%20b%231%25.db"),
        (PureWindowsPath(r"C:\data\a b.db"), "file:///C:/data/a%20b.db"),
        (PureWindowsPath(r"\\server\share\a.db"), "file:////server/share/a.db"),
    ],
)
def test_sqlite_uri_of_a_path_is_one_that_sqlite_documents(path: PurePath, uri: str) -> None:
    """https://www.sqlite.org/uri.html: a server's name must not be where a URI has its host."""
    assert file_uri(path) == uri


async def test_directory_by_two_names_is_the_same_database(tmp_path: Path) -> None:
    """On macOS, /var is a link to /private/var."""
    (tmp_path / "private" / "var").mkdir(parents=True)
    (tmp_path / "var").symlink_to(tmp_path / "private" / "var")
    url = f"sqlite:///{tmp_path}/var/sessions.db"
    backend = AesGcmBackend(generate_key())
    with pytest.raises(ConfigurationError, match="must not be the database of the sessions"):
        EncryptedSessionService(
            url, backend, key_db_url=f"sqlite:///{tmp_path}/private/var/sessions.db"
        )
    async with EncryptedSessionService(url, backend) as service:
        await service.create_session(app_name="clinic", user_id="ada", session_id="s")
    async with EncryptedSessionService(
        f"sqlite:///{tmp_path}/private/var/sessions.db", backend
    ) as service:
        assert await service.get_session(app_name="clinic", user_id="ada", session_id="s")
    ArtifactStore(tmp_path / "var" / "artifacts").prepare(create=True)


# --- functions that Windows does not have --------------------------------------------------------


@pytest.fixture
def on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the names of `os` that Windows lacks, as far as this package uses them."""
    for name in ("geteuid", "register_at_fork", "O_DIRECTORY", "O_NONBLOCK"):
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(sys, "platform", "win32")


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0


@pytest.mark.usefixtures("on_windows")
def test_commands_create_a_key_and_a_database_on_windows() -> None:
    run("keygen", "--output", "root.key")
    run("init", "--db", "sqlite:///sessions.db", "--key", "file:root.key")
    run("verify", "--db", "sqlite:///sessions.db", "--key", "file:root.key")


@pytest.mark.usefixtures("on_windows")
def test_mode_of_a_file_means_nothing_on_windows() -> None:
    """Python makes it up there: 0666, or 0444 if the file is read-only."""
    for mode in (0o666, 0o444):
        Path("any.key").write_text(generate_key())
        Path("any.key").chmod(mode)
        FileKey("any.key")
        create_private_file(Path("any.key"))
        Path("any.key").unlink()
    with private_file("export.jsonl"):
        pass


@pytest.mark.usefixtures("on_windows")
def test_directory_is_not_a_key_file_on_windows() -> None:
    Path("keys").mkdir()
    with pytest.raises(ConfigurationError, match="the key file 'keys' is not a regular file"):
        FileKey("keys")


# --- the first run -------------------------------------------------------------------------------


def test_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "adk_secure_sessions", "keygen", "--output", "root.key"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    FileKey("root.key")
    again = subprocess.run(
        [sys.executable, "-m", "adk_secure_sessions", "keygen", "--output", "root.key"],
        capture_output=True,
        text=True,
    )
    assert again.returncode == 2
    said = "Error: 'root.key' exists already, and a file is not overwritten: "
    assert again.stderr == f"{said}move it away, or give another name\n"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("has_python", [True, False], ids=["3.10", "none"])
def test_make_without_python_3_11_ends_with_a_sentence(tmp_path: Path, has_python: bool) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("make", "sh", "rm", "touch"):
        found = shutil.which(name)
        assert found
        (programs / name).symlink_to(found)
    if has_python:  # any code that it is given fails, as the test of its version would
        (programs / "python3").write_text("#!/bin/sh\nexit 1\n")
        (programs / "python3").chmod(0o755)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, name)
    kept = Path(".venv")
    kept.mkdir()
    done = subprocess.run(
        ["make", "demo"], env={"PATH": str(programs)}, capture_output=True, text=True
    )
    assert done.returncode == 2
    told = "python3 is not Python 3.11 or later: install one, and name it, for example with"
    assert f"{told} `make PYTHON=python3.13 demo`" in done.stderr
    assert kept.exists(), "the old environment was deleted for nothing"
