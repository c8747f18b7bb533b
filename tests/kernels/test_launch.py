"""Arguments of a launch by name, and tables of constants from the launch to the code that Inductor generates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from helpers import cpp_runner  # noqa: E402
from helpers.offline_compile import Driver  # noqa: E402

from attn_ops.kernels.triton.config_prefill import prefill_tile  # noqa: E402
from attn_ops.kernels.triton.launch import Options, constexpr_table, launch  # noqa: E402
from attn_ops.ops import inductor  # noqa: E402

offline = pytest.mark.skipif(
    torch.cuda.is_available() or triton.knobs.runtime.interpret, reason="compiles for a GPU that is not there"
)


@constexpr_table
class Sizes(NamedTuple):
    BLOCK: int
    FACTOR: float
    NEGATE: bool


@triton.jit(do_not_specialize=["n"])
def scale_kernel(x, out, n, stride_x, SIZES: tl.constexpr):
    """Grid: (blocks of BLOCK elements). A program multiplies its elements by FACTOR."""
    BLOCK: tl.constexpr = SIZES.BLOCK
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i * stride_x, mask=i < n) * SIZES.FACTOR
    if SIZES.NEGATE:
        value = -value
    tl.store(out + i, value, mask=i < n)


SIZES = Sizes(BLOCK=128, FACTOR=2.0, NEGATE=True)
"""Of 100 elements."""


def _arguments(x: Tensor, out: Tensor) -> dict[str, Any]:
    """The block is a symbol where the number of elements is one."""
    sizes = Sizes(triton.next_power_of_2(x.shape[0]), 2.0, NEGATE=True)
    return {"n": x.shape[0], "SIZES": sizes, "stride_x": x.stride(0), "out": out, "x": x}


@pytest.mark.parametrize("change", [{"m": 3}, {"n": None}, {"n": None, "m": 3}], ids=str)
def test_missing_and_unknown_arguments_are_listed(change: dict[str, Any]) -> None:
    arguments = {**_arguments(torch.zeros(4), torch.zeros(4)), **change}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    missing, unknown = ["n"] * ("n" in change), ["m"] * ("m" in change)
    with pytest.raises(TypeError) as error:
        launch(scale_kernel, (1,), **arguments)
    assert str(error.value).startswith(f"scale_kernel: launched without {missing} and with unknown {unknown}; expected")
    assert "stride_x" in str(error.value)


@pytest.mark.parametrize(
    ("packed_rows", "rows"),
    [(16, 16), (64, 64), (192, 256), (250, 256), (256, 256), (380, 128), (384, 128), (512, 256), (768, 256)],
)
def test_a_tile_of_prefill_leaves_few_rows_unused(packed_rows: int, rows: int) -> None:
    assert prefill_tile(torch.device("cpu"), torch.bfloat16, 64, 64, False, packed_rows).rows == rows


def test_the_repr_of_a_table_evaluates_to_it() -> None:
    value = eval(repr(SIZES))
    assert value == SIZES
    assert type(value) is Sizes


def test_a_table_has_numbers_for_the_symbols_of_a_graph() -> None:
    tables: list[Sizes] = []

    def call(x: Tensor) -> Tensor:
        tables.append(Sizes(x.shape[0], FACTOR=2.0, NEGATE=True))
        return x.clone()

    make_fx(call, tracing_mode="symbolic")(torch.zeros(100))
    assert [type(x) for x in tables[-1]] == [int, float, bool]


@pytest.fixture
def fake_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(90))


def _scale(x: Tensor) -> Tensor:
    out = torch.empty_strided(x.shape, (1,), device=x.device)
    launch(scale_kernel, (2,), Options(num_warps=2), **_arguments(x, out))
    return out


@pytest.fixture
def op() -> Iterator[Any]:
    """An op that Inductor lowers to the kernel."""
    with torch.library._scoped_library("attn_launch_test", "DEF") as library:
        library.define("scale(Tensor x) -> Tensor", tags=(torch.Tag.needs_exact_strides,))
        library.impl("scale", lambda x: x.new_empty(x.shape), "Meta")
        op = torch.ops.attn_launch_test.scale
        inductor._register(op.default, _scale, lambda *args, **kwargs: True)
        yield op


@offline
@pytest.mark.usefixtures("fake_target")
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_generates_the_kernel_with_its_table(op: Any, dynamic: bool) -> None:
    sources: list[str] = []

    def compile_nothing(self: Any, name: str, source: str, device_str: str = "") -> Any:
        sources.append(source)
        return mock.MagicMock()

    with mock.patch("torch._inductor.async_compile.AsyncCompile.triton", compile_nothing):
        torch.compile(lambda x: op(x), fullgraph=True, dynamic=dynamic)(torch.zeros(100, 3)[:, 0])
    (source,) = sources
    assert f"'SIZES': {SIZES!r}" in source
    assert "'n': 'i32'" in source
    assert "'SIZES': 'constexpr'" in source


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["eager", "compiled", "packaged"])
def test_a_kernel_with_a_table_runs(op: Any, how: str, tmp_path: Path) -> None:
    class Scale(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x)

    x = torch.randn(100, device="cuda")
    if how == "eager":
        result = _scale(x)
    elif how == "compiled":
        result = torch.compile(Scale(), fullgraph=True)(x)
    else:
        path = str(tmp_path / "scale.pt2")
        package = torch._inductor.aoti_compile_and_package(torch.export.export(Scale(), (x,)), package_path=path)
        (result,), _ = cpp_runner.run(package, [x], tmp_path)
    assert torch.equal(result.cpu(), -2 * x.cpu())
