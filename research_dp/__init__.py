"""research_dp: data-parallel training in JAX, the strategy chosen by a gin file.

The functions that strategies are made of; the training command is `python -m research_dp.train`.
"""

import importlib
import importlib.util
from typing import Any

import lazy_loader

__version__ = "0.1.0"

# A name's module, which __init__.pyi says, is imported when it is used: JAX and Flax take long.
_public, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    is_public = name in __all__ or name.startswith("_")
    if not is_public and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    return _public(name)
