"""`python -m mhc_compile`: see `mhc_compile.command_line`."""

from __future__ import annotations

import sys

from mhc_compile.command_line import main

if __name__ == "__main__":
    sys.exit(main())
