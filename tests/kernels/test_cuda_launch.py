"""Launches of CUDA kernels, compiled here without a GPU: parameters, captured calls, packages; over a fake driver."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import native_launcher as n
from helpers.cuda_kernels import (
    PTX_TYPES,
    check_parameters,
    compiled_parameters,
    declared_parameters,
    needs_nvrtc,
    specializations,
)
from helpers.fake_driver import FakeDriver, needs_the_module
from helpers.native_launcher import FakeLibcuda, Launcher, view
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from attn_ops.eager.bounded_cache import BoundedCache
from attn_ops.eager.launches import capture_launches
from attn_ops.kernels import cuda
from attn_ops.kernels.cuda import compile as compile_module
from attn_ops.kernels.cuda import kernel as kernel_module
from attn_ops.kernels.cuda import launch as launch_module
from attn_ops.kernels.cuda.kernel import Kernel, Specialization, TensorMap, persistent_grid
from attn_ops.kernels.cuda.launch import launch
from attn_ops.kernels.cuda.merge_states import DTYPES, KERNELS
from attn_ops.native import packaged_launch
from attn_ops.native.images import ImageSet, NoImageError, collect

BF16 = torch.bfloat16

PARAMETERS = {
    "a": "pointer",
    "k": "map",
    "n": "i32",
    "stride": "i64",
    "scale": "fp32",
    "out": "pointer",
    "mask": "pointer",
}
KERNEL = Kernel("example.cu", "example_kernel", PARAMETERS, writes=("out",), aligned=("a",))
EXAMPLE = Specialization(KERNEL, {"DIM": 64}, threads=384, shared_bytes=100_000, cluster=(2, 1, 1))
BYTES = {"pointer": 8, "map": 8, "i32": 4, "i64": 8, "fp32": 4}
"""Of each parameter that the fake driver copies; of a tensor map, the address in it."""


@pytest.fixture
def compiled_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of these tests have no source."""
    monkeypatch.setattr(launch_module, "cubin_of", lambda specialization: b"cubin")
    monkeypatch.setattr(launch_module, "_loaded", BoundedCache(launch_module.MAX_LOADED))


example = pytest.mark.usefixtures("compiled_elsewhere")


@pytest.fixture
def driver(fake_driver: FakeDriver) -> Iterator[FakeDriver]:
    sizes = (ctypes.c_int * 128).in_dll(fake_driver.library, "sizes")
    for i, kind in enumerate(PARAMETERS.values()):
        sizes[i] = BYTES[kind]
    yield fake_driver
    fake_driver.sizes_of(())


def _arguments(**changes: Any) -> dict[str, Any]:
    keys = torch.zeros(4, 32, 64, dtype=BF16)
    map_ = TensorMap(keys, [4, 32, 64], [2048, 64, 1], (1, 16, 64))
    arguments = {"a": torch.zeros(8), "k": map_, "n": 7, "stride": 1 << 40, "scale": 0.5, "out": torch.zeros(8)}
    return arguments | {"mask": None} | changes


def _recorded(driver: FakeLibcuda) -> list[Any]:
    raw = driver.parameters([BYTES[kind] for kind in PARAMETERS.values()])
    formats = {"pointer": "q", "map": "q", "i32": "i", "i64": "q", "fp32": "f"}
    return [struct.unpack(formats[kind], x)[0] for kind, x in zip(PARAMETERS.values(), raw, strict=True)]


@example
@needs_the_module
def test_a_launch_has_its_settings_and_parameters(driver: FakeDriver) -> None:
    x = _arguments()
    launch(EXAMPLE, (6, 2), **x)
    assert driver.array("grid", 3) == [6, 2, 1]
    assert driver.array("cluster", 3) == [2, 1, 1]
    assert [driver.get(name) for name in ("threads", "shared", "pdl", "max_shared")] == [384, 100_000, 1, 100_000]
    addresses = x["a"].data_ptr(), x["k"].base.data_ptr(), x["out"].data_ptr()
    assert _recorded(driver) == [addresses[0], addresses[1], 7, 1 << 40, 0.5, addresses[2], 0]
    recorded = driver.array("map", 18, ctypes.c_longlong)
    assert recorded[:3] == [9, 3, 3]  # bfloat16, swizzled by 128 bytes, rank 3
    assert (recorded[3:6], recorded[8:11], recorded[13:16]) == ([64, 32, 4], [0, 128, 4096], [64, 16, 1])


@example
@needs_the_module
def test_a_kernel_is_loaded_once_for_its_nulls_and_maps(driver: FakeDriver) -> None:
    keys = torch.zeros(4, 32, 64, dtype=torch.float16)
    calls = [_arguments(), _arguments(n=8), _arguments(mask=torch.zeros(1)), _arguments(mask=torch.ones(2))]
    calls += [_arguments(k=TensorMap(keys, [4, 32, 64], [2048, 64, 1], (1, 16, 64)))]
    loads = []
    for x in calls:
        launch(EXAMPLE, (1,), **x)
        loads.append(driver.get("loads"))
    assert loads == [1, 1, 2, 2, 3]
    assert driver.get("launches") == len(calls)


