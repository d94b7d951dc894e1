"""The documentation site builds without a warning, and asks no other machine for anything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
mkdocs = pytest.importorskip("mkdocs")


@pytest.fixture
def no_network(monkeypatch):
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError(f"the build asked for {args}")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.filterwarnings("ignore")
def test_the_site_builds_strictly_and_offline(tmp_path, no_network):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True)
    build(config)
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    assert {page for page in pages if not (tmp_path / "site" / page / "index.html").exists()} == set()
    api = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    assert "PlannedDataLoader" in api
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    loaded = re.findall(r"(?:<script[^>]+src|<link[^>]+href)=\"?(https?://[^\" >]+)", home)
    assert loaded == [], "a reader without a network sees the same page"


def test_the_api_page_names_everything_public():
    import dynagroup

    api = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: dynagroup\.(\w+)$", api, re.M))
    errors = {"AlignmentError", "BudgetError", "ConfigError", "StateError"}  # shown with their module
    assert set(dynagroup.__all__) - named - errors == set()
