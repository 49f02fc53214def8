"""Times collectives between two processes over gloo, each process on one core.

python experiments/overhead/gloo_collectives.py [--elements=32768] [--turns=300]
"""

import argparse
import socket
import subprocess
import sys
import time


def worker(process: int, port: str, elements: int, turns: int) -> None:
    """Runs one of the two processes; the first one prints."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.P("data")
    x = jax.make_array_from_process_local_data(
        jax.sharding.NamedSharding(mesh, split), np.ones(elements, np.float32)
    )
    collectives = {
        "all-reduce": lambda x: lax.psum(x, "data") / 2,
        "all-gather": lambda x: lax.all_gather(x, "data", tiled=True)[: x.size],
        "reduce-scatter": lambda x: jnp.tile(lax.psum_scatter(x, "data", tiled=True), 2),
        "all-to-all": lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True),
        "all-to-all of copies, as a gather": lambda x: lax.all_to_all(
            jnp.tile(x, 2), "data", 0, 0, tiled=True
        )[: x.size],
        "permute": lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]),
    }
    for name, collective in collectives.items():

        def many(x, collective=collective):
            return lax.fori_loop(0, turns, lambda _, y: collective(y) + 1, x)

        mapped = jax.shard_map(many, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
        function = jax.jit(mapped).lower(x).compile()
        function(x).block_until_ready()
        start = time.perf_counter()
        function(x).block_until_ready()
        if process == 0:
            print(f"{name:34s} {(time.perf_counter() - start) / turns * 1e3:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=32768, help="float32, of each process")
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        worker(int(flags.worker[0]), flags.worker[1], flags.elements, flags.turns)
        return
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, *sys.argv, "--worker"]
    both = [
        subprocess.Popen(["taskset", "-c", process, *command, process, port]) for process in "01"
    ]
    sys.exit(max(process.wait() for process in both))


if __name__ == "__main__":
    main()
