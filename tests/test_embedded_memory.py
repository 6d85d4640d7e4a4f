"""Memory while a long answer is decoded."""

import os
from pathlib import Path

import pytest

import rapid
from rapid.bench.ends import without_ends

# On one busy core 2,000 tokens take longer than other tests may.
pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(900)]

TEXT = (Path(__file__).parent.parent / "docs" / "method.md").read_text(encoding="utf-8")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("method", ["lc", "lookup"])
def test_decoding_2000_tokens_takes_no_more_memory_than_100(embedded_engine, method):
    """But for the cache's own growth, whose room is allocated before and touched as it fills."""
    session = embedded_engine.open(rapid.Document(TEXT, "method.md"), reserve_tokens=2400)
    backend = embedded_engine.backend
    per_token = backend.target_model.step_bytes(1) - backend.target_model.step_bytes(0)
    sampling = rapid.Sampling(max_new_tokens=2000)
    tokens, seen = 0, {}
    with without_ends([backend.target_model], backend.target.eos_token_ids):
        for piece in session.stream("What is it about?", speculation=rapid.Speculation(method), sampling=sampling):
            tokens += 1
            assert piece is not None
            if tokens == 50:
                seen["early"] = resident_bytes()
        seen["late"] = resident_bytes()
    assert seen["late"] - seen["early"] < 2000 * per_token + 2**24
