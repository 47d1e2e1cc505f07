"""Routing as Pallas-Triton kernels: the choice of experts by row, and the choice of slots over all rows.

`select` gives every row (or block of rows) its own program. `place` counts, for every entry of the flattened ids, its
equals earlier in the block of `BLOCK` entries, and for every slot its rows: programs of both kinds only read the ids,
so that nothing has to be zeroed, no atomics are needed and the result does not depend on the order of programs.
Both in one launch of one program take two to three times as long as the two, even for 8 rows: a processor is alone then.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float32, Int

from dspark_kernels.routing.reference import Score, score_function
from dspark_kernels.routing.replicas import BLOCK

MAX_EXPERTS, MAX_TOP_K = 512, 8
ENTRIES, SLOTS = 32, 16  # entries and slots of one program of `place`


class Tables(NamedTuple):
    """A placement as the kernels read it: flat int32 arrays, and the slots' experts and replica numbers."""

    expert_slots: Int[np.ndarray, "E*R"]
    replica_count: Int[np.ndarray, "E"]
    slot_expert: Int[np.ndarray, "S"]
    slot_replica: Int[np.ndarray, "S"]

    @property
    def replicas(self) -> int:
        """Width of the table of slots."""
        return self.expert_slots.size // self.replica_count.size

    @classmethod
    def build(cls, expert_slots: Int[np.ndarray, "E R"], replica_count: Int[np.ndarray, "E"]) -> "Tables":
        """Raises ValueError unless the used entries of `expert_slots` are the slots 0 … S - 1, each once."""
        expert, replica = np.nonzero(np.arange(expert_slots.shape[1]) < replica_count[:, None])
        slots = expert_slots[expert, replica]
        order = np.argsort(slots, kind="stable")
        if not np.array_equal(slots[order], np.arange(slots.size)):
            raise ValueError(f"expert_slots must name every slot 0 … {slots.size - 1} once, within replica_count")
        flat = (expert_slots.reshape(-1), replica_count, expert[order], replica[order])
        return cls(*(np.ascontiguousarray(v, np.int32) for v in flat))

    @classmethod
    def identity(cls, num_experts: int) -> "Tables":
        """Slot = expert."""
        return cls.build(np.arange(num_experts)[:, None], np.ones(num_experts, np.int32))


def _power(n: int) -> int:
    return pl.next_power_of_2(max(n, 1))


def _select(first, block, refs, outputs, *, shape, k, scale, score: Score) -> None:
    """Chooses for rows first … first + block - 1 and stores ids and weights, flat [T * k]."""
    logits_ref, valid_ref, bias_ref, given_ref = refs
    ids_ref, weights_ref = outputs
    rows_all, experts = shape
    row = first + jnp.arange(block)
    col = jnp.arange(_power(experts))[None, :]
    inside = row < rows_all
    keep = plt.load(valid_ref.at[row], mask=inside, other=False) & inside
    lane = jnp.arange(MAX_TOP_K)[None, :]
    # A row that is not kept may hold anything: it is never read.
    at_logits, mask = row[:, None] * experts, keep[:, None] & (col < experts)
    if given_ref is None or score == "softmax":
        x = plt.load(logits_ref.at[at_logits + col], mask=mask, other=-jnp.inf)
        x = jnp.where(keep[:, None], x, 0.0)
    if given_ref is None:
        choice = score_function(x, score)
        if bias_ref is not None:
            choice = choice + plt.load(bias_ref.at[col], mask=col < experts, other=0.0)
        choice = jnp.where(col < experts, choice, -jnp.inf)
        ids = jnp.zeros((block, MAX_TOP_K), jnp.int32)
        for j in range(k):
            best = jnp.argmax(choice, axis=1)[:, None]  # the lowest id of equal scores
            ids = jnp.where(lane == j, best, ids)
            choice = jnp.where(col == best, -jnp.inf, choice)
    else:
        ids = plt.load(given_ref.at[row[:, None] * k + lane], mask=keep[:, None] & (lane < k), other=0)
    # Reading the chosen logits again is quicker than a sum over the experts for each of them.
    chosen = plt.load(logits_ref.at[at_logits + ids], mask=keep[:, None] & (lane < k), other=0.0)
    if score == "softmax":
        top = jnp.max(x, axis=1, keepdims=True)
        weights = jnp.exp(chosen - top) / jnp.sum(jnp.where(col < experts, jnp.exp(x - top), 0.0), axis=1, keepdims=True)
    else:
        weights = score_function(chosen, score)
    weights = jnp.where(lane < k, weights, 0.0)
    weights = weights / jnp.sum(weights, axis=1, keepdims=True) * scale
    at, mask = row[:, None] * k + lane, inside[:, None] & (lane < k)
    plt.store(ids_ref.at[at], jnp.where(keep[:, None], ids, -1), mask=mask)
    plt.store(weights_ref.at[at], jnp.where(keep[:, None], weights, 0.0), mask=mask)


def _place_entries(start, width, ids_ref, refs, slots_ref, *, entries, replicas) -> None:
    """Slots of the entries start … start + width - 1, which lie in one block of `BLOCK`."""
    expert_slots_ref, replica_count_ref, _, _, offset_ref = refs
    at = start + jnp.arange(width)
    expert = plt.load(ids_ref.at[at], mask=at < entries, other=-1)
    valid = (expert >= 0) & (expert < replica_count_ref.shape[0])
    safe = jnp.where(valid, expert, 0)
    where = safe * replicas
    if replicas > 1:
        block = start // BLOCK
        before = block * BLOCK + jnp.arange(_power(min(entries, BLOCK)))
        other = plt.load(ids_ref.at[before], mask=before < jnp.minimum(start + width, entries), other=-1)
        equal = (other[None, :] == expert[:, None]) & (before[None, :] < at[:, None])
        turn = jnp.sum(equal.astype(jnp.int32), axis=1) + block + offset_ref[0]
        where = where + jax.lax.rem(turn, plt.load(replica_count_ref.at[safe]))
    slot = jnp.where(valid, plt.load(expert_slots_ref.at[where]), -1)
    plt.store(slots_ref.at[at], slot, mask=at < entries)


