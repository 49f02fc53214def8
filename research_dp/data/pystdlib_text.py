"""TFDS builder of the Python standard library's source: real text without a download."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

_CHUNK = 1024
_SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "turtledemo"}


class PystdlibText(tfds.core.GeneratorBasedBuilder):
    """Bytes of the standard library's modules in chunks of up to 1,024, split by file.

    A tenth of the files, chosen by a hash of their path, are the test split, so that no file is in
    both. Tests and tools are left out. Each version of Python has its own text.
    """

    VERSION = tfds.core.Version(".".join(map(str, sys.version_info[:3])))

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict(
                {
                    "path": tfds.features.Text(),
                    "offset": tfds.features.Scalar(np.int64),
                    "text": tfds.features.Tensor(shape=(None,), dtype=np.uint8),
                }
            ),
            homepage="https://docs.python.org/3/library/",
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict]]]:
        del dl_manager  # nothing is downloaded
        return {
            "train": self._generate_examples(held_out=False),
            "test": self._generate_examples(held_out=True),
        }

    def _generate_examples(self, held_out: bool) -> Iterator[tuple[int, dict]]:
        root = Path(sysconfig.get_paths()["stdlib"])
        key = 0
        for file in sorted(root.rglob("*.py")):
            name = file.relative_to(root).as_posix()
            if _SKIPPED & set(Path(name).parts) or is_held_out(name) != held_out:
                continue
            data = np.frombuffer(file.read_bytes(), np.uint8)
            for offset in range(0, len(data), _CHUNK):
                text = data[offset : offset + _CHUNK]
                yield key, {"path": name, "offset": offset, "text": text}
                key += 1


def is_held_out(path: str) -> bool:
    """Whether a file, by its path below the library's folder, is in the test split."""
    return hashlib.sha256(path.encode()).digest()[0] < 26
