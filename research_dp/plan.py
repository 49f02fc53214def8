"""`python -m research_dp.plan`: what strategies cost on devices that need not be there.

Each strategy's training step is compiled for the devices that --topology names, and the program is
read: bytes, FLOPs and counts are exact, times are predicted from vendors' rates.
"""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status: 1 if something is above the budget."""
    import jax

    from research_dp.commands import exit_status, flags, plan, runtime

    def body(session: exit_status.Session) -> int:
        options, plan_options = flags.parse_plan(argv, __doc__ or "")
        runtime.quieten_tensorflow()
        # A program from a cache has no compile time, and not every kind of device can have one.
        jax.config.update("jax_enable_compilation_cache", False)
        return plan.plan(options, plan_options)

    return exit_status.run_command(body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
