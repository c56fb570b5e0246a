"""tutorials/errors.md lists every error of the product as the source has it, each with an example that a test runs."""

from __future__ import annotations

import ast

import pytest

from tests.errorpage.page import PAGE, page
from tests.errorpage.sites import ROOT, all_sites
from tests.errorpage.templates import fits, template
from tests.errorpage.triggers import load, problems


def test_every_error_has_an_example() -> None:
    found = problems(load(), all_sites())
    assert not found, "\n".join(found)


def test_the_page_is_what_the_source_says() -> None:
    assert PAGE.read_text() == page(all_sites(), load()), f"{PAGE.relative_to(ROOT)} is old. Run: python -m tests.errorpage"


@pytest.mark.parametrize(
    ("source", "text", "seen", "other"),
    [
        ("f'{len(names)} names'", "{len(names)} names", "3 names", "3 name"),
        ("f'no {x.y!r}: {type(self._z).__name__}'", "no {x.y}: {type of z}", "no 'a': int", "no 'a' int"),
        ("f'a {b:g}' + ' and c'", "a {b} and c", "a 1.5 and c", "a 1.5 or c"),
        ("f\"has {', '.join(map(str, sizes))} {{}}\"", "has {sizes, ...} {}", "has 1, 2 {}", "has 1, 2"),
        ("KNOWN.format(1)", "known {...}!", "known 1!", "known 1"),
        ("make(1)", "{make(1)}", "anything", ""),
    ],
)
def test_a_message_is_read_from_its_source(source: str, text: str, seen: str, other: str) -> None:
    constants = {"KNOWN": ast.parse("'known {}!'", mode="eval").body}
    message = ast.parse(source, mode="eval").body
    assert template(message, constants) == text
    assert fits(message, constants, seen)
    assert not fits(message, constants, other) or not other


def test_each_site_has_a_name_of_its_own() -> None:
    keys = [site.key for site in all_sites()]
    assert len(set(keys)) == len(keys) > 200
