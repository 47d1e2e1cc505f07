"""A serving loop around the engine: submit, read what every step commits, abort, stream.

    python -m dspark_jax.examples.serving_loop --mesh 2x1 --emulate-devices 2
"""

from dspark_jax import Engine, SamplingParams
from dspark_jax.examples.options import mesh_and_model

PROMPTS = ["def fib(n):", "The river", "import os\n", "class Queue:"]


def main() -> None:
    """Runs the example; see the module's text."""
    mesh, model = mesh_and_model(__doc__)
    # More requests than slots: the others wait. Prompt chunks no larger than a decoding round's rows make one program
    # instead of two; a real server takes larger chunks.
    engine = Engine(model, mesh=mesh, slots=2 * mesh.size, max_len=256, chunk=4)
    print(f"compiled in {engine.warmup(print):.1f} s; nothing compiles from here on")

    # The loop of a server: new requests may be submitted between any two steps.
    greedy = SamplingParams(max_tokens=16)
    texts = {engine.submit(prompt, greedy, request_id=prompt): "" for prompt in PROMPTS}
    unwanted = engine.submit("for i in", SamplingParams(max_tokens=200), request_id="unwanted", ignore_eos=True)
    while engine.busy:
        for key, output in engine.step():
            if key == unwanted:
                engine.abort(key)  # its slot goes to the next request; what is in flight is dropped
                continue
            texts[key] += output.text
            print(f"{key!r}: round {output.round}, {output.accepted} drafts accepted, {output.text!r}")
    for key in texts:
        done = engine.result(key)
        print(f"{key!r} -> {done.text!r} ({done.finish_reason}, {done.rounds} rounds)")
    print(f"{unwanted!r} ended by {engine.result(unwanted).finish_reason}")

    # One request at a time: the stream runs the device while it waits.
    sampled = SamplingParams(temperature=0.8, seed=1, max_tokens=16)
    print("streamed: ", end="")
    for output in engine.stream(engine.submit(PROMPTS[0], sampled)):
        print(output.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
