"""Routing of rows to experts and slots: the reference on CPU, Pallas-Triton kernels on CUDA."""

import jax
import numpy as np
from jaxtyping import Array, Bool, Float32, Int

from dspark_kernels.lowerings import Implementation, choose, with_reference_gradient
from dspark_kernels.routing import reference, replicas, triton
from dspark_kernels.routing.reference import Routing, Score, SlotRouting


def _unsuited(experts: int, top_k: int, *tables: object) -> str | None:
    if experts > triton.MAX_EXPERTS or not 1 <= top_k <= min(triton.MAX_TOP_K, experts):
        return f"{experts} experts, top_k {top_k} (at most {triton.MAX_EXPERTS} and {triton.MAX_TOP_K})"
    if any(isinstance(table, jax.Array) for table in tables):
        return "the tables are jax arrays (expected numpy)"
    return None


def route(
    logits: Float32[Array, "B E"],
    *,
    top_k: int,
    scale: float,
    valid: Bool[Array, "B"],
    bias: Float32[Array, "E"] | None = None,
    ids: Int[Array, "B k"] | None = None,
    score: Score = "sqrt_softplus",
    implementation: Implementation | None = None,
) -> Routing:
    """`reference.route`. The kernel: up to 512 experts and 8 of them chosen, one launch."""
    lowering = choose(implementation, _unsuited(logits.shape[1], top_k))
    options = {"top_k": top_k, "scale": scale, "score": score}

    def plain(logits, valid, bias, ids):
        return reference.route(logits, valid=valid, bias=bias, ids=ids, **options)

    def kernel(logits, valid, bias, ids):
        interpret = lowering == "interpret"
        return Routing(*triton.select(logits, valid=valid, bias=bias, ids=ids, interpret=interpret, **options))

    if lowering == "reference":
        return plain(logits, valid, bias, ids)
    return with_reference_gradient(kernel, plain, logits, valid, bias, ids)


def choose_slots(
    ids: Int[Array, "B k"],
    expert_slots: Int[np.ndarray, "E R"] | Int[Array, "E R"],
    replica_count: Int[np.ndarray, "E"] | Int[Array, "E"],
    *,
    offset: int | Int[Array, ""] = 0,
    implementation: Implementation | None = None,
) -> Int[Array, "B k"]:
    """`replicas.choose_slots`. The kernel: tables in numpy, one launch."""
    lowering = choose(implementation, _unsuited(1, 1, expert_slots, replica_count))
    if lowering == "reference":
        return replicas.choose_slots(ids, expert_slots, replica_count, offset=offset)
    tables = triton.Tables.build(np.asarray(expert_slots), np.asarray(replica_count))
    return triton.place(ids, tables, offset, count=False, interpret=lowering == "interpret")[0]


def route_to_slots(
    logits: Float32[Array, "B E"],
    *,
    top_k: int,
    scale: float,
    valid: Bool[Array, "B"],
    bias: Float32[Array, "E"] | None = None,
    ids: Int[Array, "B k"] | None = None,
    score: Score = "sqrt_softplus",
    expert_slots: Int[np.ndarray, "E R"] | None = None,
    replica_count: Int[np.ndarray, "E"] | None = None,
    offset: int | Int[Array, ""] = 0,
    implementation: Implementation | None = None,
) -> SlotRouting:
    """`reference.route_to_slots`. The kernels: two launches."""
    lowering = choose(implementation, _unsuited(logits.shape[1], top_k))
    interpret = lowering == "interpret"
    options = {"top_k": top_k, "scale": scale, "score": score}

    def plain(logits, valid, bias, ids, offset):
        placement = {"expert_slots": expert_slots, "replica_count": replica_count, "offset": offset}
        return reference.route_to_slots(logits, valid=valid, bias=bias, ids=ids, **options, **placement)

    def kernel(logits, valid, bias, ids, offset):
        if expert_slots is None or replica_count is None:
            tables = triton.Tables.identity(logits.shape[1])
        else:
            tables = triton.Tables.build(expert_slots, replica_count)
        rows = {"valid": valid, "bias": bias, "ids": ids, "interpret": interpret, **options}
        chosen = triton.select(logits, **rows)
        return SlotRouting(*chosen, *triton.place(chosen[0], tables, offset, interpret=interpret))

    if lowering == "reference":
        return plain(logits, valid, bias, ids, offset)
    return with_reference_gradient(kernel, plain, logits, valid, bias, ids, offset)
