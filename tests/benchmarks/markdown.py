"""What the pages that are made from files of results share: templates and Markdown tables."""

import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined

# The space between a number and its unit, and those around the slashes of percentiles.
_UNBROKEN = re.compile(r"(?<=\d) (?=(?:[KM]?B|[mµn]?s|%|MB/s)\b|%)|(?<=/) | (?=/)")


def rendered(template: Path, **names: object) -> str:
    """Return the text of a page: the Jinja template in the file *template*, given *names*."""
    environment = Environment(
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,
    )
    return environment.from_string(template.read_text(encoding="utf-8")).render(**names)


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; a number stays on one line with its unit."""
    unbroken = [[_UNBROKEN.sub("&nbsp;", cell) for cell in row] for row in rows]
    lines = [heading, ["---"] * len(heading), *unbroken]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
