"""What every benchmark needs first: the allocator set, then the models loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rapid.bench.process import raise_malloc_thresholds
from rapid.params import Models

if TYPE_CHECKING:
    from rapid.backends.local import LocalBackend
    from rapid.engine import Engine
    from rapid.models.hf import HFModel


@dataclass(frozen=True)
class Loaded:
    """An engine on the local backend, whose models the benchmarks may look into."""

    engine: Engine
    backend: LocalBackend
    settings: Models
    malloc: dict[str, int | None]

    @property
    def models(self) -> list[HFModel]:
        """Target and drafter."""
        return [self.backend.target_model, self.backend.drafter_model]

    def conditions(self, **further: Any) -> dict[str, Any]:
        """The report's conditions, with what this benchmark adds."""
        from rapid.bench.conditions import conditions

        return conditions(self.backend, malloc=self.malloc, dtype=self.settings.dtype, **further)


def load_engine(models: Models, say: Callable[[str], None]) -> Loaded:
    """Load the models. Raises `ModelError`."""
    from rapid.backends.local import LocalBackend
    from rapid.engine import Engine

    malloc = raise_malloc_thresholds()
    say(f"loading {models.target}")
    engine = Engine.load(**asdict(models))
    backend = engine.backend
    assert isinstance(backend, LocalBackend)
    return Loaded(engine, backend, models, malloc)
