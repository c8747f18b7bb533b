"""The site loads nothing from another host: a page that does is an error of the build."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.errors import ExtensionError

LOADS = re.compile(r"""(?:<(?:script|img|iframe)[^>]*\ssrc|<link[^>]*\shref)=["'](?:https?:)?//[^"']*""")


def loads_of_other_hosts(html: str) -> list[str]:
    """What a page loads from other hosts when it is shown. Links that a reader follows are not among it."""
    return LOADS.findall(html)


def check(app: Any, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    for name in sorted(app.env.found_docs):
        found = loads_of_other_hosts(Path(app.builder.get_outfilename(name)).read_text(encoding="utf-8"))
        if found:
            raise ExtensionError(f"{name} loads from another host: {found[0]}; expected files of the site; copy it")


def setup(app: Any) -> dict[str, Any]:
    app.connect("build-finished", check)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
