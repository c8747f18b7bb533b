"""Images of kernels: the native launcher passes what an eager launch passes, compiled here for a GPU that is absent."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import native_launcher as n
from helpers import offline_compile
from helpers.native_launcher import FakeLibcuda, Launcher, view
from torch import Tensor
from torch._subclasses import FakeTensorMode

import attn_ops
from attn_ops.native.images import Image, ImageSet, NoImageError, collect

pytest.importorskip("triton")
from attn_ops.kernels.triton import decode, hopper_mla, hopper_prefill, image, launch
from attn_ops.kernels.triton.cubin import LoadedKernel, pack_pointer, parameter_layout

pytestmark = [n.needs_a_compiler, pytest.mark.slow]

BF16 = torch.bfloat16


class Op(NamedTuple):
    """A function of a backend, its planner, and its tensors before the plan."""

    function: Callable[..., Any]
    planner: Any
    tensors: tuple[Tensor, ...]


def _decode() -> Op:
    planner = attn_ops.DecodePlanner(8, 64, page_size=16, num_qo_heads=8, num_kv_heads=2, head_dim=128, num_ctas=33)
    cache = torch.zeros(70, 2, 16, 2, 128, dtype=BF16)
    return Op(decode.batch_decode, planner, (torch.zeros(4, 8, 128, dtype=BF16), cache[:, 0], cache[:, 1]))


def _prefill() -> Op:
    planner = attn_ops.PrefillPlanner(
        2, 300, 64, page_size=16, num_qo_heads=8, num_kv_heads=2, head_dim=128, num_ctas=33
    )
    caches = (torch.zeros(70, 2, 16, 128, dtype=BF16).transpose(1, 2) for _ in range(2))
    return Op(hopper_prefill.batch_prefill, planner, (torch.zeros(40, 8, 128, dtype=BF16), *caches))


def _mla() -> Op:
    planner = attn_ops.PrefillPlanner(
        8, 8, 64, page_size=64, num_qo_heads=16, num_kv_heads=1, head_dim=576, head_dim_vo=512, num_ctas=33
    )
    q, cache = torch.zeros(5, 16, 576, dtype=BF16), torch.zeros(70, 64, 576, dtype=BF16)
    return Op(hopper_mla.batch_mla, planner, (*q.split((512, 64), -1), *cache.split((512, 64), -1)))


OPS = {"decode": _decode, "prefill": _prefill, "mla": _mla}


class EagerLaunch(NamedTuple):
    """A launch as the eager launcher gets it, and the kernel's arguments by name."""

    tuple: tuple[Any, ...]
    arguments: dict[str, Any]


def _eager(op: Op, monkeypatch: pytest.MonkeyPatch) -> list[EagerLaunch]:
    launches: list[EagerLaunch] = []

    def capture(kernel: Any, grid: Any, values: Any, options: Any, run: bool) -> None:
        compiled = kernel.warmup(*values, grid=tuple(grid), **options.keywords())
        meta, layout = compiled.metadata, parameter_layout(compiled)
        assert layout is not None
        shared = max(meta.shared, options.min_shared)
        loaded = LoadedKernel(1, 32 * meta.num_warps, shared, bool(meta.launch_pdl), layout)
        launches.append(
            EagerLaunch(
                loaded.launch_tuple(grid, [_argument(value) for value in values]),
                dict(zip(kernel.arg_names, values, strict=True)),
            )
        )

    with offline_compile.compiling_for(90):
        monkeypatch.setattr(launch, "_launch_direct", capture)
        op.function(*op.tensors, list(op.planner.state), op.planner.workspace, return_lse=True)
    return launches


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return pack_pointer(value.data_ptr())
    return (pack_pointer(value.base.data_ptr()), value) if hasattr(value, "block_shape") else value


class PackagedLaunch(NamedTuple):
    """The arguments of ``attn::launch_image``."""

    outs: list[Tensor]
    ins: list[Tensor]
    integers: list[int]
    floats: list[float]
    name: str


