"""Both distributions work in a clean environment, with each extra and without: `make dist-check`.

Each test creates an environment, installs a distribution from a folder of its own, and runs
programs with `python -I` in another folder.  So nothing is imported from this repository.
"""

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("build", reason="building the package needs the group dev")

from release.build import ROOT, build
from release.environments import clean_environment, run

pytestmark = pytest.mark.soak

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


class Extra(NamedTuple):
    program: str  # the body of a coroutine that uses the library
    printed: str  # with the extra: nothing listens at the address, and no library is at the path
    missing: str | None  # without the extra; None if google-adk brings the library, too


KEY = """
await {key}.wrap(bytes(32), b"context")
"""
DATABASE = """
backend = AesGcmBackend(generate_key())
async with EncryptedSessionService("{url}", backend) as service:
    await service.prepare_tables()
"""
ARTIFACTS = """
service = EncryptedSessionService("sqlite:///sessions.db", AesGcmBackend(generate_key()))
part = types.Part(inline_data=types.Blob(mime_type="text/plain", data=b"stored"))
names = {"app_name": "a", "user_id": "u", "session_id": "s", "filename": "f"}
async with service:
    artifacts = EncryptedArtifactService(service, "memory://")
    await artifacts.save_artifact(**names, artifact=part)
    loaded = await artifacts.load_artifact(**names)
    print(loaded.inline_data.data)
"""
EXTRAS = {
    "artifacts": Extra(ARTIFACTS, "b'stored'", "obstore"),
    "aws": Extra(
        KEY.format(
            key='AwsKmsKey("alias/clinic", region="eu-west-1",'
            ' endpoint_url="http://127.0.0.1:9", attempts=1)'
        ),
        "KeyServiceError",
        "botocore",
    ),
    "gcp": Extra(
        "from google.auth.credentials import AnonymousCredentials"
        + KEY.format(
            key='GcpKmsKey("projects/p/locations/l/keyRings/r/cryptoKeys/k", attempts=1,'
            ' endpoint="127.0.0.1:9", credentials=AnonymousCredentials(), timeout=2)'
        ),
        "KeyServiceError",
        "google.cloud.kms",
    ),
    "mysql": Extra(DATABASE.format(url="mysql://u:p@127.0.0.1:9/d"), "DatabaseError", "driver"),
    "pkcs11": Extra(
        KEY.format(key='Pkcs11Key("clinic/a", module="/none.so", pin="1", attempts=1)'),
        "KeyServiceError",
        "pkcs11",
    ),
    "postgresql": Extra(
        DATABASE.format(url="postgresql://u:p@127.0.0.1:9/d"), "DatabaseError", "driver"
    ),
    "vault": Extra(
        KEY.format(
            key='VaultKey("transit/clinic", address="http://127.0.0.1:9", token="t", attempts=1)'
        ),
        "KeyServiceError",
        None,
    ),
}
MAIN = """
import asyncio
import warnings

warnings.simplefilter("ignore")  # of google-adk
from google.genai import types
from adk_secure_sessions import *
import adk_secure_sessions

async def use():
{body}

try:
    asyncio.run(use())
except adk_secure_sessions.SecureSessionError as error:
    print(type(error).__name__, error)
"""


def use(python: Path, extra: str, folder: Path) -> str:
    """Run the program of *extra*, and return what it printed."""
    body = "\n".join(f"    {line}" for line in EXTRAS[extra].program.strip().splitlines())
    folder.mkdir()
    (folder / "use.py").write_text(MAIN.format(body=body), encoding="utf-8")
    return run(python, "-I", "use.py", cwd=folder)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sdist_and_wheel = build(ROOT, tmp_path_factory.mktemp("dist"))
    return {"wheel" if path.suffix == ".whl" else "sdist": path for path in sdist_and_wheel}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in [name for name in os.environ if re.match("AWS_|GOOGLE_|VAULT_|PKCS11_", name)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    yield tmp_path
    shutil.rmtree(tmp_path / "env", ignore_errors=True)  # 300 MB


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_quickstart_runs_from_an_installed_distribution(
    kind: str, distributions: dict[str, Path], folder: Path
) -> None:
    python = clean_environment(folder / "env", str(distributions[kind]))
    shutil.copy(ROOT / "examples" / "quickstart.py", folder)
    shown = run(python, "-I", "quickstart.py", "--db", "kept.db", cwd=folder)
    assert "You are Ada Lovelace." in shown.split("A new service", 1)[1]
    assert "found          nothing" in shown
    program = "import adk_secure_sessions; print(adk_secure_sessions.__file__)"
    assert run(python, "-I", "-c", program, cwd=folder).startswith(str(folder / "env"))
    command = run(python.parent / "adk-secure-sessions", "--version", cwd=folder)
    assert PROJECT["version"] in command


def test_every_public_type_of_the_wheel_is_known(
    distributions: dict[str, Path], folder: Path
) -> None:
    python = clean_environment(folder / "env", str(distributions["wheel"]))
    pyright = Path(sys.executable).parent / "pyright"
    command: list[str | Path] = [
        pyright,
        "--verifytypes",
        "adk_secure_sessions",
        "--ignoreexternal",
    ]
    report = run(*command, cwd=folder, python=python)
    assert "Type completeness score: 100%" in report
    assert str(folder / "env") in report


def test_errors_without_extras_name_the_packages_to_install(
    distributions: dict[str, Path], folder: Path
) -> None:
    python = clean_environment(folder / "env", str(distributions["wheel"]))
    for extra, (_, printed, missing) in EXTRAS.items():
        shown = use(python, extra, folder / extra)
        if missing is None:
            assert shown.startswith(printed), extra
            continue
        required = PROJECT["optional-dependencies"][extra]
        assert shown.startswith("ConfigurationError"), (extra, shown)
        assert f" needs {missing}" in shown or f"needs a {missing} that is not installed" in shown
        packages = [one.partition(";")[0] for one in required]
        assert "pip install " + " ".join(f"'{one}'" for one in packages) in shown


@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_alone_makes_its_feature_work(
    extra: str, distributions: dict[str, Path], folder: Path
) -> None:
    python = clean_environment(folder / "env", f"{distributions['wheel']}[{extra}]")
    shown = use(python, extra, folder / extra)
    assert shown.startswith(EXTRAS[extra].printed), shown
    assert "pip install" not in shown


def test_every_extra_for_users_is_tried() -> None:
    assert set(PROJECT["optional-dependencies"]) == set(EXTRAS)
