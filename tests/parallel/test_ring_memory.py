"""The compiled ring holds every cache once: updated in place, never copied, and read without large temporaries."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.parallel.ring import RECORD, STATE, Ring, RingConfig
from dspark_jax.parallel.stage import PipelineSpec
from helpers.mesh_model import CONFIG, DRAFT, model

LONG = 8192  # positions, so that caches outweigh everything else

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def compiled():
    """A ring of two ranks and its compiled call."""
    config = dataclasses.replace(CONFIG, max_position_embeddings=LONG)
    spec = PipelineSpec(config, DRAFT, ((0, 2), (2, 4)), 1)
    ring = Ring(spec, model()[1], make_mesh(2, 1), RingConfig(slots=4, max_len=LONG, chunk=3))

    def placed(tree, spec):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(ring.mesh, spec)), tree)

    params = {
        key: jax.ShapeDtypeStruct((2, *x.shape), x.dtype, sharding=NamedSharding(ring.mesh, ring.pipeline.specs[key]))
        for key, x in ring.pipeline.params.shapes.items()
    }
    state = placed(jax.eval_shape(ring.init_state), STATE)
    return ring, ring.step.lower(params, state, placed(ring.idle_control(), RECORD)).compile()


def size(shape) -> int:
    return int(np.prod(shape.shape)) * shape.dtype.itemsize


def test_caches_are_updated_in_place(compiled):
    ring, program = compiled
    caches = sum(map(size, ring.caches.shapes.values()))
    memory = program.memory_analysis()
    assert caches > 0.8 * memory.argument_size_in_bytes
    assert memory.alias_size_in_bytes > 0.99 * memory.output_size_in_bytes


def test_no_instruction_copies_a_cache(compiled):
    ring, program = compiled
    part = max(map(size, ring.caches.shapes.values())) // ring.pipe  # what one microbatch has of the largest cache
    found = re.findall(r"= f32\[([\d,]+)\]\S* (copy|dynamic-slice|dynamic-update-slice|concatenate)\(", program.as_text())
    sizes = [(kind, 4 * int(np.prod([int(n) for n in dims.split(",")]))) for dims, kind in found]
    assert len(sizes) > 20  # such instructions exist, for small arrays
    assert [s for s in sizes if s[1] >= part] == []


def test_temporaries_stay_below_a_layers_working_set(compiled):
    """The entries of one microbatch in the layer that has the most: what its attention must read anyway."""
    ring, program = compiled
    by_layer: dict[tuple[str, ...], int] = {}
    for key, shape in ring.caches.shapes.items():
        layer = tuple(key.split(" ")[0].split(".")[:2])
        by_layer[layer] = by_layer.get(layer, 0) + size(shape) // ring.pipe
    assert program.memory_analysis().temp_size_in_bytes < 1.2 * max(by_layer.values())
