"""Measures a drafter on prompts: tokens a round, acceptance by position, and whether greedy text stays the same."""

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.api import LM
from dspark_jax.cli_display import first_difference
from dspark_jax.cli_engine import Generator
from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.errors import RequestError, described, raise_all
from dspark_jax.near_tie import Margins, margins
from dspark_jax.results import Completion


@dataclass(frozen=True)
class EvalPrompt:
    """One line of a prompt file; `kind` groups the results ("" where the file names none).

    `ids` are what the model reads, where that is not the text alone (a chat template's); None: the text.
    """

    prompt: str
    kind: str = ""
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Acceptance:
    """Rounds of several requests, added up. Fields as in `Completion`; `committed` leaves out the prefill's tokens."""

    committed: int
    rounds: int
    verified_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    verify_lengths: tuple[int, ...] = ()
    wasted: int = 0
    rested: int = 0

    @classmethod
    def of(cls, results: Sequence[Completion]) -> "Acceptance":
        """Counts over all `results` together."""
        verified = [r.verified_by_position for r in results]
        accepted = [r.accepted_by_position for r in results]
        return cls(
            committed=sum(len(r.tokens) - 1 for r in results),
            rounds=sum(r.rounds for r in results),
            verified_by_position=tuple(map(sum, zip(*verified, strict=True))),
            accepted_by_position=tuple(map(sum, zip(*accepted, strict=True))),
            verify_lengths=tuple(n for r in results for n in r.verify_lengths),
            wasted=sum(r.wasted for r in results),
            rested=sum(r.rested_rounds for r in results),
        )

    @property
    def tau(self) -> float | None:
        """Committed tokens per round over all requests; None without a round."""
        return self.committed / self.rounds if self.rounds else None

    @property
    def by_position(self) -> tuple[float | None, ...]:
        """P(draft j accepted | the drafts before it were accepted); None for a position that was never tested."""
        pairs = zip(self.accepted_by_position, self.verified_by_position, strict=True)
        return tuple(a / v if v else None for a, v in pairs)


@dataclass(frozen=True)
class Difference:
    """A greedy text that is not plain decoding's: prompt `index` (of those evaluated) parts at token `at` (0-based)."""

    index: int
    at: int
    margins: Margins

    @property
    def excused(self) -> bool:
        """Whether a near-tie explains it."""
        return self.margins.near


