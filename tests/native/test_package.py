"""Packages with images, on the CPU over a fake driver, and the reasons for packages without them."""

from __future__ import annotations

import logging
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cpp_runner, offline_compile
from helpers import native_launcher as n
from helpers.native_launcher import FakeLibcuda
from torch import Tensor, nn
from torch._inductor import codecache, config
from torch._inductor.codecache import CUDACodeCache

import attn_ops
from attn_ops.native import images, package
from attn_ops.ops import backends

BF16 = torch.bfloat16
GPU, SECOND, OLD_GPU = (torch.device("cuda", i) for i in range(3))
MAX_BATCH, ROWS = 8, 4


class Attend(nn.Module):
    """Two layers that append to views of one cache and attend."""

    def forward(self, q: Tensor, cache: Tensor, plan: attn_ops.DecodePlan, workspace: Tensor) -> Tensor:
        k, v = cache[:, 0], cache[:, 1]
        rows = torch.arange(q.shape[0], dtype=torch.int32)
        for _ in range(2):
            new = q[:, :2] + 1
            torch.ops.attn.append_kv(new, new, k, v, rows, plan.kv_len[: q.shape[0]], plan.kv_indices, plan.kv_indptr)
            q, _ = torch.ops.attn.batch_decode(q * 2, k, v, plan, workspace)
        return q


class Decode(nn.Module):
    """One layer."""

    def forward(self, q: Tensor, cache: Tensor, plan: attn_ops.DecodePlan, workspace: Tensor) -> Tensor:
        return torch.ops.attn.batch_decode(q, cache[:, 0], cache[:, 1], plan, workspace)[0]


def _inputs(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, 8, 128, dtype=BF16), torch.zeros(70, 2, 16, 2, 128, dtype=BF16)


@pytest.fixture
def of_backend() -> str:
    """The backend whose decode kernel packages launch."""
    return "triton"


