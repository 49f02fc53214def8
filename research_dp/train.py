"""`python -m research_dp.train`: trains what the gin files say. See README.md."""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status."""
    from research_dp.config import command_line, environment, gin_config, show
    from research_dp.distributed.errors import RunFailure, UsageError

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
        environment.set_up_processes()
        environment.set_up_devices(options.cpu_devices)
        cache = environment.set_up_compilation_cache()
        from research_dp.training.loop import train

        look = show.look(config) if options.dry_run else None
        if look is None:
            print(cache, flush=True)
        return train(workdir=options.workdir, look=look, started=environment.started())
    except RunFailure as error:
        print(f"error: {str(error).split(gin_config.IN_CALL)[0]}", file=sys.stderr)
        return 1
    except (UsageError, TypeError, RuntimeError) as error:
        mistake = gin_config.as_mistake(error, config)
        if mistake is None:
            raise
        print(mistake, file=sys.stderr)
        return 2
    except BrokenPipeError:  # `--list | head`
        return environment.reader_has_gone()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
