"""``python -m headrace``: the same as the command ``headrace``."""

import sys

from headrace.serving.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
