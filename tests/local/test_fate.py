"""What the system tells of another process, and the page on which one writes where it is."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from fxchimera.runtime.failures.fate import Fate, Identity
from fxchimera.runtime.failures.place import IDLE, Place, Words, label

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the system has no /proc")

_PRINT = "from fxchimera.runtime.failures.fate import Identity; print(Identity.own(), flush=True); import time; time.sleep(60)"


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], Identity]]:
    """Another process, and what it says of itself."""
    with subprocess.Popen([sys.executable, "-c", _PRINT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Identity.parse(process.stdout.readline().strip())
        process.kill()


def becomes(wanted: Fate, ask: Callable[[], Fate]) -> bool:
    deadline = time.monotonic() + 10.0
    while ask() is not wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return ask() is wanted


def test_a_process_is_alive_stopped_alive_again_and_gone(other: tuple[subprocess.Popen[str], Identity]) -> None:
    process, identity = other
    assert identity.pid == process.pid
    assert identity.fate() is Fate.ALIVE
    process.send_signal(signal.SIGSTOP)
    assert becomes(Fate.STOPPED, identity.fate)
    process.send_signal(signal.SIGCONT)
    assert becomes(Fate.ALIVE, identity.fate)
    process.kill()
    assert becomes(Fate.GONE, identity.fate)  # a zombie, until it is waited for
    process.wait()
    assert identity.fate() is Fate.GONE


def test_another_process_under_the_same_number_and_one_of_another_machine() -> None:
    own = Identity.own()
    assert own.fate() is Fate.ALIVE
    assert replace(own, born="1").fate() is Fate.GONE
    assert replace(own, machine="elsewhere").fate() is Fate.UNKNOWN
    assert replace(own, machine="").fate() is Fate.UNKNOWN


_WRITE = """
from fxchimera.runtime.failures.place import Place, label
place = Place()
place.write(label("stage 1 (down), micro-batch 2"))
print(place.path, flush=True)
import time; time.sleep(60)
"""


def test_last_words_outlive_the_process_and_leave_no_file() -> None:
    with subprocess.Popen([sys.executable, "-c", _WRITE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = process.stdout.readline().strip()
        words = Words(path)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        process.kill()
    assert str(words) == "stage 1 (down), micro-batch 2"
    assert not os.path.exists(path)
    with pytest.raises(OSError, match="No such file"):
        Words(path)


def test_a_place_is_read_until_it_is_given_up() -> None:
    place = Place()
    words = Words(place.path)
    assert str(place) == str(words) == IDLE.decode().rstrip()
    place.write(label("é" * 500))
    assert str(place) == str(words)
    place.remove()
    place.remove()
    place.write(label("for nobody"))
    assert str(place) == "for nobody"
    assert str(words) != "for nobody"
