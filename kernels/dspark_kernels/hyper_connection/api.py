"""Hyper-connection mixing: the reference on CPU, Pallas-Triton kernels on CUDA."""

from jaxtyping import Array, Float, Float32

from dspark_kernels.hyper_connection import reference, triton
from dspark_kernels.lowerings import Implementation, choose, with_reference_gradient


def _unsuited(streams: Array, columns: int) -> str | None:
    _, n, width = streams.shape
    if n not in (2, 4) or columns > triton.MAX_COLUMNS or n * width % 128:
        return f"{n} streams of width {width} (expected 2 or 4, together a multiple of 128 wide)"
    return None


def pre(
    streams: Float[Array, "B n d"],
    fn: Float32[Array, "nd m"],
    base: Float32[Array, "m"],
    scale: Float32[Array, "3"],
    *,
    iters: int,
    eps: float,
    norm_eps: float,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B d"], Float32[Array, "B n"], Float32[Array, "B n n"]]:
    """`reference.pre`: a sublayer's input, and the weights post and comb that `expand` takes. Two launches on CUDA."""
    lowering = choose(implementation, _unsuited(streams, fn.shape[1]))
    options = {"iters": iters, "eps": eps, "norm_eps": norm_eps}

    def plain(*args: Array) -> tuple[Array, ...]:
        return reference.pre(*args, **options)

    def kernel(*args: Array) -> tuple[Array, ...]:
        return triton.pre(*args, **options, interpret=lowering == "interpret")

    if lowering == "reference":
        return reference.pre(streams, fn, base, scale, **options)
    x, post, comb = with_reference_gradient(kernel, plain, streams, fn, base, scale)
    return x, post, comb


def expand(
    streams: Float[Array, "B n d"],
    output: Float[Array, "B d"],
    post: Float32[Array, "B n"],
    comb: Float32[Array, "B n n"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "B n d"]:
    """`reference.expand`: the streams behind a sublayer. One launch on CUDA."""
    lowering = choose(implementation, _unsuited(streams, 0))

    def kernel(*args: Array) -> Array:
        return triton.expand(*args, interpret=lowering == "interpret")

    if lowering == "reference":
        return reference.expand(streams, output, post, comb)
    return with_reference_gradient(kernel, reference.expand, streams, output, post, comb)


def collapse_head(
    streams: Float[Array, "B n d"],
    fn: Float32[Array, "nd n"],
    base: Float32[Array, "n"],
    scale: Float32[Array, "1"],
    *,
    eps: float,
    norm_eps: float,
    implementation: Implementation | None = None,
) -> Float[Array, "B d"]:
    """`reference.collapse_head`: what an output head reads. Two launches on CUDA."""
    lowering = choose(implementation, _unsuited(streams, fn.shape[1]))

    def plain(*args: Array) -> Array:
        return reference.collapse_head(*args, eps=eps, norm_eps=norm_eps)

    def kernel(*args: Array) -> Array:
        return triton.pre(*args, iters=1, eps=eps, norm_eps=norm_eps, interpret=lowering == "interpret")[0]

    if lowering == "reference":
        return plain(streams, fn, base, scale)
    return with_reference_gradient(kernel, plain, streams, fn, base, scale)
