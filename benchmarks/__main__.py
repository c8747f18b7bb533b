"""The driver: ``python -m benchmarks decode``."""

from __future__ import annotations

import argparse

from . import decode, mla, model, overheads, plot, prefill, tune, warm, workload

COMMANDS = {
    "decode": decode,
    "prefill": prefill,
    "mla": mla,
    "overheads": overheads,
    "workload": workload,
    "model": model,
    "plot": plot,
    "warm": warm,
    "tune": tune,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=module.__doc__))
    args = parser.parse_args()
    COMMANDS[args.command].run(args)


if __name__ == "__main__":
    main()
