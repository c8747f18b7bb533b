"""Typed errors. Every message says what was wrong, what was expected and how to put it right.

The same check raises the same text in eager mode and, from the fake implementation, under
``torch.compile`` and ``torch.export`` (which wrap it in an exception of their own).
"""

from __future__ import annotations

from typing import NoReturn

__all__ = [
    "ArgumentError",
    "AttnOpsError",
    "BackendError",
    "CapacityError",
    "DTypeError",
    "DeviceError",
    "GradientError",
    "OptionError",
    "PageTableError",
    "PlanError",
    "ShapeError",
    "UnsupportedError",
]


class AttnOpsError(Exception):
    """Base class of every error this library raises on purpose."""


class ShapeError(AttnOpsError, ValueError):
    """A tensor has the wrong rank, size or stride."""


class DTypeError(AttnOpsError, TypeError):
    """A tensor has the wrong dtype, or two tensors that must agree do not."""


class DeviceError(AttnOpsError, ValueError):
    """Tensors lie on different devices, or on one that the op does not run on."""


class OptionError(AttnOpsError, ValueError):
    """An option has a value that means nothing (layout, scale, window, cap)."""


class UnsupportedError(OptionError):
    """An argument asks for something that this library does not do; leaving it out gives what it does."""


class ArgumentError(AttnOpsError, TypeError):
    """An argument is missing, given twice, or given under two names."""


class PlanError(AttnOpsError, ValueError):
    """A plan is malformed or was made for another problem."""


class CapacityError(PlanError):
    """A batch does not fit the plan; the message names the capacity that would be enough."""


class PageTableError(PlanError):
    """The page table's contents are inconsistent (indptr, last_page_len or a page index)."""


class BackendError(AttnOpsError, NotImplementedError):
    """No backend, or not the one asked for, runs this problem; the message gives each one's reasons."""


class GradientError(AttnOpsError, RuntimeError):
    """An input requires grad: these ops are for inference."""


def fail(error: type[AttnOpsError], where: str, what: str, expected: str, fix: str) -> NoReturn:
    """Raise ``error`` with the message ``"{where}: {what}; expected {expected}; {fix}"``.

    ``where`` names the function or op, ``what`` says what was wrong, ``fix`` how to put it right.
    """
    raise error(f"{where}: {what}; expected {expected}; {fix}")
