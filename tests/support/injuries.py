"""Random injuries of a run's files and folders, as people, disks and other programs do them."""

import os
import re
import shutil


def _truncate(path, chance, outside):
    path.write_bytes(path.read_bytes()[: chance.randrange(max(path.stat().st_size, 1))])


def _empty(path, chance, outside):
    path.write_bytes(b"")


def _bad_bytes(path, chance, outside):
    content = bytearray(path.read_bytes())
    for _ in range(min(chance.randint(1, 8), len(content))):
        content[chance.randrange(len(content))] = 255
    path.write_bytes(content)


def _flip(path, chance, outside):
    content = bytearray(path.read_bytes())
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def _append(path, chance, outside):
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.randint(1, 200)))


def _swap(path, chance, outside):
    run = next(parent for parent in path.parents if (parent / "mine").is_file())
    other = chance.choice([p for p in sorted(run.rglob("*")) if _is_file(p) and _is_the_runs(p)])
    a, b = path.read_bytes(), other.read_bytes()
    path.write_bytes(b)
    other.write_bytes(a)


def _delete(path, chance, outside):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _move(path, chance, outside):
    path.rename(outside / "moved" / f"{path.name}{chance.random()}")


def _forbid(path, chance, outside):
    path.chmod(0)


def _replaced(make):
    def injure(path, chance, outside):
        _delete(path, chance, outside)
        make(path, outside)

    return injure


# By name: functions of a path, a `random.Random` and a folder outside the run's.
OF_FILES = {
    "truncated": _truncate,
    "emptied": _empty,
    "bad bytes": _bad_bytes,
    "bit flipped": _flip,
    "garbage appended": _append,
    "swapped with another": _swap,
}
OF_ALL = {
    "deleted": _delete,
    "moved away": _move,
    "permissions removed": _forbid,
    "a folder instead": _replaced(lambda path, outside: path.mkdir()),
    "a file instead": _replaced(lambda path, outside: path.write_text("no folder")),
    "a FIFO instead": _replaced(lambda path, outside: os.mkfifo(path)),
    "a dangling link": _replaced(lambda path, outside: path.symlink_to(outside / "nothing")),
    "a link to itself": _replaced(lambda path, outside: path.symlink_to(path)),
    "a link to an outside file": _replaced(
        lambda path, outside: path.symlink_to(outside / "precious.txt")
    ),
}

_NAMED = (
    (r"events\.out\..*", "TensorBoard's events"),
    (r"process_\d+\.txt", "flight notes"),
    (r"[0-9a-f]{32}", "arrays"),
    (r"process_0", "array metadata"),
    (r"\d+", "a checkpoint's folder"),
)


def kind_of(path):
    """What a file or folder is called in counts."""
    named = (kind for pattern, kind in _NAMED if re.fullmatch(pattern, path.name))
    return next(named, path.name)


def injure(folder, outside, chance):
    """Injures one file or folder of a run.

    Kinds of files are as likely as each other, and so are injuries.

    Args:
        folder: Folder of the run, with a file `mine` in it; such names are left alone.
        outside: A folder outside it, with `precious.txt` and a folder `moved`.
        chance: A `random.Random`.

    Returns:
        Kind of file, and name of the injury.
    """
    kinds = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink() and (path.is_file() or path.is_dir()) and _is_the_runs(path):
            kinds.setdefault(kind_of(path), []).append(path)
    kind = chance.choice(sorted(kinds))
    path = chance.choice(kinds[kind])
    possible = OF_ALL if path.is_dir() else {**OF_FILES, **OF_ALL}
    name = chance.choice(sorted(possible))
    possible[name](path, chance, outside)
    return kind, name


def _is_file(path):
    return path.is_file() and not path.is_symlink()


def _is_the_runs(path):
    return not path.name.startswith("mine")
