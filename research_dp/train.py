"""`python -m research_dp.train`: trains what the gin files say. See README.md."""

from __future__ import annotations

import faulthandler
import sys
import traceback


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    from research_dp.config import command_line, environment, gin_config, show
    from research_dp.distributed.errors import RunFailure

    options = command_line.parse(argv, __doc__ or "")
    config = None
    try:
        if options.list is not None:
            return show.print_list(options.list, options.imports, as_json=options.json)
        config = gin_config.load(
            options.gin_files,
            options.bindings,
            imports=options.imports,
            allow_unused=options.allow_unused,
            whole=True,
        )
        environment.quieten_tensorflow()
        environment.set_up_processes(options.processes)
        environment.set_up_devices(options.cpu_devices)
        cache = environment.set_up_compilation_cache()
        from research_dp.training.loop import train

        look = show.look(config) if options.dry_run else None
        if look is None:
            print(cache, flush=True)
        return train(workdir=options.workdir, look=look, started=environment.started())
    except RunFailure as error:
        print(f"error: {str(error).split(gin_config.IN_CALL)[0]}", file=sys.stderr)
        return environment.leave(1)
    except BrokenPipeError:  # `--list | head`
        return environment.reader_has_gone()
    except KeyboardInterrupt:
        print("Interrupted before the first step: nothing was trained", file=sys.stderr)
        return environment.leave(130)
    except Exception as error:
        mistake = gin_config.as_mistake(error, config)
        print(mistake or traceback.format_exc(), file=sys.stderr)
        return environment.leave(2 if mistake else 1)


if __name__ == "__main__":
    faulthandler.enable()  # Python's stacks, too, where a library aborts
    sys.exit(main(sys.argv[1:]))
