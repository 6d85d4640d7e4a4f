"""An experiment as it is asked for: tasks, models and settings in, an engine and its readings out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rapid.errors import InvalidParameter
from rapid.evals.asking import AskSettings
from rapid.evals.identity import identify
from rapid.evals.manifest import make_manifest
from rapid.evals.readings import Reading, group, within
from rapid.evals.schema import Task
from rapid.evals.tasks.registry import TaskOptions, load_task, needs_counter
from rapid.params import Models

if TYPE_CHECKING:
    from rapid.engine import Engine
    from rapid.types import StageProgress


@dataclass(frozen=True)
class Selection:
    """Which items of the tasks are asked: by tokens of their document, then the first `limit` of each task."""

    limit: int | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    quickest_first: bool = False


@dataclass(frozen=True)
class Opened:
    """A loaded experiment. `manifest` identifies the data whole: a selection may be extended by a later run."""

    engine: Engine
    readings: list[Reading]
    manifest: dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """Tasks by name or file, models, and how they are asked."""

    tasks: Sequence[str]
    models: Models = field(default_factory=Models)
    ask: AskSettings = field(default_factory=AskSettings)
    options: TaskOptions = field(default_factory=TaskOptions)
    selection: Selection = field(default_factory=Selection)

    def __post_init__(self) -> None:
        if not self.tasks:
            raise InvalidParameter("no task given; name at least one, such as --task sample")

    def open(self, progress: StageProgress | None = None) -> Opened:
        """Read the tasks and load the models. What can be refused without a model is refused before it is loaded."""
        ready = {spec: load_task(spec, self.options) for spec in self.tasks if not needs_counter(spec)}
        models = {"target": identify(self.models.target), "drafter": identify(self.models.drafter)}

        from rapid.engine import Engine

        engine = Engine.load(**asdict(self.models), progress=progress)
        count = engine.target_prompter.count
        counted = replace(self.options, count_tokens=count)
        tasks = [ready[spec] if spec in ready else load_task(spec, counted) for spec in self.tasks]
        readings = group((self._selected(task, count) for task in tasks), quickest_first=self.selection.quickest_first)
        data = {task.name: task.data_hash() for task in tasks}
        return Opened(engine, readings, make_manifest(settings=self._settings(), models=models, data=data))

    def _selected(self, task: Task, count: Any) -> Task:
        chosen = self.selection
        fitting = within(task, count, min_tokens=chosen.min_tokens, max_tokens=chosen.max_tokens)
        return fitting.limited(chosen.limit)

    def _settings(self) -> dict[str, Any]:
        """What decides the answers besides the configurations, which every result carries itself."""
        # The budget and what is retrieved from are a configuration's.
        names = ("ranking", "embedder", "chunk_tokens", "threshold", "index")
        retrieval = {name: getattr(self.ask.retrieval, name) for name in names}
        # Older runs know no dtype of the drafter's own: only one that is given is part of what a run is.
        drafter = {"drafter_dtype": self.models.drafter_dtype} if self.models.drafter_dtype else {}
        return {
            "dtype": self.models.dtype,
            **drafter,
            "temperature": self.ask.temperature,
            "top_p": self.ask.top_p,
            "max_new_tokens": self.ask.max_new_tokens,
            "prompt_tokens": self.ask.prompt_tokens,
            "extraction": self.options.extraction,
            "retrieval": retrieval,
        }
