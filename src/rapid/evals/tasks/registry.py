"""Tasks by the name that the command line and manifests use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rapid.errors import InvalidParameter
from rapid.evals.extraction import Extraction
from rapid.evals.schema import Task
from rapid.evals.tasks import infinitebench as ib
from rapid.evals.tasks import longbench_v2 as lb
from rapid.evals.tasks.dialogue import dialogues
from rapid.evals.tasks.jsonl import jsonl_task, sample
from rapid.evals.tasks.ruler import tasks as ruler_tasks

CountTokens = Callable[[str], int]

_LONGBENCH: dict[str, lb.Mode] = {
    "longbench_v2": "zero_shot",
    "longbench_v2_cot": "cot",
    "longbench_v2_no_context": "no_context",
}
_INFINITEBENCH = {f"infinitebench_{name}": name for name in ib.TASKS}
_RULER = {f"ruler_{name}": name for name in ruler_tasks.NAMES}
TASK_NAMES = ("sample", "dialogue", *_LONGBENCH, *_INFINITEBENCH, *_RULER)


@dataclass(frozen=True)
class TaskOptions:
    """What only some tasks need: letter extraction (LongBench v2); length, counter, samples, seed (RULER, dialogue)."""

    extraction: Extraction = "strict"
    length: int = 4096
    count_tokens: CountTokens | None = None
    num_samples: int = ruler_tasks.NUM_SAMPLES
    seed: int = ruler_tasks.SEED


def needs_counter(spec: str) -> bool:
    """Whether the task is made to a length in tokens, so that the target's tokenizer must be there first."""
    return spec.partition(":")[0] in ("dialogue", *_RULER)


def load_task(spec: str, options: TaskOptions | None = None) -> Task:
    """The task that `spec` names: NAME, NAME:SOURCE (a file, a directory or a hub id), or FILE.jsonl.

    Raises `InvalidParameter` for an unknown name, `DocumentError` for data that is missing or malformed.
    """
    options = options or TaskOptions()
    name, _, source = spec.partition(":")
    if name == "sample":
        return sample()
    if name in _LONGBENCH:
        return lb.longbench_v2(source or lb.HUB_ID, mode=_LONGBENCH[name], extraction=options.extraction)
    if name in _INFINITEBENCH:
        return ib.infinitebench(_INFINITEBENCH[name], source or ib.HUB_ID)
    if name in ("dialogue", *_RULER):
        if options.count_tokens is None:
            raise InvalidParameter(f"{name} is made to a length in tokens; give count_tokens of the target")
        if name == "dialogue":
            return dialogues(
                source or None,
                length=options.length,
                count_tokens=options.count_tokens,
                num_samples=options.num_samples,
                seed=options.seed,
            )
        return ruler_tasks.ruler(
            _RULER[name],
            length=options.length,
            count_tokens=options.count_tokens,
            num_samples=options.num_samples,
            seed=options.seed,
            source=source or None,
        )
    if Path(spec).suffix == ".jsonl":
        return jsonl_task(spec)
    raise InvalidParameter(f"task must be a .jsonl file or one of {', '.join(TASK_NAMES)}, got {spec!r}")
