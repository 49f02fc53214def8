"""Where the repository is, and what it ships."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def relative(path):
    """A path in the repository, as text."""
    return str(path.relative_to(ROOT))


def stems():
    """Names of the shipped strategies."""
    return sorted(path.stem for path in (ROOT / "gin" / "strategies").glob("*.gin"))
