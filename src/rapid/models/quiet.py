"""Keeps model libraries silent while they load, and leaves their settings as they were."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, log lines or warnings of transformers and huggingface_hub inside the block.

    Nor does transformers ask the hub's bot to convert pickled weights, which opens a public pull request.
    """
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging as untyped_logging

    transformers_logging: Any = untyped_logging
    hub_logger = logging.getLogger("huggingface_hub")
    verbosity, hub_level = transformers_logging.get_verbosity(), hub_logger.level
    bars, hub_bars = transformers_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    bot = os.environ.get("DISABLE_SAFETENSORS_CONVERSION")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"
            transformers_logging.set_verbosity(logging.CRITICAL)
            hub_logger.setLevel(logging.CRITICAL)
            transformers_logging.disable_progress_bar()
            yield
        finally:
            if bot is None:
                os.environ.pop("DISABLE_SAFETENSORS_CONVERSION", None)
            else:
                os.environ["DISABLE_SAFETENSORS_CONVERSION"] = bot
            transformers_logging.set_verbosity(verbosity)
            hub_logger.setLevel(hub_level)
            # transformers' switch also turns the hub's, so the hub's own comes last.
            if bars:
                transformers_logging.enable_progress_bar()
            (enable_progress_bars if hub_bars else disable_progress_bars)()
