"""Answers of a fixed length: the ends of an answer made impossible, in one way for every method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from rapid.models.hf import HFModel


@contextmanager
def without_ends(models: Iterable[torch.nn.Module | HFModel], end_ids: Sequence[int]) -> Iterator[None]:
    """While this lasts, the models give `end_ids` a logit of -inf."""
    ids = torch.tensor(list(end_ids))

    def suppress(module: Any, arguments: Any, output: Any) -> None:
        output.logits[..., ids] = float("-inf")

    with ExitStack() as stack:
        for model in {id(m): m for m in models}.values():
            if isinstance(model, HFModel):
                # Short blocks pass the module's forward, and its hooks, by.
                setattr(model, "run", _suppressing(model, ids))  # noqa: B010
                stack.callback(delattr, model, "run")
            else:
                stack.callback(model.register_forward_hook(suppress).remove)
        yield


def _suppressing(model: HFModel, ids: torch.Tensor) -> Any:
    run = model.run

    def run_without_ends(*args: Any, **kwargs: Any) -> torch.Tensor:
        logits = run(*args, **kwargs)
        return logits.index_fill(-1, ids.to(logits.device), float("-inf"))

    return run_without_ends
