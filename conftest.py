"""Modules whose packages are not installed have no examples to run."""

from importlib.util import find_spec

NEEDS = {"dynagroup/integrations/axolotl.py": "axolotl", "dynagroup/integrations/lhotse.py": "lhotse"}
collect_ignore = [path for path, package in NEEDS.items() if find_spec(package) is None]
