"""The extension module (``extension``): the launcher for eager calls."""  # noqa: N999

from collections.abc import Callable
from typing import Any

from torch import Tensor

class Image:
    """A compiled kernel. The fields are those of ``launcher.h``."""

    def __init__(
        self,
        name: str,
        function: str,
        cubin: bytes,
        compute_capability: int,
        threads: int,
        shared_bytes: int,
        pdl: bool,
        cluster: tuple[int, int, int],
        maps: tuple[tuple[int, int, int, int, tuple[int, ...]], ...],
        parameters: tuple[tuple[int, int, str], ...],
    ) -> None:
        """``maps`` are rows (tensor, type, swizzle, element_bytes, box), ``parameters`` rows (kind, index, name)."""

    def load(self, device: int) -> None:
        """Load the kernel on a GPU, as its first launch there does."""

class PreparedCall:
    """The launches of a call, ready for other tensors."""

    def __init__(
        self,
        launches: tuple[tuple[Image, tuple[int, ...], tuple[int, ...], tuple[float, ...]], ...],
        sources: tuple[tuple[int, int], ...],
        outputs: tuple[Any, ...],
        unpack: bool,
        scratch: tuple[Callable[[], Any], ...] = (),
    ) -> None:
        """Make a prepared call.

        Args:
            launches: rows (image, tensors, integers, floats). ``tensors`` index the sources, then the outputs, then the
                scratch memory; ``integers`` are the grid and those of the parameters.
            sources: rows (index of a tensor argument, bytes from its start), or (-1, address) of a tensor that is the
                same in every call.
            outputs: of each, the index of the argument that it is written to, a function that allocates it, or a tensor
                without elements that every call returns.
            unpack: return the first output, or None without one, instead of a tuple of all.
            scratch: functions that allocate memory that only the launches use.
        """

    def call(self, arguments: tuple[Any, ...]) -> Any:
        """Make a call on the current device and stream. The tensors have the form of those that it was prepared for,
        which is not checked."""

    def launch(self, device: int, stream: int) -> Any:
        """Make a call that has no arguments, and return its outputs."""

class CallCache:
    """Makes a call by its entry. The caller inserts entries and evicts them."""

    def __init__(
        self,
        entries: dict[Any, Any],
        grad_mode: Callable[[], bool],
        on_miss: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        interposition_checks: tuple[Callable[[], Any], ...],
        of_method: bool,
        on_cuda: bool,
        tuple_is_plan: bool = False,
        takes_tensors: bool = False,
    ) -> None:
        """Make a cache.

        Args:
            entries: ``{key: entry}``, a :class:`PreparedCall` or a function to call with the arguments, or with the
                tensors.
            grad_mode: part of every key.
            on_miss: ``on_miss(key, args, kwargs)`` makes a call without an entry; ``key`` is None if the call cannot be
                cached.
            interposition_checks: if any returns true, a mode, transform or profiler must observe the op: a miss.
            of_method: the cache is called as ``cache(number, owner, args, kwargs)``. The owner is no part of the key;
                calls with plans miss.
            on_cuda: the device and whether its stream is captured are part of the key, and tensors of plans by
                identity; otherwise neither, and these tensors by their sizes, as all others.
            tuple_is_plan: a tuple among the arguments is a plan, as a list is. Otherwise its tensors are arguments.
            takes_tensors: functions among the entries take the tuple of the call's tensors, those of tuples among the
                arguments too. If one returns NotImplemented, the call is a miss without a key. So is a call on
                the CPU with tensors in a list.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

def connect(path: str) -> None:
    """Use this library in place of that of the CUDA driver."""

def is_regular(out: Tensor, lse: Tensor) -> bool | None:
    """Whether all numbers of ``out`` are finite, and those of ``lse`` below infinity and not 0.

    None if it does not look: at tensors with gaps, or of other dtypes than float32, and bfloat16 of ``out``.
    """

def contents(tensors: tuple[Tensor, ...], most: int, of_table: bool = False) -> bytes | None:
    """The numbers of all tensors, one after the other, if they have ``most`` bytes at most.

    None if they have more, or a tensor is not contiguous on the CPU. With ``of_table`` the first are the offsets of a
    page table, and the last its int32 pages, which are read as far as the last offset says if that is positive.
    """
