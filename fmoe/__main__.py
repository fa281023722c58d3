"""``python -m fmoe``: the same as the console command ``fmoe``."""

import sys

from fmoe.cli import main

sys.exit(main())
