"""Which test is the example of which site: kept in ``triggers.json``, one line a site, chosen from what tests reached.

An entry also has the message as that test saw it, for the page.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.errorpage.sites import ROOT, Site

__all__ = ["FILE", "Trigger", "by_test", "function_of", "load", "merged", "problems", "save"]

FILE = Path(__file__).with_name("triggers.json")
_PLACES = ("tests/local", "tests/graph", "tests/pure", "tests")  # the first is the best: its tests are a user's code


class Trigger(NamedTuple):
    """The example of a site."""

    test: str  # as pytest names it
    seen: str  # the message
    case: str = ""  # the parameters of the test


def load() -> dict[str, Trigger]:
    """The committed examples, by key of the site; of a file that two people have changed, what both say."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    entries = [json.loads(f"{{{line.removesuffix(',')}}}") for line in lines if line.startswith('"')]
    return {key: Trigger(*found) for entry in entries for key, found in entry.items()}


def save(triggers: Mapping[str, Trigger]) -> None:
    """Write the examples, one a line, so that changes of several people merge."""
    lines = (f"{json.dumps(key)}: {json.dumps(list(triggers[key]))}" for key in sorted(triggers))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def by_test(triggers: Mapping[str, Trigger]) -> dict[str, frozenset[str]]:
    """The keys that each test is the example of."""
    tests: dict[str, set[str]] = {}
    for key, trigger in triggers.items():
        tests.setdefault(trigger.test, set()).add(key)
    return {test: frozenset(keys) for test, keys in tests.items()}


def merged(
    triggers: Mapping[str, Trigger], hits: Iterable[tuple[str, Trigger]], sites: Iterable[Site], seconds: Mapping[str, float]
) -> dict[str, Trigger]:
    """``triggers`` with what tests reached, (key, example) each; a good example that is there already stays.

    Args:
        triggers: By key; those of keys that no site has are left out, unless a function has moved to another module.
        hits: What tests reached.
        sites: All of the product.
        seconds: How long tests took, where known.
    """
    hits = list(hits)
    known = {site.key: site for site in sites}
    reaches = Counter(trigger.test for _, trigger in hits)
    left = {_within(key): trigger for key, trigger in triggers.items() if key not in known}
    chosen = {key: triggers[key] for key in known if key in triggers}
    chosen.update({key: left[_within(key)] for key in known if key not in chosen and _within(key) in left})
    candidates: dict[str, list[Trigger]] = {}
    for key, trigger in hits:
        if key in known and function_of(trigger.test) is not None:
            candidates.setdefault(key, []).append(trigger)
    for key, found in candidates.items():
        if key not in chosen or _fault(known[key], chosen[key]):
            same = [trigger for trigger in found if key in chosen and trigger.test == chosen[key].test]
            chosen[key] = min(same or found, key=lambda trigger: _rank(trigger.test, reaches, seconds))
    return chosen


def _within(key: str) -> str:
    """A key without its module."""
    return key.partition(":")[2]


def problems(triggers: Mapping[str, Trigger], sites: Iterable[Site]) -> list[str]:
    """What is wrong with the examples, each with what to do; empty when every site has a good one."""
    sites = list(sites)
    found = []
    for site in sites:
        if site.key not in triggers:
            found.append(
                f"{site.file}:{site.line} ({site.kind}: {site.template!r}) has no example: write a test that reaches it, "
                "then run: python -m tests.errorpage PATH_OF_THAT_TEST"
            )
        elif fault := _fault(site, triggers[site.key]):
            found.append(f"{site.file}:{site.line}: {fault}. Run: python -m tests.errorpage PATH_OF_A_TEST_THAT_REACHES_IT")
    keys = {site.key for site in sites}
    found.extend(
        f"{FILE.name} has an example of {key!r}, which is in the source no more. Run: python -m tests.errorpage"
        for key in triggers
        if key not in keys
    )
    return found


def _fault(site: Site, trigger: Trigger) -> str | None:
    if function_of(trigger.test) is None:
        return f"its example {trigger.test} is no test any more"
    if not site.fits(trigger.seen):
        return f"its message has changed to {site.template!r}, which is not what {trigger.test} saw: {trigger.seen!r}"
    return None


def function_of(test: str) -> ast.FunctionDef | None:
    """The function of a test; None when there is none."""
    file, *names = test.partition("[")[0].split("::")
    body = _body(file)
    for name in names[:-1]:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name), [])
    return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == names[-1]), None) if names else None


@cache
def _body(file: str) -> list[ast.stmt]:
    path = ROOT / file
    return ast.parse(path.read_text()).body if path.exists() else []


def _rank(test: str, reaches: Mapping[str, int], seconds: Mapping[str, float]) -> tuple[object, ...]:
    """Smaller is the better example: specific, near a user's code, short and fast."""
    function = function_of(test)
    assert function is not None
    length = (function.end_lineno or 0) - function.lineno
    drawn = any("given" in ast.unparse(decorator) for decorator in function.decorator_list)
    place = next((rank for rank, folder in enumerate(_PLACES) if test.startswith(folder + "/")), len(_PLACES))
    far = test.startswith("tests/process/")
    return drawn, far, reaches[test] > 3, seconds.get(test, 1.0) > 2.0, place, length > 14, seconds.get(test, 1.0), length, test
