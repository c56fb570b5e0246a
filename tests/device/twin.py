"""Builds and loads ``twin.cpp``, an accelerator of two devices made of host memory; only for processes of their own.

Once it is loaded, torch has an accelerator for the rest of the process, which other tests do not expect.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import types
from pathlib import Path

import torch

__all__ = ["DEVICES", "compiler", "load"]

_SOURCE = Path(__file__).with_name("twin.cpp")
_CLOCKS = Path(__file__).with_name("clocks.h")
DEVICES = ("twin:0", "twin:1")


def compiler() -> str | None:
    """The C++ compiler, None if there is none."""
    return shutil.which("g++")


def load() -> None:
    """Make ``twin:0`` and ``twin:1`` devices of this process; building takes about 15 s, once for a version of torch."""
    torch.ops.load_library(str(_built()))
    torch.utils.rename_privateuse1_backend("twin")
    module = types.ModuleType("torch.twin")
    module.default_generators = [torch.default_generator] * 2  # what its operations draw from, as they run on the CPU
    module.is_available = lambda: True
    module.device_count = lambda: 2
    module.current_device = torch.accelerator.current_device_index
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device: torch.get_rng_state()
    module.set_rng_state = lambda state, device: torch.set_rng_state(state)
    torch._register_device_module("twin", module)


def _built() -> Path:
    name = hashlib.blake2b(_SOURCE.read_bytes() + _CLOCKS.read_bytes() + torch.__version__.encode(), digest_size=8).hexdigest()
    built = Path(tempfile.gettempdir()) / f"fxchimera-twin-{os.getuid()}-{name}.so"
    if not built.exists():
        root, path = Path(torch.__file__).parent, compiler()
        assert path is not None, "no C++ compiler"
        made = built.with_suffix(f".{os.getpid()}")
        folders = [f"-I{root / folder}" for folder in ("include", "include/torch/csrc/api/include")]
        libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
        subprocess.run(
            [path, "-std=c++20", "-O0", "-shared", "-fPIC", str(_SOURCE), *folders, "-o", str(made), *libraries], check=True
        )
        made.replace(built)
    return built
