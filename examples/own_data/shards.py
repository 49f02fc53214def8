"""Tar files of WebDataset as a source: samples by index, in any order, without a stream.

The files are read through once, to find where each sample is.
"""

import os
import tarfile


class Shards:
    """Samples of tar files: dicts of extension -> bytes, with their key as '__key__'.

    Files of a tar that have the same name up to its first dot are one sample, as in WebDataset.
    """

    def __init__(self, paths):
        samples = {}
        for path in paths:
            with tarfile.open(path) as tar:
                for member in filter(tarfile.TarInfo.isfile, tar):
                    folder, name = os.path.split(member.name)
                    stem, _, extension = name.partition(".")
                    parts = samples.setdefault((path, os.path.join(folder, stem)), {})
                    parts[extension] = member.offset_data, member.size
        self._samples = list(samples.items())

    def __len__(self):
        return len(self._samples)

    def __getitem__(self, index):
        (path, key), parts = self._samples[index]
        with open(path, "rb") as file:
            return {"__key__": key, **{name: _read(file, *at) for name, at in parts.items()}}


def _read(file, offset, size):
    file.seek(offset)
    return file.read(size)
