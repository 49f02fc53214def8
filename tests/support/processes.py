"""One run in several processes, and a fault in one of them."""

from tests.support.programs import free_port
from tests.support.runs import MLP

RUN = [*MLP, "--gin.train.log_every=5"]


def start(command, count, *flags, run=RUN, **extra):
    """Starts one command in several processes."""
    address = f"localhost:{free_port()}"
    return [
        command(
            *run,
            *flags,
            start_only=True,
            JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES=str(count),
            JAX_PROCESS_ID=str(process),
            **extra,
        )
        for process in range(count)
    ]


FAULTY = [
    "--import=tests.support.faults",
    "--gin.train.data=@faulty()",
    "--gin.faulty.data=@tfds_data()",
    "--gin.faulty.step=8",
    "--gin.faulty.process=1",
]


def launch(command, tmp_path, *flags, **options):
    return command(
        "--num_processes=2",
        "--",
        *RUN,
        *flags,
        f"--workdir={tmp_path}",
        module="research_dp.launch",
        **options,
    )
