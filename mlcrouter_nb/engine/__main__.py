"""`python -m mlcrouter_nb.engine MODEL`."""

import sys

from .program import main

if __name__ == "__main__":
    sys.exit(main())
