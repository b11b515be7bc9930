"""Replace the names of Python arguments in error texts by options of the command line.

Errors of `maintenance` name arguments of Python functions, which the command line does not have.
"""

import re

# Pairs: a phrase in a text of this package, and the phrase that the command line prints instead.  A
# longer phrase comes before a shorter phrase that it contains: the first phrase that fits is
# replaced.  A test checks that every phrase occurs in the package.
WORDING = (
    ("list a backend with that key", "give its key spec with --key or --also-key"),
    ("list NoOpBackend() in additional_backends", "give --also-backend no-op"),
    ("list it in additional_backends", "give it with --also-backend"),
    ("delete_gone cannot be combined with since", "--delete-gone cannot be combined with --since"),
    ("omit delete_gone", "omit --delete-gone"),
    ("with --restart or restart=True", "with --restart"),
    ("older_than", "--older-than"),
    ("key_db_url", "--key-db"),
    ("db_url", "--db"),
)
_PHRASES = re.compile("|".join(re.escape(phrase) for phrase, _ in WORDING))


def for_command_line(text: str) -> str:
    """Return *text* with arguments of Python functions replaced by command-line options."""
    return _PHRASES.sub(lambda found: dict(WORDING)[found[0]], text)
