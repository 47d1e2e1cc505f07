"""A batch of requests from prompts to last tokens: chunked prefill, then rounds until no request is left."""

import dataclasses
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.decode.logprobs import TokenLogprobs, read_logprobs
from dspark_jax.decode.program import DecodeProgram
from dspark_jax.decode.sampling import SamplingParams, SamplingState
from dspark_jax.decode.schedule import Schedule
from dspark_jax.decode.state import FINISH_REASONS, RUNNING, DecodeState, Emission, WorkItem
from dspark_jax.decode.verify import REJECTION
from dspark_jax.parallel.mesh import EXPERT

MAX_STOPS = 8


@dataclass(frozen=True)
class Request:
    """A valid request: prompt ids, how to sample, and every stop token (at most MAX_STOPS)."""

    prompt: tuple[int, ...]
    params: SamplingParams
    stop: tuple[int, ...]


@dataclass(frozen=True)
class Commit:
    """What one tick committed for request `index`; see `Emission` for `accepted` and `verified`.

    `logprobs` has one entry a token if the request has asked for them. `rested`: nothing was drafted behind it.
    """

    index: int
    prefill: bool
    tokens: tuple[int, ...]
    accepted: int
    verified: int
    finish_reason: str | None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    rested: bool = False


def prefill_items(prompts: Sequence[Sequence[int]], slots: int, chunk: int) -> list[WorkItem]:
    """The prefill calls of ragged prompts (numpy leaves, [slots, chunk]); slots without a prompt stay idle.

    A prompt of fewer chunks begins later, so that the last call holds every final chunk and draws every first token.
    """
    calls = max(-(-len(p) // chunk) for p in prompts)
    items = []
    for call in range(calls):
        token = np.zeros((slots, chunk), np.int32)
        start, count = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        final = np.zeros(slots, bool)
        for r, prompt in enumerate(prompts):
            index = call - (calls - -(-len(prompt) // chunk))
            if index < 0:
                continue
            part = prompt[index * chunk : (index + 1) * chunk]
            token[r, : len(part)] = part
            start[r], count[r] = index * chunk, len(part)
            final[r] = call == calls - 1
        none = np.zeros(slots, np.int32)
        fields: dict[str, Any] = {"token": token, "start": start, "count": count, "verify": none, "final": final}
        items.append(WorkItem(**fields))
    return items


class BatchDecoder:
    """The compiled programs for one number of slots and one capacity: a prefill, and rounds with and without drafts.

    Args:
      graph, params: `nnx.split` of the model; the parameters placed on `mesh`.
      slots: most requests of a batch, a multiple of the expert axis.
      max_len: most positions of a request, prompt included.
      chunk: prompt tokens of one prefill call and slot.
      rounds_per_call: decoding rounds of one call; more hide the host's work, and run up to that many rounds too many.
      logprobs: the most alternatives a request may ask for; None if none asks for log-probabilities.
      schedule: how many drafts are verified; None verifies whole blocks.
      verify: how: REJECTION or COUPLED (`decode.verify`).
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        params: nnx.State,
        mesh: Mesh,
        slots: int,
        max_len: int,
        chunk: int,
        rounds_per_call: int,
        logprobs: int | None = None,
        schedule: Schedule | None = None,
        verify: str = REJECTION,
    ):
        self.program = DecodeProgram(graph, params, mesh, slots, max_len, logprobs, schedule, verify)
        self.slots, self.max_len, self.chunk, self.rounds_per_call = slots, max_len, chunk, rounds_per_call
        self._rows = NamedSharding(mesh, PartitionSpec(EXPERT))
        self._compiled: dict[str, Any] = {}
        self._lock = threading.Lock()

    def compile(self, params: nnx.State, modes: Iterable[bool]) -> None:
        """Compiles what decoding with drafts (True) or plain decoding (False) needs and is missing, side by side.

        XLA releases the interpreter while it compiles, so tracing one program overlaps with compiling another. Each new
        program then runs once over idle slots: the first execution pays for allocation and loading.
        """
        with self._lock:
            wanted = {"prefill": self.program.prefill}
            for speculate in modes:
                wanted[_name(speculate)] = self.program.rounds(self.rounds_per_call, speculate)
            missing = {name: function for name, function in wanted.items() if name not in self._compiled}
            if not missing:
                return
            state = self._abstract(jax.eval_shape(self.program.init_state, params))
            item = self._abstract(prefill_items([(0,)], self.slots, self.chunk)[0])
            pool = ThreadPoolExecutor(len(missing))
            try:
                jobs = {}
                for name, function in missing.items():
                    inputs = (params, state, item) if name == "prefill" else (params, state)
                    jobs[name] = pool.submit(function.lower(*inputs).compile)
                compiled = {name: job.result() for name, job in jobs.items()}
            finally:
                pool.shutdown(wait=False, cancel_futures=True)  # an interrupt does not wait for XLA
            for name, program in compiled.items():
                idle = self._place(jax.tree.map(np.zeros_like, prefill_items([(0,)], self.slots, self.chunk)[0]))
                inputs = (params, self.program.init_state(params), *((idle,) if name == "prefill" else ()))
                jax.block_until_ready(program(*inputs))
            self._compiled |= compiled

    def _abstract(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._rows), tree)

    def _place(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.device_put(x, self._rows), tree)

    def _start(self, params: nnx.State, requests: Sequence[Request]) -> DecodeState:
        """A fresh state whose slots know their limits, stop tokens and sampling parameters."""
        limit, stop = np.zeros(self.slots, np.int32), np.full((self.slots, MAX_STOPS), -1, np.int32)
        for r, request in enumerate(requests):
            limit[r] = request.params.max_tokens
            stop[r, : len(request.stop)] = request.stop
        every = [request.params for request in requests] + [SamplingParams()] * (self.slots - len(requests))
        state = self.program.init_state(params)
        own = self._place({"max_tokens": limit, "stop": stop, "sampling": SamplingState.from_params(every)})
        return dataclasses.replace(state, requests=dataclasses.replace(state.requests, **own))

    def run(self, params: nnx.State, requests: Sequence[Request], speculate: bool) -> Iterator[Commit]:
        """Decodes the requests and yields what every tick commits, tick by tick, in the order of the batch.

        `compile` comes first. The next call is dispatched before the last one's result is read, so a device never waits
        for the host; the rounds that finished slots run too many emit nothing.
        """
        step, ahead = self._compiled[_name(speculate)], self.rounds_per_call
        state = self._start(params, requests)
        emission: Any = None
        for item in prefill_items([r.prompt for r in requests], self.slots, self.chunk):
            state, emission = self._compiled["prefill"](params, state, self._place(item))

        # Tokens that a request may still get, beyond those that the calls in flight commit at the least.
        left = {i: min(r.params.max_tokens, self.max_len - len(r.prompt)) - 1 for i, r in enumerate(requests)}
        pending = deque([(True, emission)])
        while left:
            if max(left.values()) > 0:
                state, emission = step(params, state)
                pending.append((False, emission))
                left = {i: n - ahead for i, n in left.items()}
            prefill, emission = pending.popleft()
            for commit in _read(emission, {i: requests[i] for i in sorted(left)}, prefill):
                if commit.finish_reason is not None:
                    del left[commit.index]
                else:
                    left[commit.index] -= len(commit.tokens) - 1
                yield commit


def _read(emission: Emission, running: Mapping[int, Request], prefill: bool) -> Iterator[Commit]:
    """The commits of the running requests, from one prefill tick or from stacked rounds [rounds, slots, …]."""
    e = jax.tree.map(lambda x: x[None] if prefill else x, jax.device_get(emission))
    for t in range(len(e.token)):
        for i, request in running.items():
            finish = None if e.reason[t, i] == RUNNING else FINISH_REASONS[int(e.reason[t, i])]
            count = int(e.count[t, i])
            tokens = tuple(int(x) for x in e.token[t, i, :count])
            logprobs = read_logprobs(e.logprobs, (t, i), count, request.params.logprobs)
            rested = e.rested is not None and bool(e.rested[t, i])
            yield Commit(i, prefill, tokens, int(e.accepted[t, i]), int(e.verified[t, i]), finish, logprobs, rested)
        running = {i: request for i, request in running.items() if e.reason[t, i] == RUNNING}


def _name(speculate: bool) -> str:
    return "rounds" if speculate else "plain_rounds"
