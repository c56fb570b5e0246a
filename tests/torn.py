"""Saves over an earlier save, cut off anywhere, and what can be loaded then; for the tests and ``benchmarks/trust.py``."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxchimera import FxChimeraError
from tests.killing import killed_after, killed_at
from tests.saving import Saver

__all__ = ["Torn", "damages"]

LAYERS = 4


@dataclass(frozen=True)
class Point:
    """What a run of training is at one step: every tensor of model and optimizer, and the numbers."""

    tensors: dict[str, Tensor]
    numbers: Any

    def same(self, other: Point) -> bool:
        if self.numbers != other.numbers or self.tensors.keys() != other.tensors.keys():
            return False
        return all(torch.equal(value, other.tensors[key]) for key, value in self.tensors.items())


class Torn:
    """A run with two saves: ``first`` is in the folder ``first``, and the run itself stands at ``second``."""

    def __init__(self, folder: Path) -> None:
        self.run = Saver(2, layers=LAYERS)
        self.first_folder, self.second_folder, self.folder = folder / "first", folder / "second", folder / "torn"
        self.run.train(1)
        self.run.save(self.first_folder)
        self.first = self.point()
        self.run.train(1)
        self.run.save(self.second_folder)
        self.second = self.point()

    def point(self) -> Point:
        """Where the run stands."""
        state = self.run.optimizer.state_dict()
        moments = {f"{number}.{key}": value.clone() for number, own in state["state"].items() for key, value in own.items()}
        tensors = {key: value.clone() for key, value in self.run.pipe.state_dict().items()}
        return Point(tensors | moments, (self.run.pipe._step, self.run.scheduler.state_dict(), state["param_groups"]))

    def save(self) -> None:
        self.run.save(self.folder)

    def cut(self, how: Callable[[Callable[[], None]], Any]) -> str:
        """Let ``how`` kill a second save over the first; returns "first" or "second", what is loaded then, else what is wrong."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.first_folder, self.folder)
        how(self.save)
        try:
            self.run.load(self.folder)
        except FxChimeraError as error:
            return f"nothing: {error}"
        found = self.point()
        self.run.load(self.second_folder)
        if not self.point().same(self.second):
            return "the second save is not what it was"
        return "first" if found.same(self.first) else "second" if found.same(self.second) else "a mixture"

    def calls(self) -> int:
        """The number of system calls of a whole save."""
        made: list[int] = []
        assert self.cut(lambda save: made.append(killed_at(save, None))) == "second"
        return made[0]

    def at_calls(self, stops: Iterable[int]) -> list[str]:
        """Kill before these system calls."""
        return [self.cut(lambda save, stop=stop: killed_at(save, stop)) for stop in stops]

    def at_times(self, seconds: Iterable[float]) -> list[str]:
        """Kill after these times."""
        return [self.cut(lambda save, after=after: killed_after(save, after)) for after in seconds]

    def accepted(self, damaged: Iterable[tuple[str, bytes]]) -> list[str]:
        """Load the second save with one file changed, each in turn; returns what was not refused, or has changed something."""
        wrong = []
        for name, content in damaged:
            path = self.second_folder / name
            whole = path.read_bytes()
            path.write_bytes(content)
            try:
                self.run.load(self.second_folder)
                wrong.append(f"{name} was accepted")
            except FxChimeraError:
                if not self.point().same(self.second):
                    wrong.append(f"{name} was refused too late")
            path.write_bytes(whole)
        return wrong

    def close(self) -> None:
        self.run.pipe.close()


def damages(folder: Path, flips: int, cuts: int, seed: int = 0) -> list[tuple[str, bytes]]:
    """Return that many files with one bit changed, or shortened, evenly over the files of a checkpoint."""
    chosen = random.Random(seed)
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    found = []
    for number in range(flips):
        name = sorted(files)[number % len(files)]
        content = bytearray(files[name])
        place = chosen.randrange(len(content))
        content[place] ^= 1 << chosen.randrange(8)
        found.append((name, bytes(content)))
    for number in range(cuts):
        name = sorted(files)[number % len(files)]
        size = len(files[name])
        left = (0, size - 1, 7, size // 2)[number // len(files)] if number // len(files) < 4 else chosen.randrange(size)
        found.append((name, files[name][:left]))
    return found
