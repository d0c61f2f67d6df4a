r"""``attention-dynamics list | run | show | bound | verify``: the book's sweeps from a shell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from attention_dynamics.commands import bound, results, sweeps, verification
from attention_dynamics.running import CellFailed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0: done; 1: a cell failed, or ``verify`` found a result that is not as published; 2: a request
    that cannot be met, after a message; 130: stopped by Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except (ValueError, OSError, ImportError) as error:
        print(f"attention-dynamics: {error}", file=sys.stderr)
        return 2
    except CellFailed as error:
        print(f"attention-dynamics: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; finished cells are kept, the same command resumes", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attention-dynamics", description="Run, show and verify the experiments of the book."
    )
    commands = parser.add_subparsers(required=True)
    for module in (sweeps, results, bound, verification):
        module.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
