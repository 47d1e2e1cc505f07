"""What drafters inherit: the embedded DSpark stages the target's placement, all others everything but that."""

import jax.numpy as jnp
import pytest

from dspark_jax.config_drafter import DrafterKind
from dspark_jax.eplb import Placement
from dspark_jax.eplb.propagation import TargetSettings, inherited
from dspark_jax.parallel.mesh import make_mesh

OTHERS = [kind for kind in DrafterKind if kind is not DrafterKind.EMBEDDED_DSPARK]


@pytest.fixture
def settings() -> TargetSettings:
    return TargetSettings(make_mesh(1, 2), jnp.float32, 128, Placement.auto(5, 8, 12, 2))


def test_the_kinds():
    assert {kind.name for kind in OTHERS} == {"STANDALONE_DSPARK", "DFLASH", "PARD", "DRAFT_MODEL"}


def test_embedded_dspark_gets_the_very_same_objects(settings: TargetSettings):
    found = inherited(DrafterKind.EMBEDDED_DSPARK, settings)
    assert found.keys() == {"mesh", "dtype", "max_len", "placement"}
    assert all(found[name] is getattr(settings, name) for name in found)


@pytest.mark.parametrize("kind", OTHERS)
def test_the_others_lack_exactly_the_placement(kind: DrafterKind, settings: TargetSettings):
    embedded, other = inherited(DrafterKind.EMBEDDED_DSPARK, settings), inherited(kind, settings)
    assert embedded.keys() - other.keys() == {"placement"} and not other.keys() - embedded.keys()
    assert all(other[name] is embedded[name] for name in other)


@pytest.mark.parametrize("kind", OTHERS)
def test_the_difference_is_the_same_without_balancing(kind: DrafterKind, settings: TargetSettings):
    plain = TargetSettings(settings.mesh, settings.dtype, settings.max_len)
    assert inherited(DrafterKind.EMBEDDED_DSPARK, plain) == inherited(kind, plain) | {"placement": None}