def _packaged(op: Op, images: ImageSet, monkeypatch: pytest.MonkeyPatch) -> list[PackagedLaunch]:
    launches: list[PackagedLaunch] = []
    monkeypatch.setattr(image, "launch_image", lambda *args: launches.append(PackagedLaunch(*args)))
    with offline_compile.compiling_for(90), FakeTensorMode() as mode, collect(images):
        tensors, plan = (list(map(mode.from_tensor, ts)) for ts in (op.tensors, op.planner.state))
        op.function(*tensors, plan, mode.from_tensor(op.planner.workspace), return_lse=True)
    return launches


def _tensors(images: Image, arguments: dict[str, Any]) -> list[Tensor]:
    """The eager launch's tensors in the order of the image's."""
    values = (arguments[spec.name] for spec in images.tensors)
    return [value.base if hasattr(value, "block_shape") else value for value in values]


@pytest.mark.parametrize("name", OPS)
def test_packages_launch_as_eager_calls_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same grid, threads, shared memory, attribute and parameters, byte for byte."""
    op, images = OPS[name](), ImageSet()
    eager, packaged = _eager(op, monkeypatch), _packaged(op, images, monkeypatch)
    assert [x.name.rpartition("_")[0] for x in packaged] == [images.images[x.name].function for x in packaged]
    assert len(eager) == len(packaged) == 2
    libcuda = FakeLibcuda(tmp_path)
    libcuda.reset()
    launcher = Launcher(images, tmp_path, str(libcuda.path))
    for one, other in zip(eager, packaged, strict=True):
        compiled = images.images[other.name]
        sizes = libcuda.sizes_of(compiled.parameters)
        tensors = _tensors(compiled, one.arguments)
        assert launcher(other.name, list(map(view, tensors)), other.integers, other.floats) == (n.OK, "")
        _, grid, threads, shared, pdl, parameters = one.tuple
        assert libcuda.array("grid", 3) == list(grid)
        assert (libcuda.get("threads"), libcuda.get("shared"), libcuda.get("pdl")) == (threads, shared, pdl)
        maps = [p for p in parameters if isinstance(p, tuple)]
        assert libcuda.parameters(sizes) == [p[0] if isinstance(p, tuple) else p for p in parameters]
        if maps:
            _, kind, swizzle, *arrays = maps[-1]
            recorded = libcuda.array("map", 18, n.ctypes.c_longlong)
            rank = len(arrays[0]) // 8
            assert recorded[:3] == [kind, swizzle, rank]
            assert recorded[3 : 3 + rank] == list(memoryview(arrays[0]).cast("q"))
            assert recorded[9 : 8 + rank] == list(memoryview(arrays[1]).cast("q"))
            assert recorded[13 : 13 + rank] == list(memoryview(arrays[2]).cast("i"))
        outputs = {spec.name for spec in compiled.tensors[: len(other.outs)]}
        assert outputs == {"out", "lse"} | ({"partial"} if "combine" not in compiled.function else set())


def test_kernels_compile_for_the_gpu_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles for the current GPU, which may be another one."""
    current = [torch.device("cuda", 0)]

    @contextmanager
    def device(gpu: torch.device) -> Iterator[None]:
        current.append(gpu)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    compiled_on: list[torch.device] = []

    def warmup(*args: Any, **options: Any) -> None:
        compiled_on.append(current[-1])
        raise InterruptedError

    kernel = types.SimpleNamespace(arg_names=["out"], warmup=warmup)
    with FakeTensorMode():
        out = torch.empty(4, device="cuda:1")
    with pytest.raises(InterruptedError):
        image.launch(ImageSet(), kernel, (1,), (out,), launch.Options(), ("out",))
    assert compiled_on == [torch.device("cuda", 1)]


def test_a_kernel_of_unknown_parameters_is_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "parameter_layout", lambda compiled: None)
    with pytest.raises(
        NoImageError, match=r"as triton 3\.\S+ compiles decode_kernel, it needs clusters, scratch memory"
    ):
        _packaged(_decode(), ImageSet(), monkeypatch)
