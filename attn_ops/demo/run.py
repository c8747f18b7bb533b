"""One run of the demo: the session, its report on stdout, and the exit status."""

from __future__ import annotations

import sys

import torch
from torch.distributed.device_mesh import DeviceMesh

from attn_ops.demo.errors import DemoError, first_line
from attn_ops.demo.progress import Progress
from attn_ops.demo.session import STAGES, STAGES_ON_RANKS, Options, Session


def run(options: Options, mesh: DeviceMesh | None = None) -> int:
    """Returns 0 if every check passed, 1 if one failed or could not run. The first rank of ``mesh`` reports.

    Raises:
        DemoError: the run could not start.
    """
    first = mesh is None or mesh.get_rank() == 0
    try:
        progress = Progress(STAGES if mesh is None else STAGES_ON_RANKS, silent=not first)
        try:
            session = Session(options, progress, mesh)
            report = session.run()
        finally:
            progress.close()
    except (torch.OutOfMemoryError, MemoryError) as error:
        what = f"out of memory ({first_line(error)})"
        raise DemoError(f"{what}; use a smaller model, --batch or --max-new-tokens") from error
    failures = report.failures()
    if first:
        print(report.render())
        for text in session.completions(3):
            print(f"\n{text}")
        for failure in failures:
            print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0
