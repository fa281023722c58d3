"""Programs on a machine without a GPU whose driver is ``driver/libcuda.c``. Not a test itself."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

HERE = Path(__file__).parent
SOURCE = HERE / "driver" / "libcuda.c"
FLAGS = "-O1 -std=gnu11 -Wall -Werror -shared -fPIC -fvisibility=hidden -Wl,-soname,libcuda.so.1"


def build(folder: Path) -> None:
    """Compile the stand-in as ``libcuda.so.1`` into a folder."""
    command = [os.environ.get("CC", "gcc"), *FLAGS.split(), "-o", folder / "libcuda.so.1", SOURCE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def require_compiler() -> None:
    """Skip the test on a machine without a C compiler."""
    if shutil.which(os.environ.get("CC", "gcc")) is None:
        pytest.skip("no gcc: set CC")


def run(program: str, *arguments: str, arch: str, folder: Path, paths: tuple[Path, ...] = (), **environment: str):
    """Run a program of this folder with the stand-in, with two GPUs of an architecture such as ``"sm_90"``.

    Args:
        folder: an empty folder, for the stand-in and its log.
        paths: folders from which the program imports packages before installed ones.

    Returns:
        (what the program printed, as JSON; the log of the stand-in: a list of launches and refusals).
    """
    build(folder)
    log = folder / "log"
    log.touch()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "FMOE_"))}
    kept |= {"STAND_IN_ARCH": arch.removeprefix("sm_"), "STAND_IN_LOG": str(log), "LD_LIBRARY_PATH": str(folder)}
    kept |= {"TRITON_LIBCUDA_PATH": str(folder), "PYTHONPATH": os.pathsep.join(map(str, (*paths, HERE.parents[1])))}
    command = [sys.executable, str(HERE / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**kept, **environment}, timeout=550)
    lines = log.read_text().splitlines()
    assert done.returncode == 0, "\n".join([done.stderr[-3000:], f"exit status {done.returncode}", *lines[-1:]])
    return json.loads(done.stdout), [json.loads(line) for line in lines]


class Gpus:
    """Make torch.cuda answer as on a machine with two GPUs; tensors stay on the CPU.

    As on such a machine, a thread has no context of the driver until a device other than the first is chosen.

    Attributes:
        streams: the current stream of each device, as the driver's handle; 0 for the default one.
    """

    def __init__(self):
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._of_thread = threading.local()
        self.streams = [0, 0]
        arch = int(os.environ["STAND_IN_ARCH"])
        for name, answer in {
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "get_device_capability": lambda device=None: (arch // 10, arch % 10),
            "get_device_name": lambda device=None: "stand-in",
            "current_device": self.current,
            "current_stream": lambda device: SimpleNamespace(cuda_stream=self.streams[self._index(device)]),
            "is_current_stream_capturing": lambda: False,
            "device": self._device,
        }.items():
            setattr(torch.cuda, name, answer)

    def current(self) -> int:
        """Return the current device of this thread."""
        return getattr(self._of_thread, "index", 0)

    def choose(self, index: int) -> None:
        """Make a device and its context current in this thread."""
        context = ctypes.c_void_p()
        assert self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), index) == 0
        assert self._driver.cuCtxSetCurrent(context) == 0
        self._of_thread.index = index

    def make_stream(self, index: int) -> None:
        """Make a new stream the current one of a device."""
        stream = ctypes.c_void_p()
        with self._device(index):
            assert self._driver.cuStreamCreate(ctypes.byref(stream), 0) == 0
        self.streams[index] = stream.value

    def _index(self, device: torch.device | int | str | None) -> int:
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        return self.current() if index is None else index

    def _device(self, device):
        gpus = self
        index = self._index(device)

        class Chosen:
            def __enter__(self):
                self.previous = gpus.current()
                if index != self.previous:
                    gpus.choose(index)

            def __exit__(self, *error):
                if gpus.current() != self.previous:
                    gpus.choose(self.previous)

        return Chosen()
