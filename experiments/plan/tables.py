"""Plans the models of this folder for absent devices, and prints a table for each.

python experiments/plan/tables.py [--only=NAME] [--details]

Needs the extras `plan-gpu` and `plan-tpu`. `--details` prints the collectives too.
"""

import argparse
import time

import research_dp

LM_1B, LM_7B, LM_70B = (f"experiments/plan/lm_{size}.gin" for size in ("1b", "7b", "70b"))
H100, V5E, TORUS = (f"options/{name}.gin" for name in ("h100", "v5e", "tpu_torus"))
LONG = ("random_tokens.length = 8192", "train.batch_size = 128")
HOSTS = "make_mesh.axes = {'data': -1, 'fsdp': 8}"
LLAMA = (
    *("VOCAB_SIZE = 128256", "transformer.vocab_size = 128256", "transformer.width = 4096"),
    *("transformer.depth = 32", "transformer.heads = 32", "transformer.mlp_width = 14336"),
    *("transformer.remat = 'dots'", "train.batch_size = 8"),
)
FSDP = ("fsdp", "fsdp_keep", "zero1", "zero2", "hsdp")
# Name -> (gin files, bindings, topology, strategies)
CASES = {
    "lm_1b": ((LM_1B,), (), "h100:8x8", "all"),
    "lm_1b, h100": ((LM_1B, H100), (), "h100:8x8", "all"),
    "lm_1b, 2 x 8192 tokens, h100": ((LM_1B, H100), LONG, "h100:8x8", "all"),
    "lm_1b, 1,024 H100s": (
        *((LM_1B,), ("train.batch_size = 1024",), "h100:128x8"),
        *(("fsdp", "fsdp_keep", "spmd_fsdp", "fsdp+h100"),),
    ),
    "lm_1b, 1,024 H100s, a group a host": (
        *((LM_1B,), ("train.batch_size = 1024", HOSTS), "h100:128x8", ("hsdp", "hsdp+h100")),
    ),
    "lm_1b, 8 H100s": ((LM_1B,), ("train.batch_size = 8",), "h100:1x8", ("fsdp", "hsdp")),
    "Llama-8B's sizes, dots": ((LM_1B,), LLAMA, "h100:1x8", "all"),
    "Llama-8B's sizes, dots, h100": ((LM_1B, H100), LLAMA, "h100:1x8", FSDP),
    "lm_7b, 256 H100s": ((LM_7B,), (), "h100:32x8", "all"),
    "lm_7b, 256 H100s, h100": ((LM_7B, H100), (), "h100:32x8", FSDP),
    "lm_1b, v5e with options": ((LM_1B, V5E), (), "v5e-64", ("fsdp",)),
    "lm_1b, v5e, tpu_torus": ((LM_1B, TORUS), (), "v5e-64", FSDP),
    "lm_1b, v5p": ((LM_1B,), (), "v5p-64", ("ddp",)),
    "lm_1b, v5p, tpu_torus": ((LM_1B, TORUS), (), "v5p-64", FSDP),
    "lm_7b, v5e with options": ((LM_7B, V5E), ("train.batch_size = 256",), "v5e-64", ("fsdp",)),
    "lm_70b, v5p": ((LM_70B,), (), "v5p-1024", ("fsdp",)),
    "lm_70b, v5p, tpu_torus": ((LM_70B, TORUS), (), "v5p-1024", ("fsdp", "hsdp")),
}


def cells(row: dict) -> list[str]:
    """Returns a strategy's figures; empty where they are not known."""
    if not row["predicted_seconds"]:
        needed = f"{(row['needed_bytes'] or 0) / 1e9:.2f}"
        return [needed, "", "", "", "", "", "", "", (row["problem"] or "").partition(":")[0]]
    parts = {name: seconds * 1e3 for name, seconds in row["predicted_parts"].items()}
    sent = row["wire_bytes"]["total"], row["min_wire_bytes"]
    return [
        *(f"{nbytes / 1e9:.3f}" for nbytes in (row["needed_bytes"], *sent)),
        f"{sum(total['count'] for total in row['collectives'])}",
        f"{parts['exposed']:.1f}",
        f"{parts['latency']:.1f}",
        f"{row['predicted_seconds'] * 1e3:.1f}",
        f"{row['mfu']:.1%}",
        (row["bound"] if row["fits"] else "does not fit"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--details", action="store_true", help="the collectives too")
    flags = parser.parse_args()
    for name, (files, bindings, where, strategies) in CASES.items():
        if flags.only not in name:
            continue
        start = time.perf_counter()
        found = research_dp.plan(
            *(list(files), list(bindings)),
            topology=where,
            strategies=strategies if isinstance(strategies, str) else list(strategies),
        )
        print(f"\n{name} on {where} ({time.perf_counter() - start:.0f} s)\n")
        print("| strategy | needed GB | wire GB | expected | collectives | exposed ms ", end="")
        print(
            "| of them latency | step ms | MFU | bound |\n|---|---|---|---|---|---|---|---|---|---|"
        )
        for strategy, row in found["strategies"].items():
            print(f"| {strategy} | {' | '.join(cells(row))} |", flush=True)
            for total in row["collectives"] or () if flags.details else ():
                print("   ", *total.values())


if __name__ == "__main__":
    main()
