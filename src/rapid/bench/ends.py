"""Answers of a fixed length: the ends of an answer made impossible, in one way for every method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextmanager
def without_ends(models: Iterable[torch.nn.Module], end_ids: Sequence[int]) -> Iterator[None]:
    """While this lasts, the models give `end_ids` a logit of -inf."""
    ids = list(end_ids)

    def suppress(module: Any, arguments: Any, output: Any) -> None:
        output.logits[..., ids] = float("-inf")

    with ExitStack() as stack:
        for model in {id(m): m for m in models}.values():
            stack.callback(model.register_forward_hook(suppress).remove)
        yield
