"""Shows the version in the header of each page, and keeps the header from loading anything.

The version is that of pyproject.toml: the pages describe the sources beside them, whatever is
installed.  CHANGELOG.md says whether it is released.
"""

import re
import tomllib
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

# The first is in the header; others are in the navigation.
_NAME = re.compile(r'(<span class="md-ellipsis">\s*)([^<]*?)(\s*</span>)')
# For an element with this mark, the theme's script asks the server of the repository for its stars.
_ASKS = ' data-md-component="source"'


def on_config(config: Any, **_: object) -> None:
    """See https://www.mkdocs.org/user-guide/configuration/#hooks."""
    path = Path(config.config_file_path).with_name("pyproject.toml")
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    release = project["version"]
    changelog = path.with_name("CHANGELOG.md").read_text(encoding="utf-8")
    is_unreleased = f"## [{release}] - unreleased\n" in changelog
    config.extra["release"] = f"{release}, unreleased" if is_unreleased else release


def on_post_page(output: str, config: Any, **_: object) -> str:
    release = escape(config.extra["release"])
    output, number = _NAME.subn(rf'\1\2 <span class="release">{release}</span>\3', output, count=1)
    if number != 1:
        raise PluginError("the theme's header has no name of the site: see docs/hooks/version.py")
    return output.replace(_ASKS, "")


def on_post_template(output: str, template_name: str, config: Any, **_: object) -> str:
    return on_post_page(output, config) if template_name == "404.html" else output
