"""python -m chapters."""

import sys

from chapters.cli import main

if __name__ == "__main__":
    sys.exit(main())
