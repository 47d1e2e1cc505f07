"""Our own solver: a local search on the maximum rank load that starts from other solvers' placements.

It never ends above the best of its starts, and puts two replicas of one expert on one rank only where it found no other
way to stay at or below that. (A second replica on the same rank spreads no load. It can still be the better use of a
slot that has to be filled: loads 10, 9, 1 on two ranks of two slots are level only with expert 0 twice on one rank.)
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int, Num

EPS = 1e-12  # relative; smaller differences of loads are rounding
_NONE = np.inf


def search(
    load: Num[np.ndarray, "L E"], starts: Sequence[Int[np.ndarray, "L slots"]], num_ranks: int
) -> Int[np.ndarray, "L slots"]:
    """Expert of every slot, layer by layer; on each rank in ascending order.

    Args:
      load: rows of each expert.
      starts: placements (at least one), all with equally many slots.
      num_ranks: expert ranks; they divide the slots.
    """
    load = np.asarray(load, np.float64)
    return np.stack([_solve_layer(row, [s[i] for s in starts], num_ranks) for i, row in enumerate(load)])


def _solve_layer(load: np.ndarray, starts: Sequence[np.ndarray], ranks: int) -> np.ndarray:
    given = [State.of(load, start, ranks) for start in starts]
    best = min(given, key=lambda state: state.peak)
    limit = best.peak * (1 + EPS)
    state = best.copy()
    _improve(state)
    _remove_duplicates(state, limit)
    _improve(state)
    found = [best, state]
    slots = len(starts[0])
    if slots // ranks <= len(load):
        distinct = spread(load, slots, ranks)
        _improve(distinct)
        found.append(distinct)
    return min((s for s in found if s.peak <= limit), key=lambda s: (s.duplicates, s.peak)).slots()


class State:
    """A placement as a table: replicas of each expert on each rank."""

    def __init__(self, load: Float[np.ndarray, "E"], count: Int[np.ndarray, "E ranks"]):
        self.load, self.count = load, count
        self._update()

    @classmethod
    def of(cls, load: np.ndarray, slot_to_expert: np.ndarray, ranks: int) -> "State":
        count = np.zeros((len(load), ranks), np.int64)
        np.add.at(count, (slot_to_expert, np.arange(len(slot_to_expert)) * ranks // len(slot_to_expert)), 1)
        return cls(load, count)

    def copy(self) -> "State":
        return State(self.load, self.count.copy())

    def slots(self) -> np.ndarray:
        """Expert of every slot."""
        experts = np.arange(len(self.load))
        return np.concatenate([np.repeat(experts, column) for column in self.count.T])

    def _update(self) -> None:
        self.replicas = self.count.sum(axis=1)
        self.size = self.load / self.replicas
        # Not a matrix product: BLAS libraries differ in the last bit, and ties must not depend on them.
        self.loads = (self.size[:, None] * self.count).sum(axis=0)
        self.peak = self.loads.max()
        self.duplicates = int(np.maximum(self.count - 1, 0).sum())

    def swap(self, a: int, rank_a: int, b: int, rank_b: int) -> None:
        """Exchanges a replica of `a` on one rank and one of `b` on another."""
        for expert, rank, step in ((a, rank_a, -1), (b, rank_a, 1), (b, rank_b, -1), (a, rank_b, 1)):
            self.count[expert, rank] += step
        self._update()

    def replace(self, old: int, rank: int, new: int) -> None:
        """Turns a replica of `old` on `rank` into one of `new`."""
        self.count[old, rank] -= 1
        self.count[new, rank] += 1
        self._update()

    def peaks_of_swaps(
        self, held: np.ndarray, rank: int, others: np.ndarray, other_ranks: np.ndarray
    ) -> Float[np.ndarray, "held others"]:
        """The larger load of the two ranks after each swap of `held` on `rank` with another; infinite where the swap
        would put two replicas of an expert on one rank.
        """
        shift = self.size[held][:, None] - self.size[others]
        peaks = np.maximum(self.loads[rank] - shift, self.loads[other_ranks] + shift)
        barred = (self.count[held][:, other_ranks] > 0) | (self.count[others, rank] > 0)
        return np.where(barred, _NONE, peaks)

    def loads_after(self, old: np.ndarray, rank: np.ndarray, new: np.ndarray) -> Float[np.ndarray, "n ranks"]:
        """Loads of all ranks after each single replacement."""
        less, more = self.load[old] / (self.replicas[old] - 1), self.load[new] / (self.replicas[new] + 1)
        loads = self.loads + self.count[old] * (less - self.size[old])[:, None]
        loads += self.count[new] * (more - self.size[new])[:, None]
        loads[np.arange(len(old)), rank] += more - less
        return loads


def _improve(state: State) -> None:
    """Swaps and replacements that lower the maximum, or the number of ranks that reach it, until none does.

    No step adds a duplicate. The bound is far above what is needed; it only makes the end certain.
    """
    for _ in range(10 * state.count.sum()):
        if not (_swap_from_peak(state) or _replace_at_peak(state)):
            return


def _swap_from_peak(state: State) -> bool:
    rank = int(np.argmax(state.loads))
    held = np.flatnonzero(state.count[:, rank])
    others, ranks = np.nonzero(state.count)
    peaks = state.peaks_of_swaps(held, rank, others, ranks)
    i, j = np.unravel_index(np.argmin(peaks), peaks.shape)
    if not peaks[i, j] < state.peak * (1 - EPS):
        return False
    state.swap(int(held[i]), rank, int(others[j]), int(ranks[j]))
    return True


def _replace_at_peak(state: State) -> bool:
    """Another replica for an expert of the fullest rank, or a lighter expert in place of a replica there."""
    peak_rank = int(np.argmax(state.loads))
    old, rank = np.nonzero((state.count > 0) & (state.replicas > 1)[:, None])
    here = np.flatnonzero(state.count[:, peak_rank])
    pairs, fresh = np.nonzero(state.count[:, rank].T == 0)
    useful = (rank[pairs] == peak_rank) | np.isin(fresh, here)
    old, rank, new = old[pairs[useful]], rank[pairs[useful]], fresh[useful]
    if not len(old):
        return False
    loads = state.loads_after(old, rank, new)
    peaks = loads.max(axis=1)
    near = state.peak * (1 - EPS)
    best = int(np.argmin(peaks))
    if not peaks[best] < near:
        reaching = np.where(peaks <= state.peak, (loads >= near).sum(axis=1), len(state.loads) + 1)
        best = int(np.argmin(reaching))
        if reaching[best] >= (state.loads >= near).sum():
            return False
    state.replace(int(old[best]), int(rank[best]), int(new[best]))
    return True


def _remove_duplicates(state: State, limit: float) -> None:
    """Takes second replicas off their rank as long as one step does it with no load above `limit`."""
    while any(_remove(state, int(e), int(rank), limit) for e, rank in np.argwhere(state.count > 1)):
        pass


def _remove(state: State, expert: int, rank: int, limit: float) -> bool:
    new = np.flatnonzero(state.count[:, rank] == 0)
    if len(new):
        peaks = state.loads_after(np.full(len(new), expert), np.full(len(new), rank), new).max(axis=1)
        best = int(np.argmin(peaks))
        if peaks[best] <= limit:
            state.replace(expert, rank, int(new[best]))
            return True
    others, ranks = np.nonzero(state.count)
    peaks = state.peaks_of_swaps(np.array([expert]), rank, others, ranks)[0]
    best = int(np.argmin(peaks))
    if peaks[best] <= limit:
        state.swap(expert, rank, int(others[best]), int(ranks[best]))
        return True
    return False


def spread(load: np.ndarray, slots: int, ranks: int) -> State:
    """A placement without duplicates: the heaviest replicas first, each to the lightest rank that lacks the expert.

    Needs no more slots a rank than experts.
    """
    replicas = _replicate(load, slots, ranks)
    size = load / replicas
    count = np.zeros((len(load), ranks), np.int64)
    room = slots // ranks
    for expert in np.repeat(*_by_size(size, replicas)):
        carried, held = (size[:, None] * count).sum(axis=0), count.sum(axis=0)
        free = (held < room) & (count[expert] == 0)
        if free.any():
            count[expert, np.argmin(np.where(free, carried, _NONE))] += 1
        else:
            _make_room(count, int(expert), int(np.argmin(held)), size)
    return State(load, count)


def _by_size(size: np.ndarray, replicas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-size, kind="stable")
    return order, replicas[order]


def _make_room(count: np.ndarray, expert: int, rank: int, size: np.ndarray) -> None:
    """Places `expert`, whose ranks are the only ones with room, by moving another expert from a full rank to `rank`.

    There is one: `expert` has fewer replicas so far than there are ranks, so some full rank lacks it; that rank holds
    more different experts than `rank` does.
    """
    movable = (count > 0) & (count[:, [rank]] == 0) & (count[expert] == 0)
    others, ranks = np.nonzero(movable)
    best = int(np.argmin(size[others]))
    count[others[best], ranks[best]] -= 1
    count[others[best], rank] += 1
    count[expert, ranks[best]] += 1


def _replicate(load: np.ndarray, slots: int, most: int) -> np.ndarray:
    """Replicas by expert, at most `most`: always another for the expert whose replicas carry most (ties: the one with
    the fewest, then the lowest id).
    """
    replicas = np.ones(len(load), np.int64)
    for _ in range(slots - len(load)):
        size = np.where(replicas < most, load / replicas, -1)
        replicas[np.lexsort((replicas, -size))[0]] += 1
    return replicas
