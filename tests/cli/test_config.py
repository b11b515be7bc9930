"""Options from environment variables and from a configuration file."""

from pathlib import Path

import pytest

from adk_secure_sessions.cli.config import CONFIG_VARIABLE, IN_ENVIRONMENT, SETTINGS, envvar
from tests.cli.support import commands, on, run
from tests.cli.test_help import PAGE


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "job.toml"


def test_every_option_can_come_from_the_environment(file: str) -> None:
    environment = {envvar("db"): file, envvar("key"): "env:OLD_KEY"}
    assert run("verify", **environment).code == 0
    environment[envvar("backend")] = "fernet"
    assert run("verify", **environment).code == 1
    environment[envvar("also-backend")] = "aesgcm no-op"
    assert run("verify", **environment).code == 0
    environment[envvar("key")] = "env:NEW_KEY"
    assert run("check", **environment).code == 2
    environment[envvar("also-key")] = "env:OLD_KEY env:NEW_KEY"
    assert run("check", **environment).code == 0


def test_every_option_can_come_from_a_file(file: str, config: Path) -> None:
    config.write_text(
        f'db = "{file}"\nkey = "env:NEW_KEY"\nalso-key = ["env:OLD_KEY"]\n'
        'backend = "fernet"\nalso-backend = ["aesgcm"]\nrows-per-second = 1000000\n'
    )
    assert run("verify", "--config", str(config)).code == 0
    assert run("debug", "inspect", "secure_users", **{CONFIG_VARIABLE: str(config)}).code == 0
    assert run("verify", "--config", str(config), "--backend", "aesgcm").code == 0
    assert run("verify", "--config", str(config), "--db", "sqlite:///nowhere.db").code == 2


def test_file_and_environment_that_both_name_a_database_are_rejected(
    file: str, config: Path
) -> None:
    config.write_text(f'db = "{file}"\n')
    said = run("verify", "--config", str(config), **{envvar("db"): "sqlite:///other.db"})
    assert said.code == 2
    assert "it has db, and so has the environment, ADK_SECURE_SESSIONS_DB" in said.stderr


WRONG = {
    'databse = "x"': "there is no setting 'databse'; there are db, key-db",
    "db = 3": "db must be a text",
    'also-key = "env:A"': "also-key must be a list of texts",
    "also-key = [1]": "also-key must be a list of texts",
    'rows-per-second = "many"': "rows-per-second must be a number",
    "rows-per-second = true": "rows-per-second must be a number",
    "db = ": "it is not TOML",
}


@pytest.mark.parametrize("text", WRONG)
def test_file_that_cannot_be_used_is_rejected(text: str, config: Path) -> None:
    config.write_text(text)
    said = run("verify", "--config", str(config))
    assert (said.code, WRONG[text] in said.stderr) == (2, True)
    assert "Traceback" not in said.stderr


def test_file_that_cannot_be_read_is_rejected(config: Path) -> None:
    said = run("verify", "--config", str(config))
    assert (said.code, "No such file or directory" in said.stderr) == (2, True)
    config.write_bytes(b"\xff")
    assert "it is not UTF-8" in run("verify", "--config", str(config)).stderr


def test_key_in_place_of_a_file_is_not_printed(config: Path) -> None:
    key = run("keygen").stdout.strip()
    config.write_text(f"{key}\n")
    said = run("verify", "--config", str(config))
    assert (said.code, key.strip("=") in said.stderr) == (2, False)


def test_page_names_every_variable_and_setting() -> None:
    assert [name for name in IN_ENVIRONMENT if f"`{envvar(name)}`" not in PAGE] == []
    assert [name for name in SETTINGS if f"`{name}`" not in PAGE] == []
    assert f"`{CONFIG_VARIABLE}`" in PAGE


def test_every_setting_is_an_option_of_a_command() -> None:
    known = {text for one in commands().values() for option in one.params for text in option.opts}
    assert {f"--{name}" for name in SETTINGS} <= known


def test_options_of_the_command_line_come_first(file: str) -> None:
    wrong = {envvar("db"): "sqlite:///nowhere.db", envvar("key"): "env:NEW_KEY"}
    assert run("verify", *on(file), **wrong).code == 0
