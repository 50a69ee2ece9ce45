"""`python -m marginax` is the command `marginax`."""

import sys

from marginax.cli import main

if __name__ == "__main__":
    sys.exit(main())