@pytest.fixture
def images_on_the_cpu(of_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages for the CPU have images of the kernels for Hopper, and launch them by a fake driver."""
    monkeypatch.setattr(images, "LIBCUDA", str(FakeLibcuda(tmp_path).path))
    monkeypatch.setattr(package, "DEVICES", ("cpu",))
    choose = backends.choose

    def first_if_packaged(
        problem: Any, name: str = "auto", lowerable: bool = False, images: bool = False, traced: bool = False
    ) -> backends.Backend:
        found = [entry for entry in backends.BACKENDS if entry.has(problem.op) and entry.name == of_backend]
        return found[0] if images and problem.op == "batch_decode" else choose(problem, name, lowerable, False, traced)

    monkeypatch.setattr(backends, "choose", first_if_packaged)


@pytest.mark.slow
@n.needs_a_compiler
@pytest.mark.usefixtures("images_on_the_cpu")
@pytest.mark.parametrize(
    ("of_backend", "kernel", "launched", "moved_name"),
    [("triton", "decode_kernel", [33 * 2, 1, 1, 128], "k_cache"), ("cuda", "decode", [2, 33, 1, 288], "k")],
)
def test_a_package_launches_images(
    kernel: str,
    launched: list[int],
    moved_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("triton")
    caplog.set_level(logging.INFO, package.__name__)
    planner = attn_ops.DecodePlanner(
        MAX_BATCH, 64, page_size=16, num_qo_heads=8, num_kv_heads=2, head_dim=128, num_ctas=33
    )
    plan, fixed = planner.state, attn_ops.DecodePlan(*({} for _ in attn_ops.DecodePlan._fields))
    rows = torch.export.Dim("rows", min=1, max=MAX_BATCH)
    shapes = ({0: rows}, {}, fixed, {})
    objects = list(CUDACodeCache.aot_kernels_o)
    with offline_compile.compiling_for(90):
        program = torch.export.export(Attend(), (*_inputs(), plan, planner.workspace), dynamic_shapes=shapes)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attend.pt2"))
    (named,) = [record.message for record in caplog.records if record.name == package.__name__]
    assert named.startswith(f"the package has images: {kernel}_")
    assert ", combine_decode_kernel_" in named
    assert objects == CUDACodeCache.aot_kernels_o
    assert not config.aot_inductor.custom_ops_to_c_shims

    log = tmp_path / "launches"
    monkeypatch.setenv("FAKE_LIBCUDA_LOG", str(log))
    for batch in (ROWS, 7):
        log.unlink(missing_ok=True)
        cpp_runner.run(path, [*_inputs(batch), *plan, planner.workspace], tmp_path)
        *lines, last, end = log.read_text().splitlines()
        assert (last, end) == ("unload", "unload")  # at the end of the process
        launches = [list(map(int, line.split()))[:-1] for line in lines]  # the last: tensor maps encoded so far
        decode, combine = launches[0], launches[1]
        assert launches == [decode, combine] * 2
        assert decode[:4] == launched
        assert (decode[5], combine[5]) == (1, 1)  # programmatic dependent launch

    moved = torch.zeros(70 * 2 * 16 * 2 * 128 + 8, dtype=BF16)[1:-7].view(70, 2, 16, 2, 128)
    log.unlink()
    message, _ = cpp_runner.refusal(path, [_inputs()[0], moved, *plan, planner.workspace], tmp_path)
    assert f"the address of {moved_name} is" in message
    assert "expected a multiple of 16 bytes" in message
    assert not log.exists()


def _graph(**changes: Any) -> Any:
    """As much of an Inductor graph as decides whether a package has images."""
    defaults: dict[str, Any] = {"aot_mode": True, "codegen_with_cpp_wrapper": lambda: None}
    return types.SimpleNamespace(**(defaults | changes))


@pytest.mark.slow
@pytest.mark.usefixtures("images_on_the_cpu")
def test_kernels_of_unknown_parameters_are_general_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a Triton that passes them otherwise: the package computes what the reference does, without a driver."""
    pytest.importorskip("triton")
    monkeypatch.setattr("attn_ops.kernels.triton.image.parameter_layout", lambda compiled: None)
    monkeypatch.setattr(images, "LIBCUDA", "/nowhere/libcuda.so.1")
    planner = attn_ops.DecodePlanner(4, 8, page_size=16, num_qo_heads=8, num_kv_heads=2, head_dim=128, max_kv_len=64)
    table = torch.tensor([0, 1, 3]), torch.tensor([2, 5, 6]), torch.tensor([7, 3])
    planner.plan(*(t.int() for t in table))
    q, cache = torch.randn(2, 8, 128).to(BF16), torch.randn(8, 2, 16, 2, 128).to(BF16)
    inputs = (q, cache, planner.state, planner.workspace)
    with offline_compile.compiling_for(90), caplog.at_level(logging.INFO, package.__name__):
        program = torch.export.export(Decode(), inputs)
        path = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(tmp_path / "attend.pt2"),
            inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
        )
    outputs, _ = cpp_runner.run(path, [q, cache, *planner.state, planner.workspace], tmp_path)
    expected, _ = torch.ops.attn.batch_decode(q, *cache.unbind(1), *inputs[2:], backend="reference")
    torch.testing.assert_close(outputs[0], expected)
    messages = [record.message for record in caplog.records if record.name == package.__name__]
    assert [" compiles decode_kernel, it needs clusters" in message for message in messages] == [True]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of compute capability 9.0, and one of 8.6, the current one."""
    monkeypatch.setattr(package, "compute_capability", {GPU: (9, 0), SECOND: (9, 0), OLD_GPU: (8, 6)}.get)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=OLD_GPU: (9 if device != OLD_GPU else 8, 0))


@pytest.mark.usefixtures("gpus")
def test_a_package_for_cuda_has_images() -> None:
    with config.patch({"triton.autotune_at_compile_time": True}):
        graph = _graph()
        collected = package.images_of(graph, GPU)
        assert isinstance(collected, images.ImageSet)
        for device in (GPU, SECOND):
            assert package.images_of(graph, device) is collected
            assert package.images_of(_graph(parent=graph), device) is collected
    assert package.images_of(_graph(), torch.device("cpu")) is None
    assert package.images_of(_graph(), None) is None
    assert package.images_of(_graph(aot_mode=False), GPU) is None


@pytest.mark.usefixtures("gpus")
def test_images_are_for_the_device_of_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    """Whichever GPU is current."""
    with config.patch({"triton.autotune_at_compile_time": True}), caplog.at_level(logging.INFO):
        graph = _graph()
        assert package.images_of(graph, OLD_GPU) is None
        assert package.images_of(graph, GPU) is not None
        assert package.images_of(graph, torch.device("cuda", 3)) is None
    reasons = [record.message.rpartition(": ")[2] for record in caplog.records if record.name == package.__name__]
    needed = "images are for compute capability 9.0 and newer, and "
    assert reasons == [f"{needed}cuda:2 has 8.6", f"{needed}no GPU is visible"]


@pytest.mark.usefixtures("gpus")
def test_an_op_without_an_image_has_the_general_kernels(caplog: pytest.LogCaptureFixture) -> None:
    """The images of other ops stay."""
    kept, dropped = (types.SimpleNamespace(name=name) for name in ("kept", "dropped"))
    graph, collecting = _graph(), []

    def trace(image: Any, fails: bool) -> str:
        collected = images.collecting()
        collecting.append(collected is not None)
        if collected is None:
            return "general"
        collected.add(image)
        if fails:
            raise images.NoImageError("as triton 9.9 compiles some_kernel, it needs clusters")
        return "images"

    with config.patch({"triton.autotune_at_compile_time": True}), caplog.at_level(logging.INFO):
        results = [
            package.traced(graph, GPU, lambda x=x, f=f: trace(x, f)) for x, f in ((kept, False), (dropped, True))
        ]
        assert list(package.images_of(graph, GPU).images) == ["kept"]
    assert results == ["images", "general"]
    assert collecting == [True, True, False]
    assert "general Triton kernels of an op, and no image of its kernel: as triton 9.9 compiles some" in caplog.text


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"aot_inductor.package_cpp_only": True}, "package_cpp_only"),
        ({"aot_inductor.emit_multi_arch_kernel": True}, "emit_multi_arch_kernel"),
        ({"triton.autotune_at_compile_time": False}, "autotune_at_compile_time"),
        ({}, "aot_kernels_o"),
    ],
    ids=["sources", "several GPUs", "no autotuning", "missing private API"],
)
@pytest.mark.usefixtures("gpus")
def test_a_package_without_images_logs_the_reason(
    settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not settings:
        monkeypatch.setattr(codecache, "CUDACodeCache", object)
    with config.patch({"triton.autotune_at_compile_time": True} | settings), caplog.at_level(logging.INFO):
        graph = _graph()
        assert package.images_of(graph, GPU) is None
        assert package.images_of(graph, GPU) is None
    assert [reason in record.message for record in caplog.records if record.name == package.__name__] == [True]


def test_another_release_of_triton_has_no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher passes the parameters in the order of the releases that it is written for."""
    pytest.importorskip("triton")
    monkeypatch.setattr("attn_ops.kernels.triton.launch.DIRECT_LAUNCH", False)
    with config.patch({"triton.autotune_at_compile_time": True}):
        assert package.unavailable_reason(_graph(), GPU).startswith("the parameters of kernels of triton 3.")
        assert package.images_of(_graph(), GPU) is None


def test_the_op_refuses_calls_from_python() -> None:
    with pytest.raises(attn_ops.errors.BackendError, match="call the attention op itself"):
        torch.ops.attn.launch_image([torch.zeros(1)], [], [1, 1, 1], [], "kernel")
