"""``attn::launch_image``: the op that launches an image in a package. Nothing else calls it."""

from __future__ import annotations

from typing import Any

import torch
from torch.library import Library

from attn_ops.errors import BackendError

NAME = "launch_image"
SCHEMA = "(Tensor(a!)[] outs, Tensor[] ins, SymInt[] integers, float[] floats, str image) -> ()"


def declaration(device_type: str) -> str:
    """The C shim of the op, as code that Inductor generates calls it; ``package_shim.cpp`` defines it."""
    return (
        f"AOTITorchError aoti_torch_{device_type}_{NAME}("
        "const AtenTensorHandle* outs, int64_t num_outs, const AtenTensorHandle* ins, int64_t num_ins, "
        "const int64_t* integers, int64_t num_integers, const double* floats, int64_t num_floats, "
        "const char* image, void* none)"
    )


def _eager(*args: Any) -> None:
    raise BackendError(
        "launch_image: called from Python; expected a call in an AOTInductor package; call the attention op itself"
    )


LIBRARY = Library("attn", "FRAGMENT")
LIBRARY.define(NAME + SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
LIBRARY.impl(NAME, _eager, "CPU")
LIBRARY.impl(NAME, _eager, "CUDA")
torch.library.register_fake(f"attn::{NAME}", lambda *args: None, lib=LIBRARY)

launch_image = torch.ops.attn.launch_image.default
