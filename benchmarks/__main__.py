"""The command ``python -m benchmarks``, such as ``python -m benchmarks decode``."""

from __future__ import annotations

import argparse
import signal

from benchmarks import (
    clocks,
    context,
    cpu,
    decode,
    generate,
    heads,
    mla,
    model,
    overheads,
    packages,
    plot,
    prefill,
    scaling,
    small_ops,
    sparse,
    tune,
    warm,
    workload,
)
from benchmarks.comparison import end

COMMANDS = {
    "clocks": clocks,
    "cpu": cpu,
    "decode": decode,
    "prefill": prefill,
    "mla": mla,
    "sparse": sparse,
    "small_ops": small_ops,
    "context": context,
    "heads": heads,
    "scaling": scaling,
    "overheads": overheads,
    "packages": packages,
    "workload": workload,
    "model": model,
    "generate": generate,
    "plot": plot,
    "warm": warm,
    "tune": tune,
}


def main() -> None:
    """Run the benchmark that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of attn_ops and its peers.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, end)
    COMMANDS[args.command].run(args)


if __name__ == "__main__":
    main()
