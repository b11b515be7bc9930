"""Names the link beside each heading after the heading: its text alone is a paragraph sign."""

import re
from typing import Any

_HEADING = re.compile(
    r'(<h[1-6][^>]*>)(.*?)<a class="headerlink" (href="[^"]*") title="[^"]*">', re.DOTALL
)


def on_page_content(html: str, **_: Any) -> str:
    """See https://www.mkdocs.org/user-guide/configuration/#hooks."""

    def named(heading: re.Match[str]) -> str:
        text = " ".join(re.sub(r"<[^>]*>", "", heading[2]).split()).replace('"', "&quot;")
        name = f'title="Link to this section" aria-label="Link to: {text}"'
        return f'{heading[1]}{heading[2]}<a class="headerlink" {heading[3]} {name}>'

    return _HEADING.sub(named, html)
