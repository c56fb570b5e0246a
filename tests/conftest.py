"""Settings for all tests.  No torch is imported here: the tests of the pure parts run without it."""

from __future__ import annotations

import os
import tempfile

import pytest
from hypothesis import settings

from tests.errorpage.triggers import by_test, load
from tests.errorpage.watch import RECORDER, Watch

# Bitwise comparisons need equal thread counts, in this process and in those it starts; read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "FXCHIMERA_GPU" not in os.environ:  # a pipeline would take the GPUs that it sees; only `nox -s gpu` wants that
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Errors that the tests ask for leave reports; these are nobody's.
os.environ.setdefault("FXCHIMERA_REPORTS", tempfile.mkdtemp(prefix="fxchimera-test-reports-"))

# The default run draws the same examples every time; `nox -s exhaustive` explores others.
settings.register_profile("repeatable", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("exploring", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_configure(config: pytest.Config) -> None:
    """The examples of tutorials/errors.md have to reach what they are examples of."""
    RECORDER.install()
    config.pluginmanager.register(Watch(by_test(load())), "errorpage")
