"""Ways of rows to their experts (`models.dispatch`), timed with and without the experts' products, by rows of a device.

`all-gather` is what models run; the others stand beside it as peers. Routers are even: every row chooses its experts at
random, the same rows for all ways. Differences of results from the first way are part of the record.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.bench.mesh_common import Shape, case, median_us, random_leaves, rounded
from dspark_jax.models.dispatch import EXCHANGES
from dspark_jax.parallel.mesh import EXPERT
from dspark_kernels.block_scaled import BlockScaled
from dspark_kernels.expert_mlp import expert_mlp
from dspark_kernels.formats import block_shapes

STEPS = 8  # layers of a call, one after the other
_SPLIT = PartitionSpec(EXPERT)


class Layer:
    """The routed experts of one layer on the `expert` axis, with random weights; one slot an expert by default."""

    def __init__(self, shape: Shape, mesh: Mesh, slots: int | None = None):
        self.config, self.mesh, self.dtype = shape.config, mesh, jnp.dtype(shape.dtype)
        self.ranks = mesh.shape[EXPERT]
        self.slots = slots or self.config.n_routed_experts
        shapes = weight_shapes(shape, self.slots)
        self.weights = random_leaves(shapes, dict.fromkeys(shapes, _SPLIT), mesh, self.config.n_routed_experts)

    def rows(self, ids: np.ndarray) -> tuple[jax.Array, ...]:
        """Random rows, these slots of theirs, and equal weights, placed."""
        x = np.random.default_rng(1).standard_normal((len(ids), self.config.hidden_size), np.float32)
        weights = np.full(ids.shape, 1 / ids.shape[1], np.float32)
        place = partial(jax.device_put, device=NamedSharding(self.mesh, _SPLIT))
        return place(x.astype(self.dtype)), place(ids.astype(np.int32)), place(weights)

    def program(self, way: str, steps: int = STEPS, products: bool = True) -> Callable[..., jax.Array]:
        """(weights, x, ids, router weights) -> rows after so many layers; without `products` experts hand rows on."""
        exchange, limit, own = EXCHANGES[way], self.config.swiglu_limit, self.slots // self.ranks

        def call(weights: dict[str, jax.Array], x: jax.Array, ids: jax.Array, router: jax.Array) -> jax.Array:
            def local(x: jax.Array, ids: jax.Array, router: jax.Array) -> jax.Array:
                if not products:
                    here = (ids >= 0) & (ids < own)
                    return x.astype(jnp.float32) * jnp.sum(jnp.where(here, router, 0), axis=-1, keepdims=True)
                return expert_mlp(x, ids, router, *_matrices(weights), limit=limit)

            def step(_: Any, x: jax.Array) -> jax.Array:
                out = exchange(x, ids, router, local, own, EXPERT)
                return jax.lax.optimization_barrier(out.astype(x.dtype))

            return jax.lax.fori_loop(0, steps, step, x)

        specs = (dict.fromkeys(self.weights, _SPLIT), _SPLIT, _SPLIT, _SPLIT)
        return jax.jit(jax.shard_map(call, mesh=self.mesh, in_specs=specs, out_specs=_SPLIT, check_vma=False))


def weight_shapes(shape: Shape, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Of the experts' matrices, as the model holds them."""
    c, found = shape.config, {}
    for name, inputs, outputs in (
        ("w1", c.hidden_size, c.moe_intermediate_size), ("w3", c.hidden_size, c.moe_intermediate_size),
        ("w2", c.moe_intermediate_size, c.hidden_size),
    ):  # fmt: skip
        if c.expert_weights == "dense":
            found[name] = jax.ShapeDtypeStruct((slots, inputs, outputs), jnp.dtype(shape.dtype))
            continue
        codes, scales = block_shapes(c.expert_weights, inputs, outputs)
        dtype = jnp.uint8 if c.expert_weights == "fp4" else jnp.float8_e4m3fn
        found[name] = jax.ShapeDtypeStruct((slots, *codes), dtype)
        found[f"{name}_scale"] = jax.ShapeDtypeStruct((slots, *scales), jnp.uint8)
    return found


def _matrices(weights: dict[str, jax.Array]) -> list[Any]:
    names = ("w1", "w3", "w2")
    return [weights[n] if f"{n}_scale" not in weights else BlockScaled(weights[n], weights[f"{n}_scale"]) for n in names]


def ways(mesh: Mesh) -> list[str]:
    """Those that the devices can run."""
    ragged = mesh.devices.flat[0].platform != "cpu"  # XLA's CPU backend has no ragged all-to-all
    return [name for name in EXCHANGES if ragged or name != "ragged"]


def dispatch(shape: Shape, mesh: Mesh, batches: Sequence[int], say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """A record for every number of rows of a device; meshes of one expert rank have nothing to exchange and give none."""
    if (ranks := mesh.shape[EXPERT]) == 1:
        return
    layer, c = Layer(shape, mesh), shape.config
    for batch in batches:
        rng = np.random.default_rng(batch)
        ids = rng.random((batch * ranks, c.n_routed_experts)).argsort(axis=1)[:, : c.num_experts_per_tok]
        rows = layer.rows(ids)
        times, alone, apart = {}, {}, {}
        first: np.ndarray | None = None
        for way in ways(mesh):
            try:
                out = np.asarray(layer.program(way, 1)(layer.weights, *rows), np.float32)
                first = out if first is None else first
                apart[way] = float(np.abs(out - first).max() / max(np.abs(first).max(), 1e-30))
                run, bare = layer.program(way), layer.program(way, products=False)
                times[way] = median_us(lambda run=run, rows=rows: run(layer.weights, *rows), STEPS)
                alone[way] = median_us(lambda bare=bare, rows=rows: bare(layer.weights, *rows), STEPS)
            except jax.errors.JaxRuntimeError as error:
                say(f"dispatch, {way}: cannot be run: {str(error).partition(chr(10))[0][:300]}")
        if "all-gather" not in times:
            continue
        found = case("dispatch", f"{shape.name} experts, {c.expert_weights}, {batch} rows a device", mesh, times["all-gather"])
        found["peers"] = {way: round(us, 2) for way, us in times.items() if way != "all-gather"}
        found["exchange_us"] = {way: round(us, 2) for way, us in alone.items()}
        found["difference"] = {way: float(f"{value:.3g}") for way, value in apart.items()}
        found |= {"rows": batch, "fastest": min(times, key=lambda way: times[way])}
        visits = len({(row, owner) for row, one in enumerate(ids) for owner in one // (layer.slots // ranks)})
        found["ranks_a_row"] = rounded([visits / len(ids)])[0]
        yield found
