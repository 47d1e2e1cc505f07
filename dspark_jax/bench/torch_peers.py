"""Decoding steps and rounds of programs that run on torch: what `bench.peers` starts in a process of its own.

    python -P torch_peers.py '{"peer": "qwen3", "config": {…}, "batches": [1], "context": 512}'

imports neither JAX nor this package. A line of JSON for every measurement: "requests", "us", and "how" where there are several
ways. All weights are random, made on the device. A step is one greedy token of every request from a whole cache; a
round is DeepSpec's, of one request. Times are the median of the intervals between CUDA events that follow each other.

Keys of a job: peer (one of PEERS), config (the target's config.json), batches, context; drafter (its config.json), deepspec
(folder) and temperature for DeepSpec; device ("cuda") and dtype ("bfloat16") otherwise than by default.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

WARM, STEPS = 6, 24  # that are not timed, and that are


class Clock:
    """Times of marks on the device's own clock; on a CPU the host's."""

    def __init__(self, device: str):
        self.cuda, self.marks = device == "cuda", []

    def mark(self) -> None:
        if not self.cuda:
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def median_us(self) -> float:
        """Of the intervals behind the first WARM ones."""
        if self.cuda:
            torch.cuda.synchronize()
        pairs = list(zip(self.marks[WARM:], self.marks[WARM + 1 :], strict=False))
        return statistics.median(1e3 * a.elapsed_time(b) if self.cuda else 1e6 * (b - a) for a, b in pairs)


def build(make: Callable[[], Any], job: dict) -> Any:
    """The model that `make` gives, on the job's device, in its dtype, with random weights."""
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, job["dtype"]))
    with torch.device(job["device"]):
        model = make().eval()
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5)
            else:
                weight.fill_(1)
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # experts by token, distinct in a row
                order = torch.rand(len(table), model.config.n_routed_experts, device=table.device).argsort(1)
                table.copy_(order[:, : table.shape[1]])
    return model


def random_ids(job: dict, rows: int, count: int) -> Any:
    """Token ids of shape (rows, count), on the job's device."""
    return torch.randint(job["config"]["vocab_size"], (rows, count), device=job["device"])


def widened(cache: Any, rows: int) -> Any:
    """The cache of one request for `rows` of the same context."""

    def repeated(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: repeated(inner) for key, inner in value.items()}
        if torch.is_tensor(value) and value.ndim > 2 and len(value) == 1:
            return value.repeat(rows, *[1] * (value.ndim - 1))
        return value

    for layer in cache.layers:
        for name, value in list(vars(layer).items()):
            setattr(layer, name, repeated(value))
    return cache


@torch.no_grad()
def step_us(model: Any, job: dict, requests: int) -> float:
    """One token of every request with transformers' growing cache."""
    from transformers import DynamicCache  # pyright: ignore[reportMissingImports]

    cache = DynamicCache(config=model.config)
    model(random_ids(job, 1, job["context"]), past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache, token, clock = widened(cache, requests), random_ids(job, requests, 1), Clock(job["device"])
    clock.mark()
    for _ in range(WARM + STEPS):
        logits = model(token, past_key_values=cache, use_cache=True).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        clock.mark()
    if not torch.isfinite(logits).all():
        raise ValueError("logits are not finite")
    return clock.median_us()


def deepseek_v4(job: dict) -> Iterator[dict]:
    """transformers' DeepSeek-V4, by each of its ways to compute experts that runs here."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM  # pyright: ignore[reportMissingImports]

    config = dict(job["config"])
    # transformers names kinds of layers, and takes the parts of rotary positions apart.
    names = {0: "sliding_attention", 4: "compressed_sparse_attention"}
    ratios = config.pop("compress_ratios")
    heavy = [ratio for ratio in ratios if ratio not in names] or [128]
    scaling = {key: value for key, value in config.pop("rope_scaling").items() if key != "type"}
    kept = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    found = DeepseekV4Config(
        **kept,
        layer_types=[names.get(ratio, "heavily_compressed_attention") for ratio in ratios],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": heavy[0]},
        rope_parameters={"rope_type": "yarn", **scaling},
        attn_implementation="eager",  # it has no other
    )
    model = build(lambda: DeepseekV4ForCausalLM(found), job)
    for requests in job["batches"]:
        for how in ("grouped_mm", "batched_mm", "eager"):
            try:
                model.set_experts_implementation(how)
                yield {"requests": requests, "how": f"{how} experts", "us": step_us(model, job, requests)}
            except Exception as error:
                yield {"requests": requests, "how": f"{how} experts", "error": problem(error)}


def qwen3_model(job: dict) -> Any:
    """transformers' Qwen3 of the job's configuration, with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # pyright: ignore[reportMissingImports]

    config = Qwen3Config(**job["config"], attn_implementation="sdpa")
    return build(lambda: Qwen3ForCausalLM(config), job)


def qwen3(job: dict) -> Iterator[dict]:
    """transformers' Qwen3."""
    model = qwen3_model(job)
    for requests in job["batches"]:
        yield {"requests": requests, "us": step_us(model, job, requests)}


@torch.no_grad()
def qwen3_compiled(job: dict) -> Iterator[dict]:
    """transformers' Qwen3 by `generate` with its static cache, which compiles the step (torch.compile with CUDA graphs)."""
    model = qwen3_model(job)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    for requests in job["batches"]:
        prompt = random_ids(job, requests, job["context"])
        clock = Clock(job["device"])

        def each(ids: Any, scores: Any, clock: Clock = clock, **_: Any) -> Any:  # a step ends with its criteria
            clock.mark()
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        options: dict[str, Any] = {"do_sample": False, "cache_implementation": "static", "stopping_criteria": [each]}
        # The first call compiles.
        for _ in range(2):
            clock.marks.clear()
            model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=WARM + STEPS, **options)
        yield {"requests": requests, "us": clock.median_us()}