def _place_rows(start, width, ids_ref, refs, rows_ref, *, entries, replicas) -> None:
    """How many entries go to the slots start … start + width - 1: a rule on the counts of their experts by block."""
    _, replica_count_ref, slot_expert_ref, slot_replica_ref, offset_ref = refs
    slot = start + jnp.arange(width)
    mask = slot < rows_ref.shape[0]
    expert = plt.load(slot_expert_ref.at[slot], mask=mask, other=-1)
    replica = plt.load(slot_replica_ref.at[slot], mask=mask, other=0)
    number = plt.load(replica_count_ref.at[jnp.maximum(expert, 0)])
    place = jnp.arange(_power(min(entries, BLOCK)))

    def count(block, total):
        at = block * BLOCK + place
        ids = plt.load(ids_ref.at[at], mask=at < entries, other=-2)
        found = jnp.sum((ids[None, :] == expert[:, None]).astype(jnp.int32), axis=1)
        if replicas == 1:
            return total + found
        # Of the occurrences 0 … found - 1, those n with (n + block + offset) mod number == replica.
        first = jax.lax.rem(replica - jax.lax.rem(block + offset_ref[0], number) + number, number)
        return total + jax.lax.div(found - first + number - 1, number)

    blocks = -(-entries // BLOCK)
    zero = jnp.zeros((width,), jnp.int32)
    total = count(0, zero) if blocks == 1 else jax.lax.fori_loop(0, blocks, count, zero)
    plt.store(rows_ref.at[slot], total, mask=mask)


def _inputs(logits, valid, bias, given) -> tuple[tuple[Array, ...], tuple[bool, bool]]:
    """Flat arrays, and which of the optional ones are there."""
    arrays = [logits.astype(jnp.float32).reshape(-1), valid]
    arrays += [] if bias is None else [bias.astype(jnp.float32)]
    arrays += [] if given is None else [given.astype(jnp.int32).reshape(-1)]
    return tuple(arrays), (bias is not None, given is not None)


def _named(refs, present: tuple[bool, bool]):
    rest = list(refs[2:])
    bias = rest.pop(0) if present[0] else None
    return refs[0], refs[1], bias, rest.pop(0) if present[1] else None


def select(
    logits: Float32[Array, "T E"],
    *,
    top_k: int,
    scale: float,
    valid: Bool[Array, "T"],
    bias: Float32[Array, "E"] | None = None,
    ids: Int[Array, "T k"] | None = None,
    score: Score = "sqrt_softplus",
    rows: int = 1,
    warps: int = 1,
    interpret: bool = False,
) -> tuple[Int[Array, "T k"], Float32[Array, "T k"]]:
    """Ids and weights (`reference.route`); each program has `rows` rows and `warps` warps."""
    shape = logits.shape
    arrays, present = _inputs(logits, valid, bias, ids)

    def kernel(*refs):
        inputs, outputs = refs[: len(arrays)], refs[len(arrays) :]
        first = pl.program_id(0) * rows
        _select(first, rows, _named(inputs, present), outputs, shape=shape, k=top_k, scale=scale, score=score)

    size = shape[0] * top_k
    out = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(shape[0], rows),),
        out_shape=(jax.ShapeDtypeStruct((size,), jnp.int32), jax.ShapeDtypeStruct((size,), jnp.float32)),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="route_select",
    )(*arrays)
    return out[0].reshape(-1, top_k), out[1].reshape(-1, top_k)


def place(
    ids: Int[Array, "T k"],
    tables: Tables,
    offset: int | Int[Array, ""],
    *,
    count: bool = True,
    warps: int = 4,
    interpret: bool = False,
) -> tuple[Int[Array, "..."], ...]:
    """Slots (`replicas.choose_slots`) and, with `count`, rows by slot."""
    entries, slots, replicas = ids.size, tables.slot_expert.size, tables.replicas
    entry_programs = pl.cdiv(entries, ENTRIES)

    def kernel(ids_ref, *refs):
        tables_refs, outputs = refs[:5], refs[5:]
        program = pl.program_id(0)

        @pl.when(program < entry_programs)
        def _():
            _place_entries(program * ENTRIES, ENTRIES, ids_ref, tables_refs, outputs[0], entries=entries, replicas=replicas)

        if count:

            @pl.when(program >= entry_programs)
            def _():
                first = (program - entry_programs) * SLOTS
                _place_rows(first, SLOTS, ids_ref, tables_refs, outputs[1], entries=entries, replicas=replicas)

    shapes = [jax.ShapeDtypeStruct((entries,), jnp.int32)] + [jax.ShapeDtypeStruct((slots,), jnp.int32)] * count
    out = pl.pallas_call(
        kernel,
        grid=(entry_programs + count * pl.cdiv(slots, SLOTS),),
        out_shape=shapes,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="route_place",
    )(ids.reshape(-1), *tables, _offset(offset))
    return (out[0].reshape(ids.shape), *out[1:])


def _offset(offset: int | Int[Array, ""]) -> Int[Array, "1"]:
    return jnp.asarray(offset, jnp.int32).reshape(1)
