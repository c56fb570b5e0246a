"""Notes which sites each test reaches, so that every run of the suite proves the examples of the page of errors.

The constructor of the product's base error, and ``warnings.warn`` as the product calls it, are replaced while tests run: they note
who called them.  Processes of the pool send back what they noted along with their answers.  No code of the product knows of this.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

from fxchimera_passes.errors import FxChimeraError
from tests.errorpage.sites import ROOT, Site, sites_of

__all__ = ["HITS_FILE", "RECORDER", "Hit", "Recorder", "Watch", "site_of"]

HITS_FILE = "FXCHIMERA_ERROR_HITS"  # an environment variable: the file that `python -m tests.errorpage TESTS` gathers from
_LONGEST = 100  # characters of a parameter
_INSIDE = (str(ROOT / "fxchimera") + os.sep, str(ROOT / "passes") + os.sep)
_TEMPORARY = re.compile(re.escape(tempfile.gettempdir()) + r"/(pytest-of-\w+/pytest-\d+/(popen-gw\d+/)?)?[^/\s'\"]+")


class Hit(NamedTuple):
    """One error or warning that was made; plain values, because processes send them."""

    file: str  # below the root of the repository
    line: int
    column: int
    text: str


def site_of(hit: Hit) -> Site | None:
    """The site that made it."""
    return next((site for site in sites_of(hit.file) if (site.line, site.column) == (hit.line, hit.column)), None)


class Recorder:
    """What was made in this process since ``take`` was last called."""

    def __init__(self) -> None:
        self._hits: list[Hit] = []

    def install(self) -> None:
        """Begin, once in a process."""
        warn = warnings.warn

        def made(error: FxChimeraError, *args: object) -> None:
            Exception.__init__(error, *args)
            self._note(sys._getframe(1), args[0] if args else "")

        def warned(
            message: Any, category: type[Warning] | None = None, stacklevel: int = 1, source: Any = None, **more: Any
        ) -> None:
            self._note(sys._getframe(1), message)
            warn(message, category, stacklevel + 1, source, **more)

        FxChimeraError.__init__ = made  # type: ignore[assignment]
        warnings.warn = warned

    def add(self, hits: Iterator[Hit] | list[Hit]) -> None:
        """Note what another process has made."""
        self._hits.extend(hits)

    def take(self) -> list[Hit]:
        """What was made, and begin anew."""
        hits, self._hits = self._hits, []
        return hits

    def _note(self, frame: FrameType, text: object) -> None:
        file = frame.f_code.co_filename
        if file.startswith(_INSIDE):
            line, _, column, _ = list(frame.f_code.co_positions())[frame.f_lasti // 2]
            self._hits.append(Hit(str(Path(file).relative_to(ROOT)), line or 0, column or 0, _plain(str(text))))


RECORDER = Recorder()


class Watch:
    """A plugin: a test that is listed as an example has to reach its sites."""

    def __init__(self, expected: Mapping[str, frozenset[str]]) -> None:
        self._expected = expected  # test -> keys of sites
        self._gathered = os.environ.get(HITS_FILE)
        self._began = time.time()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Run the test, then compare."""
        RECORDER.take()
        began = time.perf_counter()
        result = yield  # a test that fails or is skipped raises here
        self._compare(item, time.perf_counter() - began)
        return result

    def _compare(self, item: pytest.Item, seconds: float) -> None:
        expected = self._expected.get(item.nodeid, frozenset())
        if not expected and not self._gathered:
            return
        found = {site.key: hit.text for hit in RECORDER.take() if (site := site_of(hit))}
        if self._gathered:
            self._write(item, found, seconds)
        elif missing := {key for key in expected - found.keys() if not self._edited(key)}:
            pytest.fail(
                f"tutorials/errors.md shows this test as the example of {sorted(missing)}, which it did not reach; it reached "
                f"{sorted(found) or 'none'}. Run: python -m tests.errorpage '{item.nodeid}'",
                pytrace=False,
            )

    def _edited(self, key: str) -> bool:
        """Whether a site's file was edited since it was imported, so that its lines are others now, or has gone."""
        path = f"{key.partition(':')[0].replace('.', '/')}.py"
        return all(not file.exists() or file.stat().st_mtime > self._began for file in (ROOT / path, ROOT / "passes" / path))

    def _write(self, item: pytest.Item, found: Mapping[str, str], seconds: float) -> None:
        """One line a site, in one write, because the workers of pytest-xdist share the file."""
        params = item.callspec.params if hasattr(item, "callspec") else {}
        case = ", ".join(f"{name}={_shown(value)}" for name, value in params.items())
        lines = "".join(json.dumps([key, [item.nodeid, text, case], round(seconds, 2)]) + "\n" for key, text in found.items())
        with Path(str(self._gathered)).open("a") as file:
            file.write(lines)


def _shown(value: object) -> str:
    """A parameter of a test as it may be written, where it has no better name and is short."""
    name = getattr(value, "__name__", None)
    text = str(name) if name is not None else _plain(" ".join(repr(value).split()))
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _plain(text: str) -> str:
    """A message without what differs from run to run and from machine to machine."""
    return re.sub(r"0x[0-9a-f]{6,}", "0x...", _TEMPORARY.sub("/tmp/...", text.replace(str(ROOT) + os.sep, "")))
