"""`python -m research_dp.conform`: whether a gin file's strategy computes what one device does.

Run it on strategies of your own: it builds the one that `train.strategy` names for a small model,
in Linen and in NNX, and compares each step with one device's, within fixed tolerances. `certify`
takes longer and asks more: a whole configuration, within what rounding allows, with causes.
"""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit status: 0 it does, 1 it does not, 2 a mistake."""
    from research_dp.commands import exit_status, flags, runtime
    from research_dp.config import gin_internals, load
    from research_dp.console import put, table

    def body(session: exit_status.Session) -> int:
        options = flags.parse_conform(argv, __doc__ or "")
        bindings = ["shard_params.min_weight_size = 64", *options.bindings]
        session.config = load.load(options.gin_files, bindings, imports=options.imports)
        runtime.set_up_devices(options.cpu_devices)
        runtime.set_up_compilation_cache()
        from research_dp.conformance import suite
        from research_dp.distributed.mesh import sizes_text

        recipe = gin_internals.value_of("train.strategy")
        found = [check for api in suite.APIS for check in suite.checks(recipe, api)]
        sent = suite.wire_bytes(recipe, suite.APIS[0])
        sizes = sizes_text(recipe.mesh.shape)
        shown = table(f"{recipe.name} on {sizes}, and single", "model", "what", "", "by")
        for check in found:
            shown.add_row(check.api, check.what, "agrees" if check.right else "DIFFERS", check.told)
        put(shown, f"A device sends {sent:,.0f} bytes a step.")
        wrong = sum(not check.right for check in found)
        put(f"{wrong} of {len(found)} differ." if wrong else f"All {len(found)} agree.")
        return 1 if wrong else 0

    return exit_status.told(body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
