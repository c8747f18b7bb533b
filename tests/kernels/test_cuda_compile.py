"""From sources to cubins: compilers, the cache on disk, prebuilt kernels, and what a failure becomes."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cuda_kernels import needs_nvrtc

from attn_ops.eager.bounded_cache import BoundedCache
from attn_ops.errors import BackendError
from attn_ops.kernels.cuda import build, disk_cache, nvrtc, prebuilt
from attn_ops.kernels.cuda import compile as compile_module
from attn_ops.kernels.cuda.compile import CompilerError, cubin_of, key_of, unavailable_reason
from attn_ops.kernels.cuda.kernel import Kernel, Specialization
from attn_ops.ops import backends, cuda_kernels, unsupported

SOURCE = """#include "constants.cuh"
extern "C" __global__ void add_kernel(float* out, int n) { if (threadIdx.x < n) out[threadIdx.x] += ADDED; }
"""
HEADER = "#pragma once\nconstexpr float ADDED = 3.0f + STEP;\n"
KEY = "ab" * 32


def _specialization(**macros: int) -> Specialization:
    kernel = Kernel("add.cu", "add_kernel", {"out": "pointer", "n": "i32"}, writes=("out",))
    return Specialization(kernel, {"STEP": 1, **macros}, threads=32)


ADD = _specialization()

find_compiler = compile_module.compiler


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of sources of its own, an empty cache, and nothing compiled or prebuilt."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "add.cu").write_text(SOURCE)
    (sources / "constants.cuh").write_text(HEADER)
    monkeypatch.setattr(compile_module, "FOLDER", sources)
    monkeypatch.setattr(compile_module, "_compiled", BoundedCache(compile_module.MAX_COMPILED))
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "cache"))
    prebuilt.manifest.cache_clear()
    find_compiler.cache_clear()
    yield sources
    prebuilt.manifest.cache_clear()
    find_compiler.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A compiler that tells what it compiles, in the place of the real one."""
    calls: list[str] = []

    def compile_source(one: Specialization) -> bytes:
        calls.append(one.name)
        return f"cubin of {one.name}".encode()

    monkeypatch.setattr(compile_module, "compiler", lambda: ("some compiler 1.0", compile_source))
    return calls


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(compile_module, "_compiled", BoundedCache(compile_module.MAX_COMPILED))
    prebuilt.manifest.cache_clear()


# ---- Compilers ------------------------------------------------------------------------------------------------------


@needs_nvrtc
def test_nvrtc_compiles_without_a_gpu() -> None:
    name, compile_source = compile_module.compiler()
    assert name.startswith("nvrtc ")
    assert compile_source is not None
    cubin = compile_source(ADD)
    assert cubin.startswith(b"\x7fELF")
    assert b"add_kernel" in cubin
    assert cubin == cubin_of(ADD)
    assert compile_source(_specialization(STEP=2)) != cubin


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on the PATH")
def test_without_nvrtc_nvcc_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "find", lambda: (None, "removed by the test"))
    name, _ = compile_module.compiler()
    assert name.startswith("nvcc ")
    assert b"add_kernel" in cubin_of(ADD)


def test_without_a_compiler_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "find", lambda: (None, "removed by the test"))
    monkeypatch.setenv("PATH", "")
    expected = "there is no nvrtc (removed by the test) and no nvcc on the PATH"
    assert expected in unavailable_reason(ADD)


