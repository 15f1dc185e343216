"""`python -m stof_tvm` is `stof`."""

import sys

from stof_tvm.cli import main

if __name__ == "__main__":
    sys.exit(main())
