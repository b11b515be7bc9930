"""SoftHSM2: a token in files, as a stand-in for a hardware module."""

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pkcs11
from pkcs11 import Attribute, KeyType

from tests.servers import unavailable

TOKEN, PIN = "clinic", "needle-of-a-pin"
_PLACES = ("/usr/lib/softhsm", "/usr/lib64/softhsm", "/usr/local/lib/softhsm", "/opt/homebrew/lib")


@functools.cache
def the_token() -> "SoftHsm":
    """One for a process: the module reads its configuration once."""
    directory = Path(tempfile.mkdtemp(prefix="softhsm-"))
    atexit.register(shutil.rmtree, directory)
    return SoftHsm(directory)


class SoftHsm:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        found = [Path(place, "libsofthsm2.so") for place in _PLACES]
        there = [path for path in found if path.exists()]
        if not there or not shutil.which("softhsm2-util"):
            unavailable("no SoftHSM here: on Debian, apt-get install softhsm2")
        self.module = str(there[0])
        configuration = directory / "softhsm2.conf"
        self.tokens.mkdir()
        configuration.write_text(f"directories.tokendir = {self.tokens}\nlog.level = ERROR\n")
        os.environ["SOFTHSM2_CONF"] = str(configuration)
        command = ["softhsm2-util", "--init-token", "--free", "--label", TOKEN]
        subprocess.run(
            [*command, "--pin", PIN, "--so-pin", "5678"], check=True, capture_output=True
        )
        for label in ("a", "b"):
            self.new_key(label)

    @property
    def tokens(self) -> Path:
        return self.directory / "tokens"

    @property
    def token(self) -> Any:
        return pkcs11.lib(self.module).get_token(token_label=TOKEN)

    def new_key(self, label: str, bits: int = 256, **attributes: bool) -> None:
        template = {"SENSITIVE": True, "EXTRACTABLE": False, **attributes}
        named = {Attribute[name]: value for name, value in template.items()}
        with self.token.open(rw=True, user_pin=PIN) as session:
            session.generate_key(KeyType.AES, bits, label=label, store=True, template=named)

    def take_out(self) -> None:
        self.tokens.rename(self.directory / "taken")

    def put_back(self) -> None:
        if not self.tokens.exists():
            (self.directory / "taken").rename(self.tokens)
