"""What a measurement was made on."""

import ctypes
import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("adambs", "torch", "numpy", "numba")


def describe() -> dict[str, Any]:
    """Processor, cores, threads, system and versions; nothing that names a person, a host or a path."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
        "date": datetime.now(UTC).date().isoformat(),
    }


def keep_memory() -> bool:
    """Let this process keep the memory that it frees; whether the C library can do so.

    The tensors of a step are freed at its end and asked for again at the next. In between, glibc gives large
    blocks back to the system, and getting fresh pages was a third of the time of a small CNN's step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        return False
    trim_threshold, mmap_threshold = -1, -3  # as malloc.h has them; the second may be 32 MiB at most
    return bool(mallopt(trim_threshold, 2**31 - 1) and mallopt(mmap_threshold, 2**25))


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
