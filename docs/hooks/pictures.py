"""Puts each SVG picture itself into its page, where it takes the page's colours and font.

As an image it would follow the system's colours, whatever the reader has chosen on the page.
"""

import re
from pathlib import Path
from typing import Any

_IMAGE = re.compile(r'<img alt="[^"]*" src="([\w/-]+\.svg)" ?/?>')


def on_page_content(html: str, config: Any, **_: object) -> str:
    """See https://www.mkdocs.org/user-guide/configuration/#hooks."""

    def picture(image: re.Match[str]) -> str:
        return Path(config.docs_dir, image[1]).read_text(encoding="utf-8")

    return _IMAGE.sub(picture, html)