@example
@needs_the_module
def test_the_loaded_kernels_are_bounded(driver: FakeDriver) -> None:
    launch_module._loaded.limit = 2
    for i in range(5):
        launch(Specialization(KERNEL, {"DIM": i}, threads=32), (1,), **_arguments())
        assert len(launch_module._loaded) <= 2


@example
@needs_the_module
def test_an_unaligned_tensor_is_not_launched(driver: FakeDriver) -> None:
    with pytest.raises(ValueError, match="example_kernel: a is not aligned to 16 bytes"):
        launch(EXAMPLE, (1,), **_arguments(a=torch.zeros(9)[1:]))
    assert not driver.get("launches")


def test_the_names_of_the_arguments_are_checked() -> None:
    x = _arguments(other=1)
    del x["n"]
    with pytest.raises(TypeError, match=r"example_kernel: launched without \['n'\] and with unknown \['other'\]"):
        launch(EXAMPLE, (1,), **x)


@example
@needs_the_module
def test_a_call_captures_its_launches_and_repeats_them(driver: FakeDriver) -> None:
    def function(a: Tensor) -> Tensor:
        out = torch.empty(8)
        launch(EXAMPLE, (3,), **_arguments(a=a, out=out, k=keys))
        return out

    keys = _arguments()["k"]
    a = torch.zeros(8)
    out, captured = capture_launches(function, (a,), {})
    assert captured is not None
    (made,) = captured.launches
    assert made.integers == (3, 1, 1, 4, 32, 64, 2048, 64, 1, 7, 1 << 40)
    assert (made.floats, captured.outputs[0] is out) == ((0.5,), True)
    again = captured.bind((a,), (keys.base, *made.tensors[3:]), unpack=True)
    assert again is not None


@example
@needs_the_module
def test_an_empty_grid_launches_nothing(driver: FakeDriver) -> None:
    def function() -> None:
        launch(EXAMPLE, (0,), **_arguments())

    assert capture_launches(function, (), {})[1] is not None
    assert (driver.get("loads"), driver.get("launches")) == (1, 0)


class Packaged(NamedTuple):
    """The arguments of ``attn::launch_image``."""

    outs: list[Tensor]
    ins: list[Tensor]
    integers: list[int]
    floats: list[float]
    name: str


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch) -> list[Packaged]:
    made: list[Packaged] = []
    monkeypatch.setattr(packaged_launch, "launch_image", lambda *args: made.append(Packaged(*args)))
    return made


def _faked(mode: FakeTensorMode, arguments: dict[str, Any]) -> dict[str, Any]:
    k = arguments["k"]
    made = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    return made | {"k": k._replace(base=mode.from_tensor(k.base))}


@example
@n.needs_a_compiler
def test_a_package_launches_as_an_eager_call_does(packaged: list[Packaged], tmp_path: Path) -> None:
    images, x = ImageSet(), _arguments()
    with FakeTensorMode() as mode, collect(images):
        launch(EXAMPLE, (6, 2), **_faked(mode, x))
    ((outs, ins, integers, floats, name),) = packaged
    image = images.images[name]
    assert [(t.name, t.dtype, t.rank, t.alignment) for t in image.tensors] == [
        ("out", torch.float32, 1, 4),
        ("a", torch.float32, 1, 16),
        ("k", BF16, 3, 16),
    ]
    assert (len(outs), len(ins)) == (1, 2)
    libcuda = FakeLibcuda(tmp_path)
    libcuda.reset()
    sizes = (ctypes.c_int * 128).in_dll(libcuda.library, "sizes")
    for i, kind in enumerate(PARAMETERS.values()):
        sizes[i] = BYTES[kind]
    tensors = [x["out"], x["a"], x["k"].base]
    launcher = Launcher(images, tmp_path, str(libcuda.path))
    assert launcher(name, list(map(view, tensors)), integers, floats) == (n.OK, "")
    assert _recorded(libcuda) == [
        tensors[1].data_ptr(),
        tensors[2].data_ptr(),
        7,
        1 << 40,
        0.5,
        tensors[0].data_ptr(),
        0,
    ]
    assert (libcuda.array("grid", 3), libcuda.array("cluster", 3)) == ([6, 2, 1], [2, 1, 1])
    assert (libcuda.get("threads"), libcuda.get("shared"), libcuda.get("pdl")) == (384, 100_000, 1)
    refused = launcher(
        name,
        [view(tensors[0]), view(tensors[1], address=tensors[1].data_ptr() + 4), view(tensors[2])],
        integers,
        floats,
    )
    assert refused.code == n.BAD_TENSOR
    assert "the address of a is" in refused.text


@example
@pytest.mark.usefixtures("packaged")
def test_a_tensor_that_may_be_unaligned_is_no_image() -> None:
    with FakeTensorMode() as mode, collect(ImageSet()):
        x = _faked(mode, _arguments())
        with pytest.raises(NoImageError, match="a of example_kernel may not be aligned to 16 bytes"):
            launch(EXAMPLE, (1,), **x | {"a": torch.empty(9)[1:]})


