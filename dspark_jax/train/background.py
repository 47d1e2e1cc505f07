"""Programs that compile in the background, so that several compile at once while a device already works."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax


class Background:
    """A jitted function that begins to compile when it is constructed; a call waits for it and runs it.

    `arguments` are arrays or their shapes; later calls must have exactly these shapes and dtypes.
    """

    def __init__(self, function: Any, *arguments: Any):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        pool = ThreadPoolExecutor(1)
        self._compiled: Future[Any] = pool.submit(lambda: function.lower(*shapes).compile())
        pool.shutdown(wait=False)

    def __call__(self, *arguments: Any) -> Any:
        return self._compiled.result()(*arguments)
