"""A checkpoint with the names, shapes and file sizes of a whole model, almost entirely sparse, for rehearsals.

    python -m lab.sparse_checkpoint --folder /scratch/sparse [--shape kimi-k2.6] [--layers 0 30 60]

The listed layers have random weights; of Kimi K2.6 they take 1.2 GB of disk space (a dense one) and 9.9 GB each.
`redline verify` computes them, and reports every other tensor as empty.
"""

import argparse
from pathlib import Path

from lab.program import program
from redline.errors import ConfigError
from redline.model.k2.shapes import shape
from redline.model.k2.write import sparse_checkpoint


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="a new one")
    parser.add_argument("--shape", default="kimi-k2.6")
    parser.add_argument("--layers", type=int, nargs="*", default=(0, 30, 60))
    options = parser.parse_args()
    if options.folder.exists() and any(options.folder.iterdir()):
        raise ConfigError(f"--folder {options.folder}: is not empty")
    sparse_checkpoint(options.folder, shape(options.shape), options.layers)


if __name__ == "__main__":
    program(main, heard=False)
