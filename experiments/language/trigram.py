"""A byte-trigram model with back-off, counted on the training split: the baseline.

python experiments/language/trigram.py

Interpolated Witten-Bell smoothing (Witten and Bell, 1991): a context that was followed by many
kinds of bytes gives more weight to the shorter context. The score is that of the language model:
each byte of a piece of text except the first, given the bytes before it in the piece.
"""

import numpy as np

from research_dp.data.builders import download_and_prepare, find_builder


def texts(split: str) -> list[np.ndarray]:
    builder = find_builder("pystdlib_text")
    download_and_prepare(builder)
    source = builder.as_data_source(split=split)
    return [np.asarray(example["text"], np.int64) for example in source]


def pairs(pieces: list[np.ndarray], order: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (contexts of `order` bytes as one number, next bytes), without the first bytes."""
    contexts, nexts = [], []
    for piece in pieces:
        context = np.zeros(len(piece) - order, np.int64)
        for back in range(order):
            context = context * 256 + piece[back : len(piece) - order + back]
        contexts.append(context)
        nexts.append(piece[order:])
    return np.concatenate(contexts), np.concatenate(nexts)


def main() -> None:
    train, test = texts("train"), [t for t in texts("test") if len(t) > 1]
    tables = []
    for order in range(3):
        contexts, nexts = pairs([t for t in train if len(t) > order], order)
        tables.append(np.bincount(contexts * 256 + nexts, minlength=256 ** (order + 1)))

    loss, count = 0.0, 0
    for piece in test:
        probability = np.full(len(piece) - 1, 1 / 256)
        for order, table in enumerate(tables):
            counts = table.reshape(-1, 256)
            # Element i of `probability` predicts byte i + 1, so the first contexts are too short.
            first = max(0, order - 1)
            context = np.zeros(len(piece) - 1 - first, np.int64)
            for back in range(order):
                context = (
                    context * 256 + piece[first + 1 - order + back : len(piece) - order + back]
                )
            rows = counts[context]
            total, kinds = rows.sum(1), (rows > 0).sum(1)
            seen = rows[np.arange(len(rows)), piece[first + 1 :]]
            shorter = probability[first:]
            mixed = (seen + kinds * shorter) / np.maximum(total + kinds, 1)
            probability[first:] = np.where(total > 0, mixed, shorter)
        loss -= np.log(probability).sum()
        count += len(probability)
    print(f"trigram with back-off: {loss / count:.4f} nats a byte over {count:,} held-out bytes")


if __name__ == "__main__":
    main()
