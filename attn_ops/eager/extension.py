"""The extension module of eager calls, ``attn_ops.native._C``, which is built if the installation has a C++ compiler.

extension           the module, or None if it cannot be imported
unavailable_reason  a sentence that says why it cannot be imported, or ``""``
"""

from __future__ import annotations

unavailable_reason = ""
try:
    import attn_ops.native._C as extension  # noqa: N811
except ImportError as error:
    extension = None  # type: ignore[assignment]
    unavailable_reason = f"the extension module cannot be imported: {error}"


def is_available() -> bool:
    """Whether the extension module is installed. Without it Python checks every call and Triton launches it."""
    return extension is not None
