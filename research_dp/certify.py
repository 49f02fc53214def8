"""`python -m research_dp.certify`: whether a run's strategy computes what an oracle computes.

Runs your own configuration, step by step, under its strategy and under `--against`. Prints a
certificate, or the first difference that rounding does not explain, and its cause. With `--quick`
it certifies a strategy's gin file alone, on a small built-in run, in Linen and in NNX, within fixed
tolerances. See docs/certify.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status: 0 certified, 1 not, 2 a mistake."""
    from research_dp.commands import exit_status, flags, processes, runtime
    from research_dp.config import load
    from research_dp.console import put

    def body(session: exit_status.Session) -> int:
        options = flags.parse_certify(argv, __doc__ or "")
        if options.quick:
            bindings = ["shard_params.min_weight_size = 64", *options.bindings]
            config = load.load(options.gin_files, bindings, imports=options.imports)
            session.config = config
        else:
            config = session.load(options)
        flags.check_writable("--json", options.json_file)
        runtime.quieten_tensorflow()
        if not options.quick:
            processes.set_up_processes(options.processes)
        runtime.set_up_devices(options.cpu_devices)
        runtime.set_up_compilation_cache()
        from research_dp.commands import certify

        if options.quick:
            certificate = certify.certify_quick()
        else:
            certificate = certify.certify_run(config, options.against, options.steps)
        if options.json_file:
            Path(options.json_file).write_text(json.dumps(certificate.as_json(), indent=1))
        put(*certificate.parts())
        return 0 if certificate.certified else 1

    return exit_status.run_command(body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
