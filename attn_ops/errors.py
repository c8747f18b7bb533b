"""Typed errors. Every message says what was wrong, what was expected and how to fix it.

A check raises the same message in eager mode and, from the fake implementation, under ``torch.compile`` and
``torch.export``, which wrap it in their own exceptions. An AOTInductor package throws the message of a
:class:`CapacityError` as ``std::runtime_error``. Each class also derives from the builtin exception of its kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AttnOpsError",
    "BackendError",
    "CapacityError",
    "DTypeError",
    "DeviceError",
    "GradientError",
    "OptionError",
    "PageTableError",
    "PlacementError",
    "PlanError",
    "RankError",
    "ShapeError",
    "UnsupportedError",
]


class AttnOpsError(Exception):
    """Base class of the errors that this library raises. A message begins with the name of what was called."""

    @property
    def where(self) -> str:
        """The function, op or method that the message names."""
        return str(self).partition(": ")[0]


class ShapeError(AttnOpsError, ValueError):
    """A tensor has the wrong rank, size or stride."""


class DTypeError(AttnOpsError, TypeError, ValueError):
    """A tensor has an unsupported dtype, or the dtypes of two tensors do not match.

    A TypeError, as PyTorch raises, and a ValueError, as FlashInfer raises.
    """


class DeviceError(AttnOpsError, ValueError):
    """Tensors are on different devices, or on a device that the op does not support."""


class OptionError(AttnOpsError, ValueError):
    """An option has an invalid value, such as a layout, scale, window, soft cap or backend name."""


class UnsupportedError(OptionError):
    """An argument asks for an unsupported feature. Without the argument, the call is supported."""


class ArgumentError(AttnOpsError, TypeError):
    """An argument is of a wrong type, is missing, is given twice, or does not go with another argument."""


class ArgumentTypeError(ArgumentError):
    """An argument is of a wrong Python type, or is missing: it is None, or left out, and a value is needed."""


class PlanError(AttnOpsError, ValueError):
    """A plan is malformed, or was made for another problem."""


class CapacityError(PlanError):
    """A batch exceeds the capacity of the plan. The message gives the capacity that it needs."""


class PageTableError(PlanError, RuntimeError):
    """The contents of a page table are inconsistent: an indptr, a last page length or a page number.

    A RuntimeError too, as FlashAttention raises.
    """


class PlacementError(AttnOpsError, ValueError):
    """A DTensor has a placement or a mesh that the op does not take."""


class RankError(AttnOpsError, RuntimeError):
    """A rank failed, did not answer in time or has other values than the others; or there is no process group."""


class BackendError(AttnOpsError, NotImplementedError):
    """No backend runs this problem, or the requested one does not. The message gives the reasons of each."""


class GradientError(AttnOpsError, RuntimeError):
    """An input requires grad or has a tangent. The ops are for inference and have no derivatives."""


def fail(error: type[AttnOpsError], where: str, what: str, expected: str, fix: str) -> NoReturn:
    """Raise ``error`` with the message ``"{where}: {what}; expected {expected}; {fix}"``.

    ``where`` names the function or op, ``what`` says what was wrong, ``fix`` how to fix it.
    """
    raise error(f"{where}: {what}; expected {expected}; {fix}")


def unsupported(where: str, what: str, reason: str) -> NoReturn:
    """Raise an UnsupportedError with the message ``"{where}: {what}, which is not supported: {reason}"``.

    ``reason`` says why, or what to do instead.
    """
    raise UnsupportedError(f"{where}: {what}, which is not supported: {reason}")


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as messages name it, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def shape_of(t: torch.Tensor | Iterable[int]) -> str:
    """The shape of a tensor, or a shape, as messages show it: with numbers also for sizes that a graph leaves open."""
    sizes = t.shape if isinstance(t, torch.Tensor) else t
    return "[" + ", ".join([f"{int(size)}" for size in sizes]) + "]"
