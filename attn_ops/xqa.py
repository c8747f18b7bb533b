"""``xqa`` and ``xqa_mla``. ``attn_ops.xqa`` is a function that has both as attributes.

So ``attn_ops.xqa(...)``, ``attn_ops.xqa.xqa_mla(...)`` and ``from attn_ops.xqa import xqa`` all work, in any order, and
``torch.compile`` traces a plain function: it does not trace a module that can be called.
"""

import sys

from attn_ops.frontend.xqa import xqa, xqa_mla

__all__ = ["xqa", "xqa_mla"]

xqa.xqa = xqa  # type: ignore[attr-defined]
xqa.xqa_mla = xqa_mla  # type: ignore[attr-defined]
# The import system returns, and sets on the package, the object that is here when this file has run.
sys.modules[__name__] = xqa  # type: ignore[assignment]
