"""Settings of every tier."""

from __future__ import annotations

from hypothesis import settings

# The machine is shared and slow at times: an example's time says nothing about the code. The same examples
# every time: new ones are looked for by the fuzzer, whose finds join the suite by name.
settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")
