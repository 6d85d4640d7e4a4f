"""Importing is cheap, complete and free of side effects."""

import pkgutil
import subprocess
import sys

import pytest

import rapid

HEAVY = ("torch", "transformers", "sentence_transformers", "bm25s", "pypdf", "docx", "bs4", "matplotlib", "numpy")
MODULES = sorted(m.name for m in pkgutil.walk_packages(rapid.__path__, "rapid."))


def loaded_after(code: str) -> set[str]:
    """Names of the modules a fresh interpreter has loaded after `code`."""
    program = f"{code}\nimport sys\nprint(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert found.stderr == ""
    return set(found.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import rapid",
        "import rapid.params, rapid.types, rapid.errors",
        "import rapid.cli.main",
        "import rapid; rapid.Speculation(eta=10), rapid.Sampling(), rapid.Retrieval(), rapid.Document('x')",
        "import rapid.documents, rapid.models.sources",
    ],
)
def test_nothing_heavy_is_loaded(code):
    assert not loaded_after(code) & set(HEAVY)


def test_the_check_sees_what_is_loaded():
    assert "torch" in loaded_after("import rapid; rapid.Engine")


def test_retrieval_loads_no_torch():
    assert "torch" not in loaded_after("import rapid.retrieval.index")


def test_every_module_can_be_imported_alone():
    """In one interpreter, each from a clean table of modules of ours: hidden import cycles show."""
    program = (
        "import importlib, sys\n"
        f"for name in {MODULES!r}:\n"
        "    for known in [m for m in sys.modules if m.partition('.')[0] == 'rapid']:\n"
        "        del sys.modules[known]\n"
        "    importlib.import_module(name)\n"
    )
    found = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_public_names():
    assert set(rapid.__all__) <= set(dir(rapid))
    for name in rapid.__all__:
        assert getattr(rapid, name) is not None
    assert rapid.errors.RapidError is rapid.RapidError
    assert callable(rapid.integrations.transformers.decoding)
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        rapid.nonesuch  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        rapid.integrations.nonesuch  # noqa: B018
