"""The PyTorch theme's style names icon fonts that only the theme below it contains."""

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
