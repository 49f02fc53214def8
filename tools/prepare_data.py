"""Prepares a TFDS data set as ArrayRecord, so that runs can read it by index.

python tools/prepare_data.py cifar10 --data_dir=/data/tfds
"""

from __future__ import annotations

import argparse
import sys

from research_dp.data.builders import download_and_prepare, find_builder
from research_dp.errors import UsageError


def main() -> int:
    """Prepares the data set that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="TFDS name, e.g. cifar10, c4/en, digits")
    parser.add_argument("--data_dir", help="folder of the data sets; default: TFDS's")
    flags = parser.parse_args()
    try:
        builder = find_builder(flags.name, flags.data_dir)
        download_and_prepare(builder)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for split, info in builder.info.splits.items():
        print(f"{builder.name} {split}: {info.num_examples:,} examples in {builder.data_path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
