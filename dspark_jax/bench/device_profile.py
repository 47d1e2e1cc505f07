"""What a GPU did while a program ran: its kernels by name, and how long any of them was running."""

import glob
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax


class Kernel(NamedTuple):
    """Kernels of one name (numbers in names are left out): microseconds and launches of a tick."""

    name: str
    us: float
    launches: float


class DeviceProfile(NamedTuple):
    """One tick, in the mean.

    Attributes:
      busy_us: microseconds in which at least one kernel or copy ran.
      launches: kernels and copies.
      kernels: all of them, the most expensive first.
    """

    busy_us: float
    launches: float
    kernels: tuple[Kernel, ...]


def profiled(run: Callable[[], Any], ticks: int) -> DeviceProfile | None:
    """Runs `run`, which must wait for its `ticks` ticks, under jax.profiler. None where no GPU has a timeline."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = [jax.profiler.ProfileData.from_file(file) for file in files]
        return summary((plane for one in data for plane in one.planes), ticks)


def summary(planes: Iterable[Any], ticks: int) -> DeviceProfile | None:
    """Of `jax.profiler.ProfileData.planes`; None where no GPU's plane has events."""
    count, total = Counter[str](), Counter[str]()
    spans: list[tuple[float, float]] = []
    for plane in planes:
        if "GPU" not in plane.name.upper():
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):  # other lines repeat the events by module and operation
                continue
            for event in line.events:
                name = _name(event.name)
                count[name] += 1
                total[name] += event.duration_ns
                spans.append((event.start_ns, event.start_ns + event.duration_ns))
    if not spans:
        return None
    kernels = tuple(Kernel(name, ns / 1e3 / ticks, count[name] / ticks) for name, ns in total.most_common())
    return DeviceProfile(_covered(spans) / 1e3 / ticks, len(spans) / ticks, kernels)


def _name(event: str) -> str:
    """Kernels of one kind differ by numbers, which XLA gives out anew in every program."""
    return re.sub(r"[._]#$", "", re.sub(r"\d+", "#", event))


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals: streams may run side by side."""
    length, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, until))
        until = max(until, end)
    return length
