"""`python -m ppcore`, the same as the command `ppcore`."""

import sys

from ppcore.cli import main

if __name__ == "__main__":
    sys.exit(main())
