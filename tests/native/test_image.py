"""Images of kernels, compiled here for a GPU that is absent: what eager calls and packages pass to the driver."""

from __future__ import annotations

import struct
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from helpers import native_launcher as n
from helpers import offline_compile
from helpers.native_launcher import FakeLibcuda, Launcher, view
from torch import Tensor
from torch._subclasses import FakeTensorMode

import attn_ops
from attn_ops.eager.captured_call import Launch
from attn_ops.eager.extension import extension, is_available, unavailable_reason
from attn_ops.native import packaged_launch
from attn_ops.native.images import LIBCUDA, Image, ImageSet, NoImageError, collect, load
from attn_ops.native.launch_arguments import operands

pytest.importorskip("triton")
from attn_ops.kernels.triton import decode_call, image, launch
from attn_ops.kernels.triton.cubin import parameter_layout

pytestmark = [n.needs_a_compiler, pytest.mark.slow]

BF16 = torch.bfloat16


class Op(NamedTuple):
    """A function of a backend, its planner, and its tensors before the plan."""

    function: Callable[..., Any]
    planner: Any
    tensors: tuple[Tensor, ...]


def _decode(max_batch: int = 8, rows: int = 4, pages: int = 64) -> Op:
    planner = attn_ops.DecodePlanner(
        max_batch, pages, page_size=16, num_qo_heads=8, num_kv_heads=2, head_dim=128, num_ctas=33
    )
    cache = torch.zeros(70, 2, 16, 2, 128, dtype=BF16)
    return Op(decode_call.batch_decode, planner, (torch.zeros(rows, 8, 128, dtype=BF16), cache[:, 0], cache[:, 1]))


@contextmanager
def _compiling() -> Iterator[None]:
    """For a Hopper GPU on which decode asks for more shared memory than it uses."""
    with (
        offline_compile.compiling_for(90),
        mock.patch.object(decode_call, "min_shared_for_even_spread", return_value=90 << 10),
    ):
        yield


class EagerLaunch(NamedTuple):
    """A launch as the kernel's module asks for it."""

    compiled: Any
    names: tuple[str, ...]
    values: tuple[Any, ...]
    grid: tuple[int, ...]
    options: Any

    @property
    def layout(self) -> Any:
        return parameter_layout(self.compiled)

    @property
    def parameters(self) -> list[bytes]:
        """The bytes of the kernel's parameters."""
        made: list[bytes] = []
        for kind, value in zip(self.layout.kinds, self.layout.select(self.values), strict=True):
            if kind == "pointer":
                made.append(struct.pack("q", value.data_ptr()))
            else:
                made.append(struct.pack({"i32": "i", "i64": "q", "fp32": "f"}[kind], value))
        return [*made, bytes(8), bytes(8)]  # Triton's scratch memory


def _eager(op: Op, monkeypatch: pytest.MonkeyPatch) -> list[EagerLaunch]:
    launches: list[EagerLaunch] = []

    def capture(kernel: Any, grid: Any, values: Any, options: Any) -> None:
        compiled = kernel.warmup(*values, grid=tuple(grid), **options.keywords())
        launches.append(EagerLaunch(compiled, kernel.arg_names, values, (*grid, 1, 1)[:3], options))

    with _compiling(), monkeypatch.context() as patch:
        patch.setattr(launch, "_launch_direct", capture)
        op.function(*op.tensors, list(op.planner.state), op.planner.workspace, return_lse=True)
    return launches


class PackagedLaunch(NamedTuple):
    """The arguments of ``attn::launch_image``."""

    outs: list[Tensor]
    ins: list[Tensor]
    integers: list[int]
    floats: list[float]
    name: str


def _packaged(op: Op, images: ImageSet, monkeypatch: pytest.MonkeyPatch) -> list[PackagedLaunch]:
    launches: list[PackagedLaunch] = []
    monkeypatch.setattr(packaged_launch, "launch_image", lambda *args: launches.append(PackagedLaunch(*args)))
    with _compiling(), FakeTensorMode() as mode, collect(images):
        tensors, plan = (list(map(mode.from_tensor, ts)) for ts in (op.tensors, op.planner.state))
        op.function(*tensors, plan, mode.from_tensor(op.planner.workspace), return_lse=True)
    return launches


def _tensors(images: Image, one: EagerLaunch) -> list[Tensor]:
    """The eager launch's tensors in the order of the image's."""
    arguments = dict(zip(one.names, one.values, strict=True))
    return [arguments[spec.name] for spec in images.tensors]


def _assert_launched(libcuda: FakeLibcuda, one: EagerLaunch, sizes: list[int]) -> None:
    meta = one.compiled.metadata
    assert libcuda.array("grid", 3) == list(one.grid)
    settings = 32 * meta.num_warps, max(meta.shared, one.options.min_shared), int(one.options.launch_pdl)
    assert tuple(libcuda.get(name) for name in ("threads", "shared", "pdl")) == settings
    assert libcuda.parameters(sizes) == one.parameters


@pytest.mark.parametrize("sizes", [(8, 4, 64), (1, 1, 256)], ids=["a batch", "one request"])
def test_packages_launch_as_the_kernel_asks(
    sizes: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same code, grid, threads, shared memory, attribute and parameters, byte for byte."""
    op, images = _decode(*sizes), ImageSet()
    eager, packaged = _eager(op, monkeypatch), _packaged(op, images, monkeypatch)
    assert [x.name.rpartition("_")[0] for x in packaged] == [images.images[x.name].function for x in packaged]
    assert len(eager) == len(packaged) == 2
    libcuda = FakeLibcuda(tmp_path)
    libcuda.reset()
    launcher = Launcher(images, tmp_path, str(libcuda.path))
    for one, other in zip(eager, packaged, strict=True):
        compiled = images.images[other.name]
        assert compiled.cubin == one.compiled.asm["cubin"]
        widths = libcuda.sizes_of(compiled.parameters)
        tensors = _tensors(compiled, one)
        assert launcher(other.name, list(map(view, tensors)), other.integers, other.floats) == (n.OK, "")
        _assert_launched(libcuda, one, widths)
        outputs = {spec.name for spec in compiled.tensors[: len(other.outs)]}
        assert outputs == {"out", "lse"} | ({"partial"} if "combine" not in compiled.function else set())


@pytest.mark.skipif(not is_available(), reason=unavailable_reason)
def test_eager_calls_launch_as_the_kernel_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, libcuda = _eager(_decode(), monkeypatch), FakeLibcuda(tmp_path)
    libcuda.reset()
    extension.connect(str(libcuda.path))
    try:
        for one in eager:
            given = one.layout.arguments(one.values)
            made = image.image_of(one.compiled, one.options, given)
            sizes = libcuda.sizes_of(made.parameters)
            call = Launch(load(made, 0), *operands(given.kinds, given.values, one.grid))
            call.run(0, n.STREAM)
            _assert_launched(libcuda, one, sizes)
    finally:
        extension.connect(LIBCUDA)


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
        image.launch(ImageSet(), kernel, (1,), (out,), launch.Options(writes=("out",)))
    assert compiled_on == [torch.device("cuda", 1)]


def test_a_kernel_of_unknown_parameters_is_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "parameter_layout", lambda compiled: None)
    with pytest.raises(
        NoImageError, match=r"as triton 3\.\S+ compiles decode_kernel, it needs clusters, scratch memory"
    ):
        _packaged(_decode(), ImageSet(), monkeypatch)