def deepspec(job: dict) -> Iterator[dict]:
    """DeepSpec's round: its evaluator's loop, without the evaluator's __init__, which would start torch.distributed."""
    sys.path.insert(0, job["deepspec"])
    from deepspec.eval.dspark.evaluator import Qwen3DSparkEvaluator  # pyright: ignore[reportMissingImports]
    from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel  # pyright: ignore[reportMissingImports]
    from transformers import Qwen3Config  # pyright: ignore[reportMissingImports]

    crop_to_lengths()
    target = qwen3_model(job)
    config = Qwen3Config(**job["drafter"], attn_implementation="sdpa")
    drafter = build(lambda: Qwen3DSparkModel(config), job)
    clock = Clock(job["device"])

    class Timed(Qwen3DSparkEvaluator):
        def _post_verify(self, proposal: Any, verification: Any) -> None:
            clock.mark()

    evaluator = object.__new__(Timed)
    evaluator.device, evaluator.target_model, evaluator.draft_model = torch.device(job["device"]), target, drafter
    evaluator.confidence_head_recorder = None
    # A round commits 1 to gamma + 1 tokens.
    tokens = (WARM + STEPS) * (drafter.block_size + 1)
    evaluator.args = SimpleNamespace(temperature=job["temperature"], confidence_threshold=0.0, max_new_tokens=tokens)
    found = evaluator.generate_one_sample(input_ids=random_ids(job, 1, job["context"]), stop_token_ids=None)
    del clock.marks[WARM + STEPS + 1 :]  # longer contexts
    tokens_of = statistics.mean(found.acceptance_lengths[: WARM + STEPS])
    yield {"requests": 1, "us": clock.median_us(), "tokens": round(tokens_of, 2)}


def crop_to_lengths() -> None:
    """DeepSpec's crop(n) leaves n tokens; newer transformers take how many are to go, as a negative number."""
    from transformers import DynamicCache  # pyright: ignore[reportMissingImports]

    remove = DynamicCache.crop

    def crop(cache: Any, length: int) -> None:
        if length < cache.get_seq_length():
            remove(cache, length - cache.get_seq_length())

    DynamicCache.crop = crop


def problem(error: BaseException) -> str:
    """The error's class and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


PEERS: dict[str, Callable[[dict], Iterator[dict]]] = {
    "deepseek_v4": deepseek_v4,
    "qwen3": qwen3,
    "qwen3_compiled": qwen3_compiled,
    "deepspec": deepspec,
}


def main(argv: list[str]) -> int:
    """Exit code 1, with a line on stderr, where nothing can be measured."""
    job = {"device": "cuda", "dtype": "bfloat16", **json.loads(argv[0])}
    try:
        if job["device"] == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("torch has no GPU here")
        for found in PEERS[job["peer"]](job):
            print(json.dumps(found), flush=True)
    except Exception as error:
        print(problem(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
