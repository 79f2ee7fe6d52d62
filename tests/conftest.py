"""Settings of every tier."""

from __future__ import annotations

from hypothesis import settings

# The machine is shared and slow at times: an example's time says nothing about the code.
settings.register_profile("project", deadline=None)
settings.load_profile("project")
