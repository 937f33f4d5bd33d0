"""`python -m mlcrouter_nb.cli`, the same as `mlcrouter-nb`."""

import sys

from . import main

sys.exit(main())