def test_an_nvcc_that_does_not_run_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvrtc, "find", lambda: (None, "removed by the test"))
    tool = tmp_path / "nvcc"
    tool.write_text("#!/bin/sh\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "nvcc does not run" in unavailable_reason(ADD)


@pytest.mark.parametrize(
    ("cuda", "expected"),
    [("13.0", ["x/libnvrtc.so.13", "x/libnvrtc.so.12"]), ("12.8", ["x/libnvrtc.so.12"])],
)
def test_the_compiler_is_no_newer_than_the_cuda_of_torch(
    cuda: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver may not load what a newer one compiles."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(nvrtc, "_in_packages", lambda: iter([Path("x/libnvrtc.so.12"), Path("x/libnvrtc.so.13")]))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    found = [path for path in nvrtc.candidates() if "/" in path]
    assert found == expected


def test_a_broken_library_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "libnvrtc.so.13"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(nvrtc, "candidates", lambda: [str(broken)])
    found, reason = nvrtc._find.__wrapped__()
    assert found is None
    assert str(broken) in reason


# ---- Failures -------------------------------------------------------------------------------------------------------


@needs_nvrtc
def test_a_program_that_does_not_compile_is_a_reason(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "add.cu").write_text(SOURCE.replace("float* out", "flaot* out"))
    with caplog.at_level(logging.WARNING, "attn_ops"):
        reasons = [unavailable_reason(ADD), unavailable_reason(ADD)]
    assert reasons[0] == reasons[1]
    assert reasons[0].startswith("the CUDA kernel cannot be compiled: add.cu(2): error: ")
    assert reasons[0].endswith("the log has the compiler's message")
    assert [record.getMessage().splitlines()[0] for record in caplog.records] == [
        "add_kernel STEP=1 does not compile, and other kernels run in its place:"
    ]
    with pytest.raises(CompilerError, match="flaot"):
        cubin_of(ADD)


def test_a_missing_source_is_a_reason(folder: Path) -> None:
    (folder / "add.cu").unlink()
    assert "the CUDA kernel cannot be compiled" in unavailable_reason(ADD)


@pytest.mark.parametrize("op", cuda_kernels.CUDA_MERGES)
def test_another_kernel_runs_in_the_place_of_one_that_does_not_compile(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No compiler error reaches a caller: ``auto`` runs the next entry, and ``backend="cuda"`` gives the reason."""

    def compiler() -> Any:
        def compile_source(one: Specialization) -> bytes:
            raise CompilerError("something.cu(1): error: nothing compiles")

        return "some compiler", compile_source

    monkeypatch.setattr(compile_module, "FOLDER", Path(compile_module.__file__).parent)
    monkeypatch.setattr(compile_module, "compiler", compiler)
    monkeypatch.setattr(unsupported, "compute_capability", lambda device: (9, 0))
    problem = backends.Problem(op, torch.device("cuda", 0), torch.bfloat16, torch.bfloat16, head_dim_vo=128)
    chosen = backends.choose.__wrapped__(problem)
    assert chosen.name != "cuda"
    with pytest.raises(BackendError, match=r"cuda.merge_states: the CUDA kernel cannot be compiled: something.cu\(1\)"):
        backends.choose.__wrapped__(problem, "cuda")
    assert "cuda.merge_states: the CUDA kernel cannot be compiled" in backends.explain(problem)


# ---- The cache in memory and on disk --------------------------------------------------------------------------------


def test_a_kernel_is_compiled_once(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cubins = {cubin_of(ADD) for _ in range(3)}
    _forget(monkeypatch)
    cubins.add(cubin_of(ADD))
    assert (cubins, compiled) == ({b"cubin of add_kernel STEP=1"}, ["add_kernel STEP=1"])


def _update_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    _, compile_source = compile_module.compiler()
    monkeypatch.setattr(compile_module, "compiler", lambda: ("some compiler 1.1", compile_source))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder, patch: (folder / "add.cu").write_text(SOURCE + "// changed"),
        lambda folder, patch: (folder / "constants.cuh").write_text(HEADER + "// changed"),
        lambda folder, patch: (folder / "new.cuh").write_text("// new"),
        lambda folder, patch: patch.setattr(compile_module, "OPTIONS", (*compile_module.OPTIONS, "-lineinfo")),
        lambda folder, patch: _update_compiler(patch),
    ],
    ids=["source", "header", "new header", "options", "compiler"],
)
def test_whatever_changes_the_cubin_compiles_again(
    change: Any, folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cubin_of(ADD)
    change(folder, monkeypatch)
    _forget(monkeypatch)
    cubin_of(ADD)
    assert len(compiled) == 2


def test_the_kernels_in_memory_are_bounded(compiled: list[str]) -> None:
    compile_module._compiled.limit = 2
    for i in range(5):
        cubin_of(_specialization(STEP=i))
        assert len(compile_module._compiled) <= 2
    assert cubin_of(_specialization(STEP=0)) == b"cubin of add_kernel STEP=0"
    assert len(compiled) == 5


def _folder() -> Path:
    path = disk_cache.folder()
    assert path is not None
    return path


def _kept() -> Path:
    (path,) = _folder().iterdir()
    return path


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        lambda path: path.write_bytes(b"\x7fELF another program"),
        lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["empty", "cut off", "longer", "foreign", "one bit", "a folder"],
)
def test_a_damaged_file_is_compiled_again(
    damage: Any, compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cubin = cubin_of(ADD)
    damage(_kept())
    _forget(monkeypatch)
    assert cubin_of(ADD) == cubin
    assert len(compiled) == 2


def test_a_file_of_another_kernel_is_not_loaded(tmp_path: Path) -> None:
    disk_cache.store(KEY, b"cubin")
    other = "cd" * 32
    os.rename(_kept(), _folder() / f"{other}.cubin")
    assert disk_cache.load(other) is None


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_is_not_another_kernel(link: Any, tmp_path: Path) -> None:
    disk_cache.store(KEY, b"cubin")
    other = "cd" * 32
    link(_kept(), _folder() / f"{other}.cubin")
    assert disk_cache.load(other) is None
    assert disk_cache.load(KEY) == b"cubin"


def test_the_folder_is_private(tmp_path: Path) -> None:
    folder = disk_cache.folder()
    disk_cache.store(KEY, b"cubin")
    assert (folder.stat().st_mode & 0o777, _kept().stat().st_mode & 0o777) == (0o700, 0o600)
    folder.chmod(0o777)
    assert disk_cache.load(KEY) == b"cubin"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_files_and_folders_of_other_users_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_cache.store(KEY, b"cubin")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert disk_cache.load(KEY) is None
        disk_cache.store("cd" * 32, b"other")
        assert "belongs to user" in disk_cache.unusable_reason()
    assert disk_cache.load("cd" * 32) is None
    assert disk_cache.load(KEY) == b"cubin"
    status = os.fstat

    def of_another_user(descriptor: int) -> Any:
        found = status(descriptor)
        fields = list(found)
        if not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            fields[4] += 1
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", of_another_user)
    assert disk_cache.load(KEY) is None


def test_a_folder_that_is_a_link_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    _folder().parent.mkdir(parents=True)
    _folder().symlink_to(tmp_path / "elsewhere")
    disk_cache.store(KEY, b"cubin")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert disk_cache.unusable_reason()


def test_a_folder_that_cannot_be_made_keeps_nothing(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(disk_cache.VARIABLE, str(tmp_path / "file"))
    assert cubin_of(ADD) == b"cubin of add_kernel STEP=1"
    assert disk_cache.unusable_reason()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ATTN_OPS_CACHE_DIR": "/a"}, "/a/attn_ops/cuda"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/attn_ops/cuda"),
        ({"HOME": "/c"}, "/c/.cache/attn_ops/cuda"),
    ],
)
def test_where_the_cache_is(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATTN_OPS_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(disk_cache.folder()) == expected


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("ATTN_OPS_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    disk_cache.store(KEY, b"cubin")
    assert (disk_cache.load(KEY), disk_cache.unusable_reason()) == (None, "the user has no home folder")


def test_the_files_are_bounded_and_the_unused_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "MAX_FILES", 3)
    keys = [f"{i:02x}" * 32 for i in range(5)]
    for i, key in enumerate(keys[:3]):
        disk_cache.store(key, b"cubin")
        os.utime(_folder() / f"{key}.cubin", (i, i))
    (_folder() / "notes.txt").touch()
    os.utime(_folder() / "notes.txt", (0, 0))
    assert disk_cache.load(keys[0]) == b"cubin"
    for key in keys[3:]:
        disk_cache.store(key, b"cubin")
    assert [disk_cache.load(key) is not None for key in keys] == [True, False, False, True, True]
    assert (_folder() / "notes.txt").exists()  # not one of ours


def test_the_folder_has_room_for_every_kernel_of_two_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise versions that take turns would remove each kernel before its next use."""
    monkeypatch.undo()
    assert 2 * len({key_of(one) for one in build.specializations()}) < disk_cache.MAX_FILES


WRITER = """
import sys
import attn_ops
from attn_ops.kernels.cuda import disk_cache
for i in range(60):
    disk_cache.store(sys.argv[1], b"c" * 100_000)
    assert disk_cache.load(sys.argv[1]) == b"c" * 100_000
"""


def test_processes_share_the_folder(tmp_path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", WRITER, KEY], env=os.environ) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    assert _kept().name == f"{KEY}.cubin"  # and nothing partial


def test_threads_compile_a_kernel_once(compiled: list[str]) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as executor:
        assert len(set(executor.map(cubin_of, [ADD] * 32))) == 1
    assert len(compiled) == 1


# ---- Prebuilt -------------------------------------------------------------------------------------------------------


@needs_nvrtc
def test_prebuilt_kernels_are_of_these_sources(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shipped is what the sources compile to, and is used without a compiler; changed sources are compiled."""
    assert build.build(prebuilt.FOLDER, [ADD, _specialization(STEP=2), ADD]) == 2
    expected = cubin_of(_specialization(STEP=3)), compile_module.compiler()[1](ADD)  # type: ignore[misc]
    _forget(monkeypatch)
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(compile_module, "compiler", lambda: ("there is none", None))
    assert cubin_of(ADD) == expected[1]
    assert "there is none" in unavailable_reason(_specialization(STEP=3))
    (folder / "constants.cuh").write_text(HEADER + "// changed")
    _forget(monkeypatch)
    assert "there is none" in unavailable_reason(ADD)


def _prebuild(cuda: tuple[int, int] = (12, 8)) -> None:
    prebuilt.write(prebuilt.FOLDER, cuda, {key_of(ADD): ("add", b"prebuilt")})


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder, key: (folder / f"{key}.cubin").write_bytes(b"prebuild"),
        lambda folder, key: (folder / f"{key}.cubin").unlink(),
        lambda folder, key: (folder / "manifest.json").write_text("{"),
        lambda folder, key: (folder / "manifest.json").write_text("[]"),
        lambda folder, key: (folder / "manifest.json").write_text('{"cuda": 12, "images": {}}'),
        lambda folder, key: (folder / "manifest.json").unlink(),
    ],
    ids=["changed", "missing", "no JSON", "a list", "other fields", "no manifest"],
)
def test_a_damaged_wheel_compiles(damage: Any, compiled: list[str]) -> None:
    _prebuild()
    damage(prebuilt.FOLDER, key_of(ADD))
    assert cubin_of(ADD) == b"cubin of add_kernel STEP=1"


@pytest.mark.parametrize(("cuda", "used"), [("12.8", False), ("13.0", True), (None, True)])
def test_prebuilt_kernels_are_no_newer_than_the_driver(
    cuda: str | None, used: bool, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _prebuild((13, 0))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert cubin_of(ADD) == (b"prebuilt" if used else b"cubin of add_kernel STEP=1")
    assert len(compiled) == (not used)


def test_what_is_left_of_an_earlier_build_is_removed() -> None:
    _prebuild()
    old = prebuilt.FOLDER / f"{KEY}.cubin"
    old.write_bytes(b"old")
    _prebuild()
    assert not old.exists()
    rows = json.loads((prebuilt.FOLDER / "manifest.json").read_text())["images"]
    assert {key: row["sha256"] for key, row in rows.items()} == {key_of(ADD): hashlib.sha256(b"prebuilt").hexdigest()}


def test_the_shipped_kernels_are_of_these_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of the wheel that runs the tests afterwards finds kernels of other sources, and missing ones."""
    monkeypatch.undo()
    prebuilt.manifest.cache_clear()
    rows = prebuilt.manifest(prebuilt.FOLDER).get("images", {})
    if not rows:
        pytest.skip("nothing is prebuilt here")
    keys = {key_of(one) for one in build.specializations()}
    assert rows.keys() == keys
    assert all(prebuilt.load(key) for key in keys)


def test_every_kernel_is_built() -> None:
    """A module with kernels is in ``build.MODULES``, and a source has a kernel."""
    folder = Path(compile_module.__file__).parent
    modules = {path.stem for path in folder.glob("*.py") if "SPECIALIZATIONS" in path.read_text(encoding="utf-8")}
    assert modules - {"build"} == set(build.MODULES)
    assert {one.kernel.source for one in build.specializations()} == {path.name for path in folder.glob("*.cu")}
    names = [one.name for one in build.specializations()]
    assert len(names) == len(set(names))
