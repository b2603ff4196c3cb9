"""The command as a module: ``python -m lightning_hetero``, also where no script is on the path, as under torchrun."""

import sys

from lightning_hetero.cli import main

if __name__ == "__main__":
    sys.exit(main())
