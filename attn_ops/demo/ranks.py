"""The demo with tensor parallelism: a process per rank, and the model with its heads divided over them.

The model's attention and steps are those of one process. ``parallelize_module`` shards the projections, so that each
rank attends with its own heads, and all-reduces what the row-wise ones return.
"""

from __future__ import annotations

import copy
import gc
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from attn_ops.demo.errors import DemoError
from attn_ops.demo.model import LanguageModel
from attn_ops.demo.run import run
from attn_ops.demo.session import Options
from attn_ops.errors import AttnOpsError

COLUMN_WISE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROW_WISE = ("self_attn.o_proj", "mlp.down_proj")
"""The linear layers of a decoder layer, by what is divided over the ranks: outputs or inputs."""


def shard_model(model: LanguageModel, mesh: DeviceMesh) -> LanguageModel:
    """A copy of ``model`` whose layers are divided over the ranks of ``mesh``."""
    styles: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in COLUMN_WISE}
    styles |= {f"model.layers.*.{name}": RowwiseParallel() for name in ROW_WISE}
    sharded: Any = parallelize_module(copy.deepcopy(model), mesh, styles)
    for weight in sharded.parameters():
        weight.requires_grad_(False)
    return sharded


def run_ranks(options: Options) -> int:
    """:func:`~attn_ops.demo.run.run` on ``options.ranks`` processes.

    Raises:
        DemoError: the run could not start.
    """
    errors = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="attn_ops_demo_") as folder:
        try:
            multiprocessing.spawn(_rank, (options, str(Path(folder) / "store"), errors), nprocs=options.ranks)
        except multiprocessing.ProcessExitedException as error:
            if not errors.empty():
                raise DemoError(errors.get()) from error
            return error.exit_code
    return 0


def _rank(rank: int, options: Options, store: str, errors: Any) -> None:
    """One process. Its exit status is that of the run, 2 if it could not start."""
    on_gpu = options.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
        options = replace(options, device=torch.device("cuda", rank))
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(store, options.ranks),
        rank=rank,
        world_size=options.ranks,
    )
    try:
        status = run(options, init_device_mesh(options.device.type, (options.ranks,), mesh_dim_names=("tp",)))
    except (DemoError, AttnOpsError) as error:
        errors.put(str(error))
        sys.exit(2)
    if on_gpu:
        _free_cuda_graphs()
    dist.destroy_process_group()
    if status:
        sys.exit(status)


def _free_cuda_graphs() -> None:
    """Free the CUDA graphs of compiled steps. NCCL destroys no communicator while a graph has collectives of it."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.synchronize()