def test_outside_of_a_package_nothing_is_traced() -> None:
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match="traced outside of a package"):
        launch(EXAMPLE, (1,), **_faked(mode, _arguments()))


def test_a_persistent_grid_is_no_larger_than_its_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_module, "num_sms", lambda device: 132)
    device = torch.device("cuda", 0)
    assert [persistent_grid(items, device) for items in (0, 5, 132, 1000)] == [0, 5, 132, 132]


@needs_nvrtc
@pytest.mark.parametrize("one", specializations(), ids=lambda one: one.name)
def test_the_declared_parameters_are_those_of_the_source(one: Specialization) -> None:
    """Names, order and kinds in the source, and kinds as the compiler sees them."""
    assert list(declared_parameters(one).items()) == list(one.kernel.parameters.items())
    kinds = list(one.kernel.parameters.values())
    check_parameters(one, kinds)
    if one in LISTS.values():
        with pytest.raises(compile_module.CompilerError, match="static assertion failed"):
            check_parameters(one, ["fp32" if kind == "i32" else kind for kind in kinds])
    pointers = {name for name, kind in one.kernel.parameters.items() if kind == "pointer"}
    assert {*one.kernel.writes, *one.kernel.aligned} <= pointers


LISTS = {(one.kernel.function, tuple(one.kernel.parameters.items())): one for one in specializations()}
"""A specialization for each kernel and list of parameters."""


@needs_nvrtc
@pytest.mark.parametrize("one", LISTS.values(), ids=lambda one: one.name)
def test_the_declared_parameters_are_those_of_the_output(one: Specialization) -> None:
    """Sizes and kinds in PTX."""
    assert compiled_parameters(one) == [PTX_TYPES[kind] for kind in one.kernel.parameters.values()]


@needs_nvrtc
def test_the_kernel_of_the_documentation_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "contributing" / "backend.md"
    fences = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    texts = {language: text for language, text in fences if "kernels/cuda/scale" in text.splitlines()[0]}
    for header in compile_module.FOLDER.glob("*.cuh"):
        shutil.copy(header, tmp_path)
    (tmp_path / "scale.cu").write_text(texts["cuda"])
    monkeypatch.setattr(compile_module, "FOLDER", tmp_path)
    namespace: dict[str, Any] = {}
    exec(texts["python"], namespace)
    one = namespace["SPECIALIZATIONS"][2]
    assert list(declared_parameters(one).items()) == list(one.kernel.parameters.items())
    assert compiled_parameters(one) == [PTX_TYPES[kind] for kind in one.kernel.parameters.values()]


@needs_nvrtc
@needs_the_module
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merges_launch_their_rows(fake_driver: FakeDriver, dtype: torch.dtype) -> None:
    """A CTA of 128 threads has 128 // vectors packed rows."""
    v, s = torch.zeros(5, 3, 4, 80, dtype=dtype), torch.zeros(5, 3, 4)
    cuda.merge_states(v, s)
    vectors = 80 * dtype.itemsize // 16
    rows = 128 // vectors
    assert fake_driver.array("grid", 3) == [-(-5 * 4 // rows), 1, 1]
    cuda.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    cuda.merge_state_in_place(v[:, 0], s[:, 0], v[:, 1], s[:, 1], torch.ones(5, dtype=torch.bool))
    cuda.merge_state_in_place(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    assert fake_driver.get("launches") == 4


@needs_nvrtc
@needs_the_module
@pytest.mark.parametrize("op", KERNELS)
def test_a_package_of_merges_takes_any_number_of_rows(
    op: str, fake_driver: FakeDriver, packaged: list[Packaged], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced for 50 rows, the integers of a call are those of an eager launch for any number."""
    eager: list[tuple[int, ...]] = []
    monkeypatch.setattr(launch_module.launches, "run", lambda one, device: eager.append(one.integers))
    symbols: list[Any] = []

    def call(v: Tensor, s: Tensor) -> Tensor:
        symbols.extend(n.node for n in v.shape if isinstance(n, torch.SymInt))
        pair = v[:, 0], s[:, 0], v[:, 1], s[:, 1]
        getattr(cuda, op)(*((v, s) if op == "merge_states" else pair))
        return v

    def states(rows: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(rows, 6, 4, 128, dtype=BF16), torch.zeros(rows, 6, 4)

    images = ImageSet()
    with collect(images):
        make_fx(call, tracing_mode="symbolic")(*states(50))
    ((outs, ins, integers, _, name),) = packaged
    hints = {node.expr: node.hint for node in symbols}
    sizes = 2 * sum(t.dim() for t in (*outs, *ins))
    assert images.images[name].function == f"{op}_kernel"
    for count in (50, 7, 1000):
        call(*states(count))
        hints[symbols[0].expr] = count  # of dimension 0
        values = [int(i.node.expr.subs(hints)) if isinstance(i, torch.SymInt) else i for i in integers]
        assert (*values[:3], *values[3 + sizes :]) == eager[-1]
