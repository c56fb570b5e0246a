"""``python -m tests.errorpage [TESTS]``: run tests, note which errors they reach, and write the page of errors anew.

Without tests the page is made from the examples that are known. With tests (whatever pytest takes), those that reach a site without
a good example become its example, also those whose message has changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.errorpage.page import PAGE, page
from tests.errorpage.sites import ROOT, all_sites
from tests.errorpage.triggers import Trigger, load, merged, problems, save
from tests.errorpage.watch import HITS_FILE


def main(tests: list[str]) -> int:
    """Do it; the exit status is 1 when a site has no good example, or a test failed, of which nothing is noted."""
    hits, seconds, failed = _run(tests) if tests else ([], {}, 0)
    triggers = merged(load(), hits, all_sites(), seconds)
    save(triggers)
    PAGE.write_text(page(all_sites(), triggers))
    found = problems(triggers, all_sites())
    print("\n".join([*found, f"{PAGE.relative_to(ROOT)}: {len(all_sites())} sites, {len(found)} problems"]))  # noqa: T201
    return 1 if found or failed else 0


def _run(tests: list[str]) -> tuple[list[tuple[str, Trigger]], dict[str, float], int]:
    """What the tests reached that passed, their seconds, and pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "hits")
        file.touch()
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT, env={**os.environ, HITS_FILE: str(file)})
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [(key, Trigger(*found)) for key, found, _ in lines], {found[0]: spent for _, found, spent in lines}, done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
