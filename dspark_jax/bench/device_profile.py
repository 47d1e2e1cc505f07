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
      working_us: as `busy_us`, without NCCL's kernels, which also run while they wait for other devices.
    """

    busy_us: float
    launches: float
    kernels: tuple[Kernel, ...]
    working_us: float = 0.0

    @property
    def collectives_us(self) -> float:
        """Microseconds of NCCL's kernels, waiting included."""
        return sum(kernel.us for kernel in self.kernels if _collective(kernel.name))


def profiled(run: Callable[[], Any], ticks: int) -> DeviceProfile | None:
    """Runs `run`, which must wait for its `ticks` ticks, under jax.profiler. None where no GPU has a timeline."""
    with tempfile.TemporaryDirectory() as folder:
        data = _profiles(run, folder)  # planes are views of it
        return summary((plane for one in data for plane in one.planes), ticks)


def profiled_each(run: Callable[[], Any], ticks: int) -> list[DeviceProfile] | None:
    """As `profiled`, for every GPU that has a timeline, in the order of their numbers."""
    with tempfile.TemporaryDirectory() as folder:
        data = _profiles(run, folder)
        return each((plane for one in data for plane in one.planes), ticks)


def each(planes: Iterable[Any], ticks: int) -> list[DeviceProfile] | None:
    """`summary` of each GPU's plane by itself; None where none has events."""
    numbered = [(int(found[-1]), plane) for plane in planes if (found := re.findall(r"GPU:(\d+)", plane.name))]
    numbered.sort(key=lambda pair: pair[0])
    return [one for _, plane in numbered if (one := summary([plane], ticks)) is not None] or None


def _profiles(run: Callable[[], Any], folder: str) -> list[Any]:
    with jax.profiler.trace(folder):
        run()
    files = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    return [jax.profiler.ProfileData.from_file(file) for file in files]


def summary(planes: Iterable[Any], ticks: int) -> DeviceProfile | None:
    """Of `jax.profiler.ProfileData.planes`; None where no GPU's plane has events."""
    count, total = Counter[str](), Counter[str]()
    spans: list[tuple[float, float]] = []
    working: list[tuple[float, float]] = []
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
                if not _collective(name):
                    working.append(spans[-1])
    if not spans:
        return None
    kernels = tuple(Kernel(name, ns / 1e3 / ticks, count[name] / ticks) for name, ns in total.most_common())
    return DeviceProfile(_covered(spans) / 1e3 / ticks, len(spans) / ticks, kernels, _covered(working) / 1e3 / ticks)


def _collective(kernel: str) -> bool:
    return "nccl" in kernel.lower()


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
