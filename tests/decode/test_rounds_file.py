"""Files of recorded rounds."""

import numpy as np
import pytest

from dspark_jax import ConfigError
from dspark_jax.decode.calibrate import Rounds
from dspark_jax.decode.rounds_file import read_rounds, write_rounds


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rounds.npz"


def test_what_is_written_is_read(path):
    rounds = Rounds(np.array([[1.5, -2.25], [0.0, 3.0], [7.0, 0.5]]), np.array([0, 2, 1]))
    write_rounds(path, rounds)
    found = read_rounds(path)
    np.testing.assert_array_equal(found.logits, rounds.logits)
    np.testing.assert_array_equal(found.accepted, rounds.accepted)


def test_damaged_files_are_refused(path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rounds(path)
    write_rounds(path, Rounds(np.ones((90, 2)), np.ones(90, int)))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ConfigError, match="holds no recorded rounds"):
        read_rounds(path)
    path.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="holds no recorded rounds"):
        read_rounds(path)
    np.savez(path, logits=np.ones((3, 2)))
    with pytest.raises(ConfigError, match="accepted"):
        read_rounds(path)
    np.savez(path, logits=np.ones((3, 2)), accepted=np.array([0, 1, 3]))
    with pytest.raises(ConfigError, match=r"rounds.npz: .*accepted spans 0 … 3; expected 0 … 2"):
        read_rounds(path)
