"""These tests need an accelerator: ``tests/test_devices.py`` runs them in a process of their own, on one made of host memory."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("FXCHIMERA_TWIN") else ["test_*.py"]

if os.environ.get("FXCHIMERA_TWIN"):
    from tests.device.twin import load

    load()
