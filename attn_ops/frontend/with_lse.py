"""``run_return_lse`` and ``forward_return_lse`` of wrappers, which are ``run`` and ``forward`` with the LSE."""

from __future__ import annotations

from typing import Any


class RunWithLse:
    """Base class of wrappers whose ``run`` has an argument ``return_lse``."""

    run: Any

    def run_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        """:meth:`run` with ``return_lse``."""
        return self.run(*args, **{**kwargs, "return_lse": True})


class ForwardWithLse(RunWithLse):
    """Base class of wrappers whose ``forward``, of the 0.1 interface, has an argument ``return_lse`` too."""

    forward: Any

    def forward_return_lse(self, *args: Any, **kwargs: Any) -> Any:
        """:meth:`forward` with the LSE."""
        return self.forward(*args, **{**kwargs, "return_lse": True})
