"""Read the pickles of google-adk's schema v0, in a child process with limits of memory and time.

google-adk's unpickler decides which classes a pickle may name.  With only these classes, a pickle
of 60 bytes can still allocate 3 GB, and one of 300 bytes can become 10**7 values.  With the child
process, such a pickle makes one session unreadable, and does not stop the application.
"""

import base64
import io
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from threading import Timer
from typing import Any
from uuid import UUID

from google.adk.events import Event, EventActions
from google.adk.version import __version__ as adk_version
from pydantic import BaseModel

from adk_secure_sessions.caches import SizedLru
from adk_secure_sessions.concurrency import ThreadLock
from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.formats import events
from adk_secure_sessions.migration.sources import ConversionError

_MEMORY = 256 * 2**20  # bytes that the child may take in addition to its imports
_SECONDS = 5.0  # for one pickle
_START_SECONDS = 60.0  # for importing google-adk
_MAX_UNLIMITED = 2**20  # bytes of a pickle, on systems that do not limit a process's memory
_LIMITS_MEMORY = sys.platform == "linux"
_CACHED_BYTES = 4 * 2**20  # of answers
_READY, _REJECTED = b"ready\n", b"-\n"
# The child needs these environment variables, if at all, to start; others may contain keys.
_ENVIRONMENT = ("LD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT")
_CHILD = f"import sys; sys.path = eval(sys.argv[1]); from {__name__} import serve; serve()"


class PickleReaderError(ConfigurationError):
    """The child process cannot start; the data is not the reason."""


class PickleReader:
    """Loads pickles one at a time; several threads may use it, and a forked process."""

    def __init__(self) -> None:
        _find_class()
        self._lock = ThreadLock()
        self._child: Any = None  # a subprocess.Popen
        self._pid = 0  # of the process that has started the child
        self._is_closed = False
        # The answers by the hash of the pickle: most events have the same, empty actions.
        self._answers: SizedLru[bytes, bytes] = SizedLru(_CACHED_BYTES)

    def read(self, pickled: bytes) -> EventActions:
        """Return the actions in *pickled*; raise ConversionError if the child cannot load them."""
        digest, answer = sha256(pickled).digest(), _REJECTED
        if _LIMITS_MEMORY or len(pickled) <= _MAX_UNLIMITED:
            with self._lock.lock:
                self._forget_child_of_parent()
                # If the child ends without an answer, the pickle may not be the reason: ask again.
                answer = self._answers.get(digest) or self._ask(pickled) or self._ask(pickled)
                # A pickle that exceeds a limit takes ten seconds: do not try it again.
                answer = answer or _REJECTED
                self._answers.put(digest, answer, len(answer))
        if answer == _REJECTED:
            raise ConversionError(
                "it has actions that are not loaded: google-adk did not write them, or they exceed "
                "a limit"
            )
        return events.decode(base64.b64decode(answer), 0, 0).actions

    def close(self) -> None:
        """End the child process; a thread that is still reading starts no other one."""
        self._is_closed = True
        self._forget_child_of_parent()
        if (child := self._child) is not None:
            child.kill()  # so that the thread that waits for an answer releases the lock
        with self._lock.lock:
            self._end_child()

    def _forget_child_of_parent(self) -> None:
        """In a forked process, start another child: of one child, two would mix up the answers."""
        if self._child is not None and self._pid != os.getpid():
            self._child.returncode = 0  # otherwise, Popen warns that it still runs
            self._child = None

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    def _ask(self, pickled: bytes) -> bytes:
        """Return the answer of the child; nothing if it has ended, for example at a limit."""
        if self._is_closed:
            return b""
        if self._child is None:
            command, pipe = [sys.executable, "-c", _CHILD, repr(sys.path)], subprocess.PIPE
            none = subprocess.DEVNULL
            environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            self._pid = os.getpid()
            with suppress(OSError):  # there is not enough memory, or there are too many processes
                self._child = subprocess.Popen(  # noqa: S603
                    command, stdin=pipe, stdout=pipe, stderr=none, env=environment
                )
            is_usable = self._child is not None and not self._is_closed
            if not is_usable or self._exchange_line(_START_SECONDS) != _READY:
                self._end_child()
                raise PickleReaderError(
                    f"{sys.executable} cannot start the process that reads google-adk's pickles: "
                    "check that it can import adk_secure_sessions, and that there is memory for it"
                )
        answer = self._exchange_line(_SECONDS, base64.b64encode(pickled) + b"\n")
        if answer.endswith(b"\n"):
            return answer
        self._end_child()
        return b""

    def _exchange_line(self, seconds: float, line: bytes = b"") -> bytes:
        limit = Timer(seconds, self._child.kill)
        limit.start()
        try:
            self._child.stdin.write(line)
            self._child.stdin.flush()
            answer: bytes = self._child.stdout.readline()
            return answer
        except OSError:
            return b""
        finally:
            limit.cancel()


def _find_class() -> Any:
    """Return the function with which google-adk's unpickler finds, or rejects, a class."""
    with suppress(ImportError, AttributeError):
        module = import_module("google.adk.sessions._restricted_pickle")
        return module._RestrictedUnpickler(io.BytesIO()).find_class
    raise ConfigurationError(
        "the database has google-adk's schema v0, which stores pickles, and the installed "
        f"google-adk {adk_version} cannot load them safely: install google-adk 2.8.0 or later"
    )


def serve() -> None:
    """Load pickles from the standard input until it ends; the child process runs this function."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no answer
    _load(pickle.dumps(EventActions()))  # imports what the first pickle needs
    if sys.platform == "linux":
        import resource

        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    answers.write(_READY)
    for line in sys.stdin.buffer:
        try:
            answer = base64.b64encode(_load(base64.b64decode(line))) + b"\n"
        except Exception:
            answer = _REJECTED
        answers.write(answer)


def _load(pickled: bytes) -> bytes:
    """Return the actions in *pickled* as a stored event."""
    values = events.dump_model(_Unpickler(io.BytesIO(pickled)).load())
    actions = EventActions.model_validate(values)
    return events.encode(Event(author="", invocation_id="", actions=actions), replaces=False)


class _Unpickler(vars(pickle)["_Unpickler"]):  # type: ignore[misc]
    """Lets a pickle set attributes only of models and UUIDs.

    A pickle can reach only those that it has created itself, so it cannot change a class or an
    enum, and so how the child reads other pickles.
    """

    dispatch = vars(pickle)["_Unpickler"].dispatch.copy()

    def find_class(self, module: str, name: str) -> Any:
        return _find_class()(module, name)

    def load_build(self) -> None:
        if not isinstance(self.stack[-2], BaseModel | UUID):
            raise pickle.UnpicklingError
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build
