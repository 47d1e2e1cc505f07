"""The example in the package's docstring runs and gives what it says."""

import doctest

from dspark_jax import testing


def test_the_example_of_the_docstring():
    found = doctest.testmod(testing)
    assert found.attempted > 10 and found.failed == 0