@dataclass(frozen=True)
class Evaluation:
    """Results on some prompts.

    Attributes:
      kind: of the prompts; "all" for the sum.
      prompts, tokens: how many prompts, and tokens generated for them.
      distinct_4grams: share of distinct token 4-grams among all 4-grams of the texts; 1 means that nothing repeats, and
        a low share that the model loops, which flatters every acceptance rate. None where no text has four tokens.
      acceptance: with the drafter as it is.
      head_off: with the sequential head's bias set to zero; None where the drafter has no such head. The stages were
        trained with the head, so this is what the head does in this drafter, not a drafter trained without one.
      identical: texts equal to plain decoding's; None at a temperature above 0.
      differences: the others.
    """

    kind: str
    prompts: int
    tokens: int
    distinct_4grams: float | None
    acceptance: Acceptance
    head_off: Acceptance | None
    identical: int | None
    differences: tuple[Difference, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; every key is always there."""

        def rates(a: Acceptance | None) -> dict[str, Any] | None:
            if a is None:
                return None
            drafts = {"verified_drafts": sum(a.verify_lengths), "wasted_drafts": a.wasted, "rested_rounds": a.rested}
            return {"tau": a.tau, "acceptance_by_position": list(a.by_position), "rounds": a.rounds, **drafts}

        different = [
            {"prompt": d.index, "token": d.at, "excused": d.excused, **vars(d.margins)} for d in self.differences
        ]
        return {
            "kind": self.kind,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "distinct_4grams": self.distinct_4grams,
            "with_head": rates(self.acceptance),
            "head_off": rates(self.head_off),
            "identical": self.identical,
            "differences": different,
        }


def read_prompts(path: str | Path, kind: str | None = None) -> list[EvalPrompt]:
    """Prompts of a JSONL file: one object a line with "prompt" and, if you like, "kind"; `kind` keeps one kind only. Lines
    of DeepSpec's form, with "turns", give their first turn.

    Raises RequestError that names every faulty line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")  # not splitlines(): JSON allows U+2028 within a text
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text ({error.reason} at byte {error.start}); convert it"
        raise RequestError(f"prompt file {str(path)!r} {problem}") from None
    except OSError as error:
        raise RequestError(f"prompt file {str(path)!r} cannot be read: {error.strerror}; check the path") from None
    found, faults = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            faults.append(f'line {number} is not JSON ({error}); expected an object with "prompt"')
            continue
        prompt = value.get("prompt") if isinstance(value, dict) else None
        if prompt is None and isinstance(value, dict) and isinstance(turns := value.get("turns"), list) and turns:
            prompt = turns[0]
        label = value.get("kind", "") if isinstance(value, dict) else ""
        if prompt is None:
            faults.append(f'line {number} has no "prompt"; expected a text that is not empty, or "turns" that begin with one')
        elif not isinstance(prompt, str) or not prompt:
            faults.append(f"line {number}: the prompt is {described(prompt)}; expected a text that is not empty")
        elif not isinstance(label, str):
            faults.append(f"line {number}: kind is {label!r}; expected a text")
        else:
            found.append(EvalPrompt(prompt, label))
    raise_all(RequestError, f"prompt file {str(path)!r}", faults)
    kept = [p for p in found if kind is None or p.kind == kind]
    if not kept:
        kinds = sorted({p.kind for p in found if p.kind})
        what = f"no prompt of kind {kind!r} (there are: {', '.join(kinds) or 'none'})" if found else "no prompt"
        raise RequestError(f"prompt file {str(path)!r} holds {what}; expected at least one")
    return kept


@contextmanager
def head_off(lm: Generator) -> Iterator[Generator | None]:
    """The model with its sequential head's bias at zero, sharing the compiled programs; None without such a head.

    An engine's caches belong to one object, so there the parameters are exchanged until the block ends.
    """

    def silence(path: tuple, leaf: jax.Array) -> jax.Array:
        return jnp.zeros_like(leaf) if _is_bias_map(path) else leaf

    holder = copy.copy(lm) if isinstance(lm, LM) else lm.engine(True)
    own: Any = holder._params
    if not any(_is_bias_map(path) for path, _ in jax.tree_util.tree_leaves_with_path(own)):
        yield None
        return
    holder._params = jax.tree_util.tree_map_with_path(silence, own)  # an argument of the programs, so they fit both
    try:
        yield holder if isinstance(holder, LM) else lm
    finally:
        holder._params = own


def _is_bias_map(path: tuple) -> bool:
    return any("markov_w2" in str(getattr(key, "key", "")) for key in path)  # a ring's keys are whole paths


def evaluate(
    lm: Generator, prompts: Sequence[EvalPrompt], params: SamplingParams, *, batch: int = 8
) -> list[Evaluation]:
    """Generates for every prompt, `batch` prompts side by side; one result a kind in order of appearance, then "all".

    On several pipeline ranks `lm` is a `cli_engine.EngineRunner`, whose slots decide how many prompts run side by side.

    Prompt i is sampled with seed `params.seed + i`. At temperature 0 each text is compared with plain decoding's, and
    the margins of every difference are recomputed. Raises RequestError for a model without a drafter.
    """
    if batch < 1:
        raise RequestError(f"batch is {batch}; expected at least 1")
    if lm.draft_config is None:
        raise RequestError(
            "the model has no drafter, so there is no acceptance to measure; choose one with mtp.* stages"
        )
    odd = next((p for p in prompts if not isinstance(p, EvalPrompt)), None)
    if odd is not None:
        raise RequestError(f"prompts holds {described(odd)}; expected EvalPrompt objects, as in [EvalPrompt(text)]")
    texts = [p.prompt if p.ids is None else p.ids for p in prompts]
    each = [replace(params, seed=(params.seed + i) % 2**32) for i in range(len(texts))]
    size = batch if isinstance(lm, LM) else len(texts)  # an engine takes the next prompt when one of its slots is free

    def run(model: Generator, speculate: bool) -> list[Completion]:
        parts = range(0, len(texts), size)
        return [
            result
            for i in parts
            for result in model.generate(texts[i : i + size], each[i : i + size], speculate=speculate)
        ]

    lm.compile(texts[:size], params, speculate=[True, False] if params.temperature == 0 else [True])
    fast = run(lm, True)
    with head_off(lm) as silent:
        without = run(silent, True) if silent else None
    differences = None
    if params.temperature == 0:
        pairs = zip(fast, run(lm, False), strict=True)
        differences = [compare(lm, i, f, p) for i, (f, p) in enumerate(pairs)]

    kinds = list(dict.fromkeys(p.kind for p in prompts))
    groups = {kind: [i for i, p in enumerate(prompts) if p.kind == kind] for kind in kinds} if len(kinds) > 1 else {}
    groups["all"] = list(range(len(prompts)))
    found = []
    for kind, members in groups.items():
        results = [fast[i] for i in members]
        parted = [] if differences is None else [d for i in members if (d := differences[i]) is not None]
        found.append(
            Evaluation(
                kind=kind,
                prompts=len(members),
                tokens=sum(len(r.tokens) for r in results),
                distinct_4grams=distinct_share([r.tokens for r in results]),
                acceptance=Acceptance.of(results),
                head_off=None if without is None else Acceptance.of([without[i] for i in members]),
                identical=None if differences is None else len(members) - len(parted),
                differences=tuple(parted),
            )
        )
    return found


def compare(lm: Generator, index: int, speculative: Completion, plain: Completion) -> Difference | None:
    """Where two greedy answers to one prompt part, with the margins there; None where they do not."""
    a, b = speculative.tokens, plain.tokens
    if a == b:
        return None
    at = first_difference(a, b)
    whole = lm if isinstance(lm, LM) else lm.whole
    return Difference(index, at, margins(whole, (*plain.prompt_tokens, *b[:at])))


def distinct_share(texts: Sequence[Sequence[int]], n: int = 4) -> float | None:
    """Distinct n-grams by all n-grams of the texts; None where there is none."""
    grams = [tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None
