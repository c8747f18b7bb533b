"""The driver: ``python -m benchmarks decode --json results.json``."""

from __future__ import annotations

import argparse

from . import decode, overheads, prefill, sweep

COMMANDS = {"decode": decode, "prefill": prefill, "overheads": overheads, "sweep": sweep}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=module.__doc__))
    args = parser.parse_args()
    COMMANDS[args.command].run(args)


if __name__ == "__main__":
    main()
