"""Continues a prompt by a language model, a token at a time, with a cache of keys and values."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from research_dp.argument_types import Count, CountOrZero, MaxNorm, Seed
from research_dp.commands.saved_run import load, load_hf
from research_dp.config import parser
from research_dp.data.text import load_tokenizer
from research_dp.errors import UsageError
from research_dp.runs import files
from research_dp.runs.published import CONFIG
from research_dp.types import PyTree, TrainableModel

_TOKENIZER = "tokenizer.json"


def command(
    folder: str,
    *,
    prompt: str = "\n",
    tokens: Count = 200,
    temperature: MaxNorm = 1.0,
    seed: Seed = 0,
    tokenizer: str | None = None,
    step: CountOrZero | None = None,
) -> int:
    """Prints a prompt and what follows, as it is drawn.

    Args:
        folder: Of a run, or a published model in Hugging Face's layout.
        prompt: The text to continue.
        tokens: How many are drawn.
        temperature: Of what is drawn; 0: always the likeliest token.
        seed: Of what is drawn.
        tokenizer: A `tokenizer.json`; None: that of the folder or of the run, or bytes.
        step: Of the run's checkpoint; None: the newest.

    Returns:
        The exit status.
    """
    path = Path(folder).expanduser()
    if (path / CONFIG).is_file():
        if step is not None:
            raise UsageError(f"--step is of a run's checkpoint: {path} is a published model.")
        model, params = load_hf(path)
    else:
        model, params = load(path, step)
    if model.decode is None:
        raise UsageError(f"the model of {path} is no transformer: there is nothing to sample.")
    own = path / _TOKENIZER
    if named := tokenizer or (str(own) if own.is_file() else of_run(path)):
        file = Path(named).expanduser()
        if not (tokenizer or file.is_file()):
            raise UsageError(f"{path} names the tokenizer {file}, not here: give --tokenizer=FILE.")
        encode, texts = _tokenizer(file)
    else:
        encode, texts = _bytes(model.config["vocab_size"])
    given = encode(prompt)
    if not given:
        raise UsageError("--prompt has no token: give some text.")
    print(prompt, end="", flush=True)
    following = drawn(model, params, given, tokens, float(temperature), seed)
    for text in texts(given, following):
        print(text, end="", flush=True)
    print()
    return 0


def drawn(
    model: TrainableModel,
    params: PyTree,
    prompt: Sequence[int],
    count: int,
    temperature: float,
    seed: int,
) -> Iterator[int]:
    """Tokens that follow a prompt, each drawn from what the model says of the next."""
    call: Any = model.decode
    decode, key = jax.jit(call, donate_argnums=2), jax.random.key(seed)
    begin = jax.jit(functools.partial(call, cache=len(prompt) + count))
    logits, cache = begin(params, jnp.asarray(prompt, jnp.int32)[None])
    for number in range(count):
        if temperature:
            drawn = jax.random.categorical(jax.random.fold_in(key, number), logits / temperature)
        else:
            drawn = jnp.argmax(logits, -1)
        yield int(drawn[0])
        if number + 1 < count:
            logits, cache = decode(params, drawn[:, None].astype(jnp.int32), cache)


Texts = Callable[[Sequence[int], Iterator[int]], Iterator[str]]


def _bytes(vocab_size: int) -> tuple[Callable[[str], list[int]], Texts]:
    """(text -> tokens, (prompt, tokens) -> parts of the text of tokens) where they are bytes."""
    if vocab_size != 256:
        raise UsageError(
            f"the model has {vocab_size} tokens, which are no bytes: give --tokenizer=FILE, a "
            f"{_TOKENIZER} of Hugging Face's."
        )

    def texts(prompt: Sequence[int], tokens: Iterator[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            yield decoder.decode(bytes([token]))
        yield decoder.decode(b"", final=True)

    return lambda text: list(text.encode()), texts


def of_run(folder: Path) -> str | None:
    """The tokenizer that a run's text was prepared with, if it was."""
    statements = parser.read([str(folder / files.CONFIG)], [])
    bound = {x.name: x.value for x in statements if isinstance(x, parser.Binding)}
    value = bound.get("text_data.tokenizer")
    while isinstance(value, parser.Macro):
        value = bound.pop(value.name, None)
    return value


def _tokenizer(path: Path) -> tuple[Callable[[str], list[int]], Texts]:
    """The same for a file of Hugging Face's tokenizers."""
    known = load_tokenizer(path, "--tokenizer")

    def texts(prompt: Sequence[int], tokens: Iterator[int]) -> Iterator[str]:
        seen = list(prompt)
        shown = known.decode(seen, skip_special_tokens=False)
        for token in tokens:
            seen.append(token)
            whole = known.decode(seen, skip_special_tokens=False)
            if not whole.endswith("\ufffd"):  # a part of a character
                yield whole[len(shown) :]
                shown = whole

    return lambda text: known.encode(text).ids, texts
