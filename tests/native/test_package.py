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


def _inputs(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, 8, 128, dtype=BF16), torch.zeros(70, 2, 16, 2, 128, dtype=BF16)


@pytest.fixture
def images_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages for the CPU have images of the kernels for Hopper, and launch them by a fake driver."""
    monkeypatch.setattr(images, "LIBCUDA", str(FakeLibcuda(tmp_path).path))
    monkeypatch.setattr(package, "DEVICES", ("cpu",))
    choose = backends.choose

    def first_if_packaged(
        problem: Any, name: str = "auto", lowerable: bool = False, has_images: bool = False
    ) -> backends.Backend:
        found = [entry for entry in backends.BACKENDS if entry.has(problem.op)]
        return found[0] if has_images and problem.op == "batch_decode" else choose(problem, name, lowerable)

    monkeypatch.setattr(backends, "choose", first_if_packaged)


@pytest.mark.slow
@n.needs_a_compiler
@pytest.mark.usefixtures("images_on_the_cpu")
def test_a_package_launches_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
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
    assert objects == CUDACodeCache.aot_kernels_o
    assert not config.aot_inductor.custom_ops_to_c_shims

    log = tmp_path / "launches"
    monkeypatch.setenv("FAKE_LIBCUDA_LOG", str(log))
    for batch in (ROWS, 7):
        log.unlink(missing_ok=True)
        cpp_runner.run(path, [*_inputs(batch), *plan, planner.workspace], tmp_path)
        *lines, last, end = log.read_text().splitlines()
        assert (last, end) == ("unload", "unload")  # at the end of the process
        launches = [list(map(int, line.split())) for line in lines]
        decode, combine = launches[0], launches[1]
        assert launches == [decode, combine] * 2
        assert decode[:4] == [33 * 2, 1, 1, 128]
        assert (decode[5], combine[5]) == (1, 1)  # programmatic dependent launch

    moved = torch.zeros(70 * 2 * 16 * 2 * 128 + 8, dtype=BF16)[1:-7].view(70, 2, 16, 2, 128)
    log.unlink()
    message, _ = cpp_runner.refusal(path, [_inputs()[0], moved, *plan, planner.workspace], tmp_path)
    assert "the address of k_cache is" in message
    assert "expected a multiple of 16 bytes" in message
    assert not log.exists()


def _graph(**changes: Any) -> Any:
    """As much of an Inductor graph as decides whether a package has images."""
    defaults: dict[str, Any] = {"aot_mode": True, "codegen_with_cpp_wrapper": lambda: None}
    return types.SimpleNamespace(**(defaults | changes))


def test_a_package_for_cuda_has_images() -> None:
    with config.patch({"triton.autotune_at_compile_time": True}):
        graph = _graph()
        collected = package.images_of(graph, "cuda")
        assert isinstance(collected, images.ImageSet)
        assert package.images_of(graph, "cuda") is collected
        assert package.images_of(_graph(parent=graph), "cuda") is collected
    assert package.images_of(_graph(), "cpu") is None
    assert package.images_of(_graph(aot_mode=False), "cuda") is None


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
def test_a_package_without_images_logs_the_reason(
    settings: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not settings:
        monkeypatch.setattr(codecache, "CUDACodeCache", object)
    with config.patch({"triton.autotune_at_compile_time": True} | settings), caplog.at_level(logging.INFO):
        graph = _graph()
        assert package.images_of(graph, "cuda") is None
        assert package.images_of(graph, "cuda") is None
    assert [reason in record.message for record in caplog.records if record.name == package.__name__] == [True]


def test_another_release_of_triton_has_no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher passes the parameters in the order of the releases that it is written for."""
    pytest.importorskip("triton")
    monkeypatch.setattr("attn_ops.kernels.triton.launch.DIRECT_LAUNCH", False)
    with config.patch({"triton.autotune_at_compile_time": True}):
        assert package.unavailable_reason(_graph(), "cuda").startswith("the parameters of kernels of triton 3.")
        assert package.images_of(_graph(), "cuda") is None


def test_the_op_refuses_calls_from_python() -> None:
    with pytest.raises(attn_ops.errors.BackendError, match="call the attention op itself"):
        torch.ops.attn.launch_image([torch.zeros(1)], [], [1, 1, 1], [], "kernel")
