"""Three prompts through the ring by hand: fill a record, call the compiled step, read what the last rank committed.

    python -m dspark_jax.examples.ring_by_hand --mesh 2x1 --emulate-devices 2

The engine (`serving_loop.py`) does the same, and dispatches the next call before it reads the last one's result.
"""

import jax
import jax.numpy as jnp

from dspark_jax.api import model_folder
from dspark_jax.checkpoint.reader import read_checkpoint, read_tokenizer
from dspark_jax.config_dense import v4_config
from dspark_jax.decode.state import RUNNING
from dspark_jax.examples.options import mesh_and_model
from dspark_jax.parallel.mesh import EXPERT, PIPE
from dspark_jax.parallel.planner import plan_stages
from dspark_jax.parallel.ring import Ring, RingConfig
from dspark_jax.parallel.stage import PipelineSpec
from dspark_jax.text import as_tokenizer

PROMPTS = ["def fib(n):", "The river", "import os\n"]
MAX_TOKENS = 16


def main() -> None:
    """Runs the example; see the module's text."""
    mesh, name = mesh_and_model(__doc__)
    pipe, expert = mesh.shape[PIPE], mesh.shape[EXPERT]

    # The model on the mesh: layers cut into `pipe` ranges, experts, vocabulary and slots split over `expert`.
    folder = model_folder(name)
    model = read_checkpoint(folder, dtype=jnp.float32, axis=EXPERT, place=lambda path, array: array)  # type: ignore[arg-type]
    config, tokenizer = v4_config(model.config, name), as_tokenizer(read_tokenizer(folder))
    plan = plan_stages(config, model.draft, pipe, rows=16, context=256, expert=expert, dtype="float32")
    spec = PipelineSpec(config, model.draft, plan.ranges, expert)
    chunk = spec.gamma + 1  # prompt tokens of a call and slot: as many rows as a decoding round has
    slots = -(-len(PROMPTS) // (pipe * expert)) * expert  # of one microbatch
    ring = Ring(spec, model.params, mesh, RingConfig(slots, max_len=256, chunk=chunk))
    params, state = ring.pipeline.place(model.params, mesh), ring.init_state()

    prompts = [[config.bos_token_id, *tokenizer.encode(text)] for text in PROMPTS]
    sent, answers, running = [0] * len(prompts), [[] for _ in prompts], set(range(len(prompts)))
    while running:
        # One record a call: the next chunk of every prompt that is not yet read.
        record = ring.idle_control()
        for i, ids in enumerate(prompts):
            part = ids[sent[i] : sent[i] + chunk]
            if part:
                at = i % pipe, i // pipe  # microbatch and slot
                record.admit[at], record.fresh[at] = True, sent[i] == 0
                record.token[at][: len(part)] = part
                record.start[at], record.count[at] = sent[i], len(part)
                record.generation[at] = i + 1  # comes back with every commit: whose tokens they are
                record.max_tokens[at], record.stop[at][0] = MAX_TOKENS, config.eos_token_id
                sent[i] += len(part)
                record.final[at] = sent[i] == len(ids)
        state, output = ring.step(params, state, ring.place_control(record))

        # P ticks have run, and the last rank has finished a round of every microbatch: [rank, tick, slot].
        made, generation = jax.tree.map(lambda x: x[-1], jax.device_get((output.emission, output.generation)))
        for tick, slot in zip(*made.count.nonzero(), strict=True):
            i = int(generation[tick, slot]) - 1
            tokens = made.token[tick, slot, : made.count[tick, slot]].tolist()
            print(f"request {i}: {made.accepted[tick, slot]} drafts accepted, {tokens}")
            answers[i] += tokens
            if made.reason[tick, slot] != RUNNING:
                running.discard(i)

    for text, tokens in zip(PROMPTS, answers, strict=True):
        print(f"{text!r} -> {tokenizer.decode(tokens)!r}")


if __name__ == "__main__":
    main()
