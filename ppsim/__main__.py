"""``python -m ppsim``."""

from __future__ import annotations

import gc
import os
import sys

from . import compiled


def main() -> int:
    """The ``ppsim`` command, on compiled modules where they are wanted.

    `rate`, which is about speed alone, wants them unless it is told otherwise, and makes them.
    """
    # A world is a few thousand objects in cycles: found by the handful they cost less than one by one.
    gc.set_threshold(10_000, 20, 20)
    said, asked = os.environ.get(compiled.WANTED, ""), sys.argv[1:2]
    wanted = said not in ("", "0")
    try:
        if asked == ["rate"] and said != "0":
            if not compiled.folder().is_dir():
                print("compiling the simulator: some minutes, once", file=sys.stderr)
            compiled.use(compiled.build())
        elif wanted and asked != ["compile"]:
            compiled.use()
    except compiled.Unbuilt as error:
        print(f"ppsim: {error}", file=sys.stderr)
        if wanted:
            return 2
    from .cli import main as command

    gc.freeze()  # what is imported stays
    return command()


if __name__ == "__main__":
    sys.exit(main())
