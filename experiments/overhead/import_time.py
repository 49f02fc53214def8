"""Compares `import research_dp` with importing the libraries that it uses, in pairs.

python experiments/overhead/import_time.py
"""

import statistics
import subprocess
import sys
import time

PAIRS = 15
LIBRARIES = "import jax, flax, optax, gin"


def seconds(code: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - started


def main() -> None:
    for code in (LIBRARIES, "import research_dp"):
        seconds(code)  # warms the disk cache
    ratios, ours = [], []
    for _ in range(PAIRS):
        base = seconds(LIBRARIES)
        ours.append(seconds("import research_dp"))
        ratios.append(ours[-1] / base)
    print(f"import research_dp: {statistics.median(ours):.2f} s, ", end="")
    print(f"{statistics.median(ratios):.2f} times the libraries (median of {PAIRS} pairs)")


if __name__ == "__main__":
    main()
