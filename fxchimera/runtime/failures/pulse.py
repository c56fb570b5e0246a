"""Signs of life, so that a process that is frozen or killed is named within seconds, although its connections say nothing.

    every process   twice a second    beat[p] = how often, who, and where it is           (in the failure store)
    process 0       twice a second    reads all beats, and asks the system after the processes of its own machine
    the others      while they wait   notice when process 0, which hosts the store, does not answer

A beat comes from a thread of its own, so a slow rank beats on.  A call that keeps the interpreter to itself silences it; on one
machine the system knows better, and from another machine a longer silence is needed.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fxchimera.runtime.failures.fate import Fate, Identity
from fxchimera.runtime.failures.place import Place, Words

__all__ = ["Pulse"]

_PERIOD_SECONDS = 0.5
_STOPPED_SECONDS = 5.0  # how long a process of this machine may be stopped
_SILENT_SECONDS = 60.0  # how long one of another machine may say nothing
_AWAY_SECONDS = 2.0  # who has not looked for this long may have been stopped, and starts counting anew
_LAST_WORD_SECONDS = 0.1  # how long the last beat of a process that has ended may be on the way
# seconds that a process whose launcher is gone has, until it is sent what torchrun sends to end one, and then to make sure
_FOLLOWING = ((2.5, signal.SIGTERM), (30.0, signal.SIGKILL))
_BEAT, _LEFT = "beat of {}", "left"
_EVER = datetime.timedelta(days=1000)


@dataclass(slots=True)
class _Heard:
    """What is known of a process: its last beat, when that changed, and on this machine the page with its words."""

    beat: str
    when: float
    page: Words | None = None

    def __post_init__(self) -> None:
        if self.page is None and self.identity is not None and self.identity.fate() in (Fate.ALIVE, Fate.STOPPED):
            with contextlib.suppress(OSError, ValueError):  # it has left meanwhile
                self.page = Words(self.beat.split("|", 3)[2])

    @property
    def identity(self) -> Identity | None:
        """None when it has left."""
        return None if self.beat == _LEFT else Identity.parse(self.beat.split("|")[1])

    def where(self) -> str:
        """What the process has written last, or what its last beat says."""
        return str(self.page or self.beat.split("|", 3)[3])


class Pulse:
    """The beats of one process, and its watch over the others.

    Args:
        store: The failure store, which process 0 hosts; the pulse makes a connection of its own to it.
        process: The number of this process.
        size: How many processes there are.
        place: Where this process writes down what it is doing.
        publish: Is told which process it is and what has become of it, and tells the others through the store.
        note: The same, when process 0 does not answer, so neither does the store.
    """

    def __init__(
        self,
        store: TCPStore,
        process: int,
        size: int,
        place: Place,
        *,
        publish: Callable[[int, str], object],
        note: Callable[[int, str], object],
    ) -> None:
        # the connection is made here and not by the thread, which may first run when process 0 and its store have left already
        self._store = TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
        self._store.set_timeout(_EVER)
        self._process, self._size = process, size
        self._place, self._publish, self._note = place, publish, note
        self._own, self._count = Identity.own(), 0
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._stopped = threading.Event()
        self._asked = False
        self._answered = self._looked = time.monotonic()
        self._since = self._answered
        store.set(_BEAT.format(process), self._beat())
        self._heard = {0: _Heard(store.get(_BEAT.format(0)).decode(), self._answered)}
        self._thread = threading.Thread(target=self._run, name="fxchimera-pulse", daemon=True)
        self._thread.start()

    def meet(self) -> None:
        """Hear all others for the first time, who have all joined: of one that is killed soon, its words are at hand then."""
        beats = self._store.multi_get([_BEAT.format(process) for process in range(self._size)])
        for process, beat in enumerate(map(bytes.decode, beats)):
            if process not in self._heard:
                self._heard[process] = _Heard(beat, time.monotonic())

    def look(self) -> None:
        """Report process 0 if it has not answered; called again and again by whoever waits for a message."""
        now = time.monotonic()
        if now - self._looked > _AWAY_SECONDS:
            self._since = now
        self._looked = now
        silence = now - max(self._answered, self._since)
        if self._process == 0 or self._stopped.is_set() or silence < _STOPPED_SECONDS:
            return
        if (why := self.fate_of(0, silence)) is not None:
            self._note(0, why)

    def fate_of(self, process: int, silence: float = 0.0) -> str | None:
        """Ask the system of this machine what is wrong with a process, which has been silent for some seconds; None for nothing."""
        last = self._heard.get(process)
        why = _verdict(last.identity, silence) if last is not None and last.identity is not None else None
        return None if why is None or last is None else f"{why}; it was at: {last.where()}"

    def words(self, process: int) -> str | None:
        """What a process says it is doing; None when it has not been heard, or has left."""
        last = self._heard.get(process)
        return None if last is None or last.identity is None else last.where()

    def inquire(self) -> None:
        """Listen once more to all others; on one machine :meth:`words` knows without."""
        self._asked = True

    def stop(self, seconds: float | None = None) -> None:
        """End the beats: this process leaves of its own will; ``seconds`` is how long the last beat may take."""
        self._stopped.set()
        self._thread.join(timeout=2 * _PERIOD_SECONDS if seconds is None else seconds)

    def _beat(self) -> str:
        self._count += 1
        return f"{self._count}|{self._own}|{self._place.path}|{self._place}"

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # the store is gone: the watcher of the failure says so
            while not self._stopped.wait(_PERIOD_SECONDS):
                self._store.set(_BEAT.format(self._process), self._beat())
                if self._process == 0 or self._asked or len(self._heard) < self._size:
                    self._asked = False
                    self._listen()
                else:
                    self._store.get(_BEAT.format(0))
                self._answered = time.monotonic()
                self._miss_launcher()
            self._store.set(_BEAT.format(self._process), _LEFT)

    def _listen(self) -> None:
        """Read the beats of all who have joined; process 0 reports the first process that is not well."""
        now = time.monotonic()
        away = now - self._answered > _AWAY_SECONDS
        there = [process for process in range(self._size) if process in self._heard or self._store.check([_BEAT.format(process)])]
        beats = self._store.multi_get([_BEAT.format(process) for process in there])
        for process, beat in zip(there, map(bytes.decode, beats), strict=True):
            last = self._heard.get(process)
            if last is None or last.beat != beat or away:
                self._heard[process] = last = _Heard(beat, now, last.page if last is not None else None)
            if self._process != 0 or process == 0:
                continue
            why = self.fate_of(process, now - last.when)
            if why is not None and not self._has_left(process):
                self._publish(process, why)
                self._stopped.set()
                return

    def _has_left(self, process: int) -> bool:
        """Whether a process that seems gone has said so meanwhile."""
        time.sleep(_LAST_WORD_SECONDS)
        return bool(self._store.get(_BEAT.format(process)).decode() == _LEFT)

    def _miss_launcher(self) -> None:
        if self._parent is not None and os.getppid() != self._parent:
            threading.Thread(target=_follow, name="fxchimera-follow", daemon=True).start()
            self._publish(self._process, f"its launcher, torchrun (process {self._parent}), is gone")
            self._stopped.set()


def _follow() -> None:
    """End this process as its launcher would have, and nobody else will: a call of the user may have no end, or catch the error."""
    for seconds, sent in _FOLLOWING:
        time.sleep(seconds)
        os.kill(os.getpid(), sent)


def _verdict(identity: Identity, silence: float) -> str | None:
    """Say what is wrong with a process that has been silent for so many seconds; None when that is nothing yet."""
    fate = identity.fate()
    if fate is Fate.GONE:
        return f"its process ({identity.pid}) is gone: killed, or crashed, or left without a word"
    if fate is Fate.STOPPED and silence > _STOPPED_SECONDS:
        return f"its process ({identity.pid}) has been stopped for {silence:.0f} s"
    if fate is Fate.UNKNOWN and silence > _SILENT_SECONDS:
        return f"its process, on another machine, has given no sign of life for {silence:.0f} s"
    return None
