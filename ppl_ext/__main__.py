"""`python -m ppl_ext`."""

import sys

from ppl_ext.cli import main

sys.exit(main())
