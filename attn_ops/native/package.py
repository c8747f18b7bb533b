"""Images in AOTInductor packages: which packages have them, and their place in the generated code and its link.

Inductor generates neither CUDA kernels nor launches with programmatic dependent launch. In a package for
CUDA, an op is therefore lowered to calls of ``attn::launch_image`` (:mod:`attn_ops.native.op`). Their C shim, the
launcher and the images are one object file that is linked into the package, which needs neither this library nor
Python.

This module holds the private PyTorch API of that. Where it is missing, a package has the general kernels.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from attn_ops.gpu import compute_capability
from attn_ops.native import images, op
from attn_ops.ops.size_guards import root_graph
from attn_ops.ops.unsupported import triton_installed

LOG = logging.getLogger(__name__)

Traced = TypeVar("Traced")

DEVICES = ("cuda",)
"""Device types of packages with images. Tests set it to ``("cpu",)``."""


def traced(graph: Any, device: torch.device | None, trace: Callable[[], Traced]) -> Traced:
    """``trace()`` of an op of ``graph`` on ``device``, with images in a package that can have those of its kernels."""
    collected = images_of(graph, device)
    if collected is None:
        return trace()
    earlier = dict(collected.images)
    try:
        with images.collect(collected):
            return trace()
    except images.NoImageError as error:
        LOG.info("the package has the general Triton kernels of an op, and no image of its kernel: %s", error)
        collected.images = earlier
        return trace()


def images_of(graph: Any, device: torch.device | None) -> images.ImageSet | None:
    """Where the package of ``graph``, an Inductor graph, collects the images of an op on ``device``; None: nowhere."""
    root = root_graph(graph)
    if not root.aot_mode or device is None or device.type not in DEVICES:
        return None
    sets: dict[torch.device, images.ImageSet | None] = vars(root).setdefault("attn_ops_images", {})
    if device not in sets:
        reason = unavailable_reason(root, device)
        if reason:
            LOG.info("the package has the general Triton kernels, and no images of compiled ones: %s", reason)
        sets[device] = None if reason else next(filter(None, sets.values()), None) or _install(root)
    return sets[device]


def unavailable_reason(graph: Any, device: torch.device) -> str:
    """Why a package of ``graph`` cannot have images for ``device``; empty if it can."""
    from torch._inductor import codecache, config
    from torch._inductor.cpp_builder import get_cpp_compiler

    settings = config.aot_inductor
    checks = [
        (hasattr(settings, "custom_ops_to_c_shims"), f"torch {torch.__version__} has no custom_ops_to_c_shims"),
        (hasattr(codecache.CUDACodeCache, "aot_kernels_o"), f"torch {torch.__version__} has no aot_kernels_o"),
        (hasattr(graph, "codegen_with_cpp_wrapper"), "its graph has no codegen_with_cpp_wrapper"),
        (not getattr(graph, "fx_wrapper", False), "its wrapper is not C++"),
        (not getattr(settings, "use_minimal_arrayref_interface", False), "its inputs are array references"),
        (not getattr(settings, "package_cpp_only", False), "package_cpp_only leaves the link to others"),
        (not getattr(settings, "emit_multi_arch_kernel", False), "emit_multi_arch_kernel asks for several GPUs"),
        (config.triton.autotune_at_compile_time or device.type != "cuda", "autotune_at_compile_time is off"),
    ]
    reasons = (reason for holds, reason in checks if not holds)
    return next(reasons, "") or triton_reason() or machine_reason(device, str(get_cpp_compiler()))


def triton_reason() -> str:
    """Why the kernels of the installed Triton cannot be images; empty if they can."""
    if not triton_installed():
        return "triton is not installed"
    try:
        import triton

        from attn_ops.kernels.triton.launch import DIRECT_LAUNCH
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    return "" if DIRECT_LAUNCH else f"the parameters of kernels of triton {triton.__version__} are not known"


def machine_reason(device: torch.device, compiler: str = "g++") -> str:
    """Why no package for ``device`` that is made here has images; empty if they can have them."""
    if torch.version.hip is not None:
        return "images are for CUDA, not HIP"
    capability = compute_capability(device)
    if device.type == "cuda" and (capability is None or capability < (9, 0)):
        found = "no GPU is visible" if capability is None else f"{device} has {capability[0]}.{capability[1]}"
        return f"images are for compute capability 9.0 and newer, and {found}"
    return "" if shutil.which(compiler) else f"the compiler {compiler} is not on the PATH"


def _install(graph: Any) -> images.ImageSet:
    """Generate the calls with the declaration of the shim, and give the object to the link that follows."""
    from torch._inductor import config

    collected = images.ImageSet()
    generate = graph.codegen_with_cpp_wrapper

    def generate_with_images() -> Any:
        if not collected.images:
            return generate()
        shims = {
            **config.aot_inductor.custom_ops_to_c_shims,
            op.launch_image: [op.declaration(device) for device in DEVICES],
        }
        with config.patch({"aot_inductor.custom_ops_to_c_shims": shims}):
            generated = generate()
        LOG.info("the package has images: %s", ", ".join(collected.images))
        _link(build_object(collected))
        return generated

    graph.codegen_with_cpp_wrapper = generate_with_images
    return collected


def build_object(collected: images.ImageSet) -> Path:
    """The object file with the shim and ``collected``, in Inductor's cache folder."""
    from torch._inductor.codecache import cache_dir
    from torch._inductor.cpp_builder import get_cpp_compiler

    options = [f"-isystem{Path(torch.__file__).parent / 'include'}"]
    options += ["-DATTN_OPS_CPU"] if DEVICES == ("cpu",) else []
    return collected.build(Path(cache_dir()) / "attn_ops", options, str(get_cpp_compiler()))


def _link(target: Path) -> None:
    """The next link of a package takes ``target``. One of a package that failed before its link is taken back."""
    from torch._inductor.codecache import CUDACodeCache

    objects = CUDACodeCache.aot_kernels_o
    objects[:] = [path for path in objects if not Path(path).name.startswith(images.OBJECT_PREFIX)]
    objects.append(str(target))
