"""From the ring's counters to statistics by iteration: an iteration is one pass of a microbatch through all layers.

Pipeline rank p works in tick t on what the first rank took in tick t - p. So iteration i has the layers of rank p from
tick i + p, and all its counts are there P - 1 ticks after it began. Iterations are numbered by the tick in which they
began, from 0; warm-up is not counted.
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from dspark_jax.eplb.statistics import ExpertStatistics, StatisticsError, StatisticsRecorder


class ExpertCounter:
    """Collects a running engine's counts, a recorder for each expert rank, over a window of iterations.

    Args:
      layers: for every pipe rank the layers of its positions (`PipelineSpec.expert_layers`).
      expert_ranks: ranks that request rows are split over; each counts its own.
      num_experts, top_k: of every layer.
      window: first iteration, and the first that is not counted any more.

    Raises StatisticsError for a window that is empty or begins below 0.
    """

    def __init__(
        self, layers: Sequence[Sequence[int]], expert_ranks: int, num_experts: int, top_k: int, window: tuple[int, int]
    ):
        self.layers = [tuple(own) for own in layers]
        self.recorders = [StatisticsRecorder(num_experts, top_k, *window) for _ in range(expert_ranks)]
        self._recent: deque[np.ndarray] = deque(maxlen=len(self.layers))
        self._ticks = 0

    @property
    def iterations(self) -> int:
        """Iterations that are complete, inside the window or not."""
        return max(0, self._ticks - len(self.layers) + 1)

    def add(self, counts: Int[np.ndarray, "P ticks ranks*positions E"]) -> None:
        """The next ticks' counts, `TickOutput.expert_counts` of one call."""
        pipe, ticks, _, experts = counts.shape
        by_rank = counts.reshape(pipe, ticks, len(self.recorders), -1, experts)
        for tick in range(ticks):
            self._recent.append(by_rank[:, tick])
            self._ticks += 1
            if len(self._recent) == pipe:
                self._record(self._ticks - pipe)

    def _record(self, iteration: int) -> None:
        order = [layer for own in self.layers for layer in own]
        for rank, recorder in enumerate(self.recorders):
            rows = [self._recent[p][p, rank, : len(own)] for p, own in enumerate(self.layers)]
            recorder.add(iteration, np.concatenate(rows), order)

    def statistics(self) -> ExpertStatistics:
        """What was counted so far.

        Raises StatisticsError if no iteration of the window is complete.
        """
        counts: dict[tuple[int, int], np.ndarray] = {}
        for recorder in self.recorders:
            for key, row in recorder.counts.items():
                counts[key] = counts.get(key, 0) + row
        if not counts:
            window = self.recorders[0].window
            raise StatisticsError(
                f"no iteration of the window [{window.start}, {window.stop}) was counted, of {self.iterations} in all;"
                " choose a window that the run reaches"
            )
        first = self.recorders[0]
        return ExpertStatistics(first.num_experts, first.top_k, len(self.recorders), counts)

    def write(self, folder: Path) -> None:
        """Writes every expert rank's file and `meta_info.json`; see `StatisticsRecorder.write`."""
        self.statistics()  # says how far the run came, if the window is empty
        for rank, recorder in enumerate(self.recorders):
            recorder.write(folder, rank)
