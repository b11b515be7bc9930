"""The words for which the texts of `maintenance` have an option of the command line instead.

Errors name arguments of Python functions.  A user of the command line does not have them.
"""

import re

# Longer phrases come first.  Each left side stands in a text of this package: a test looks for it.
WORDING = (
    ("list a backend with that key", "give its key spec with --key or --also-key"),
    ("list NoOpBackend() in additional_backends", "give --also-backend no-op"),
    ("list it in additional_backends", "give it with --also-backend"),
    ("with --restart or restart=True", "with --restart"),
    ("key_db_url", "--key-db"),
    ("db_url", "--db"),
)
_PHRASES = re.compile("|".join(re.escape(phrase) for phrase, _ in WORDING))


def for_command_line(text: str) -> str:
    """Return *text* with options of the command line for arguments of Python functions."""
    return _PHRASES.sub(lambda found: dict(WORDING)[found[0]], text)
