"""The documentation says what is true of the code: generated pages are up to date, links lead somewhere."""

import re
from pathlib import Path

import pytest

from rapid.cli.docs import render

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def test_the_page_of_the_command_line_is_up_to_date():
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == render(), "run `make docs`"


def test_the_page_names_every_option_of_ask():
    page = render()
    for option in ("--method", "--lossless", "--eta", "--law", "--num-draft-tokens", "--json", "--drafter", "--stop"):
        assert f"| `{option}` |" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target for target in LINK.findall(text) if "://" not in target and not target.startswith("mailto:")]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_tree_of_the_readme_has_every_folder():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = readme[readme.index("src/rapid/\n") :].partition("```")[0]
    folders = sorted(p.parent.name for p in (ROOT / "src" / "rapid").glob("*/__init__.py"))
    assert folders
    assert [folder for folder in folders if f"  {folder}/" not in tree] == []
    named = re.findall(r"^  (\w+/|\w+\.py) ", tree, flags=re.MULTILINE)
    assert [name for name in named if not (ROOT / "src" / "rapid" / name).exists()] == []


def test_the_readme_runs_as_written():
    """The names its Python example uses exist."""
    import rapid

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL):
        compile(block, "README.md", "exec")
        for dotted in re.findall(r"\brapid((?:\.\w+)+)", block):
            value = rapid
            for name in dotted.strip(".").split("."):
                value = getattr(value, name)
