"""Laws are checked on the same examples in every run; modules whose packages are not installed have no examples to run.

A check of a change must not fail because of what another day's dice show. New examples are looked for on purpose:
``python -m pytest --hypothesis-profile explore tests/plan``.
"""

from importlib.util import find_spec

from hypothesis import HealthCheck, settings

# How long an example takes says how loaded the machine is, not whether the law holds.
ANY_SPEED = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=ANY_SPEED, print_blob=True
)
settings.register_profile(
    "explore", deadline=None, suppress_health_check=ANY_SPEED, print_blob=True, max_examples=1000
)
settings.load_profile("same")

NEEDS = {
    "dynagroup/integrations/axolotl.py": "axolotl",
    "dynagroup/integrations/lhotse.py": "lhotse",
}
collect_ignore = [path for path, package in NEEDS.items() if find_spec(package) is None]
