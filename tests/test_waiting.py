"""Threads sleep while they wait where the machine is busy, and a user's setting stays."""

import os

import pytest

from rapid.cli import waiting


@pytest.mark.parametrize(
    ("cores", "others", "busy"), [(2, 0, False), (2, 1, True), (16, 1, False), (16, 2, True), (1, 1, True)]
)
def test_other_work_makes_a_machine_busy(cores, others, busy):
    assert waiting.is_busy(cores, lambda: 1 + others) is busy


def test_a_moment_of_other_work_does_not():
    looks = iter([2, 1, 2, 1, 1])
    assert not waiting.is_busy(2, lambda: next(looks))


@pytest.mark.parametrize(("running", "policy"), [("1/80", None), ("3/80", "passive")])
def test_the_policy_is_set_for_a_busy_machine_only(monkeypatch, tmp_path, running, policy):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    loadavg = tmp_path / "loadavg"
    loadavg.write_text(f"0.10 0.10 0.10 {running} 4242\n", encoding="ascii")
    monkeypatch.setattr(waiting, "_LOADAVG", loadavg)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    waiting.wait_by_load()
    assert os.environ.get("OMP_WAIT_POLICY") == policy
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    waiting.wait_by_load()
    assert os.environ["OMP_WAIT_POLICY"] == "active"


def test_systems_without_the_file(monkeypatch, tmp_path):
    monkeypatch.setattr(waiting, "_LOADAVG", tmp_path / "missing")
    monkeypatch.setattr(os, "getloadavg", lambda: (7.5, 0, 0))
    assert waiting.is_busy(2)
