"""The PyTorch theme's style names fonts of icons that the theme does not contain; the theme that it extends has them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def copy(app: Any, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    static = Path(app.outdir) / "_static"
    (static / "webfonts").mkdir(exist_ok=True)
    for font in static.glob("vendor/fontawesome/*/webfonts/*.woff2"):
        shutil.copy(font, static / "webfonts")


def setup(app: Any) -> dict[str, Any]:
    app.connect("build-finished", copy)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
