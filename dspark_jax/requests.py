"""From what a caller gives to checked requests: every fault is found before any work on a device."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_jax.config_dense import ModelConfig
from dspark_jax.decode.batch import MAX_STOPS, Request
from dspark_jax.decode.sampling import MAX_LOGPROBS, SamplingParams
from dspark_jax.errors import RequestError, described, raise_all
from dspark_jax.text import Tokenizer

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None


class RequestReader:
    """Reads prompts and sampling parameters for one model.

    Args:
      config: of the model.
      tokenizer: turns texts into ids.
      max_len: most positions of a request, prompt included.
      max_logprobs: the most alternatives that the compiled program reports; None if it has no log-probabilities.
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, max_len: int, max_logprobs: int | None = MAX_LOGPROBS):
        self.config, self.tokenizer, self.max_len, self.max_logprobs = config, tokenizer, max_len, max_logprobs

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, the beginning-of-sequence token first if the model has one."""
        bos = self.config.bos_token_id
        return [*([] if bos is None else [bos]), *self.tokenizer.encode(text)]

    def read(self, prompts: Sequence[Prompt], params: Params, ignore_eos: bool) -> list[Request]:
        """Checked requests; raises one RequestError with every fault."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise RequestError(f"prompts is {described(prompts)}; expected a list of texts or of id lists, as in [prompt]")
        if not prompts:
            raise RequestError("prompts is empty; expected at least one prompt")
        faults: list[str] = []
        each = self._params_each(params, len(prompts), faults)
        ids = []
        for i, prompt in enumerate(prompts):
            name = "the prompt" if len(prompts) == 1 else f"prompts[{i}]"
            ids.append(self._prompt_ids(prompt, name, faults))
        stops = []
        for i, p in enumerate(each):
            stop = {int(t) for t in p.stop_token_ids} | (set() if ignore_eos else set(self.config.eos_token_ids))
            if len(stop) > MAX_STOPS:
                name = "stop_token_ids" if isinstance(params, SamplingParams) else f"params[{i}].stop_token_ids"
                ends = ", ".join(map(str, self.config.eos_token_ids))
                eos = "" if ignore_eos or not ends else f", the end-of-sequence token {ends} counted"
                fault = f"{name} gives {len(stop)} different ids{eos}; expected at most {MAX_STOPS}: remove some"
                faults += [fault] if fault not in faults else []
            stops.append(tuple(sorted(stop)))
        raise_all(RequestError, "request", faults)
        return [Request(tuple(p), s, stop) for p, s, stop in zip(ids, each, stops, strict=True)]

    def _params_each(self, params: Params, count: int, faults: list[str]) -> list[SamplingParams]:
        """Sampling parameters of every prompt; [] where the faults found leave nothing to go on with."""
        shared = params is None or isinstance(params, SamplingParams)
        given: Any = [params or SamplingParams()] if shared else params
        if isinstance(given, str | bytes) or not isinstance(given, Sequence):
            faults.append(f"params is {described(params)}; expected SamplingParams or a list of them")
            return []
        sound = True
        for i, p in enumerate(given):
            name = "" if shared else f"params[{i}]: "
            if not isinstance(p, SamplingParams):
                what = "params" if shared else f"params[{i}]"
                faults.append(f"{what} is {described(p)}; expected SamplingParams (its from_dict reads a dict)")
                sound = False
            elif found := p.faults(self.config.vocab_size):
                faults += [name + fault for fault in found]
                sound = False
            elif p.logprobs is not None and (self.max_logprobs is None or p.logprobs > self.max_logprobs):
                has = "has none" if self.max_logprobs is None else f"has {self.max_logprobs} at most"
                faults.append(
                    f"{name}logprobs = {p.logprobs}; this engine {has}: make it with max_logprobs = {p.logprobs}, or leave"
                    " logprobs out"
                )
                sound = False
        if not shared and len(given) != count:
            many = f"{count} prompt{'s' * (count != 1)}"
            faults.append(f"params has {len(given)} entries for {many}; expected one for all or one a prompt")
            sound = False
        if not sound:
            return []
        return [given[0]] * count if shared else list(given)

    def _prompt_ids(self, prompt: Any, name: str, faults: list[str]) -> list[int]:
        """Ids of one prompt, or [] and an entry in `faults`."""
        if isinstance(prompt, str):
            if not prompt:
                faults.append(f"{name} is empty; expected some text")
                return []
            try:
                prompt.encode()  # half a surrogate pair, as a command line with stray bytes gives, has no UTF-8
                ids = self.encode(prompt)
            except (ValueError, UnicodeError) as error:
                faults.append(f"{name} cannot be encoded: {error}")
                return []
        elif isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes | bytearray):
            ids = list(prompt)
            if not ids:
                faults.append(f"{name} is empty; expected at least one token id")
                return []
        else:
            faults.append(f"{name} is {described(prompt)}; expected a text or a list of token ids")
            return []
        vocab = self.config.vocab_size
        bad = [t for t in ids if not isinstance(t, int | np.integer) or isinstance(t, bool) or not 0 <= t < vocab]
        if bad:
            shown = ", ".join(map(repr, bad[:5])) + (", …" if len(bad) > 5 else "")
            faults.append(f"{name} holds {shown}; expected token ids in 0 … {vocab - 1}")
            return []
        if len(ids) > self.max_len - 1:
            limit = self.config.max_position_embeddings
            faults.append(
                f"{name} has {len(ids)} tokens; expected at most {self.max_len - 1} (max_len is {self.max_len}, one"
                " position is for the answer): shorten it"
                + (f", or in Python load the model with a larger max_len, up to {limit}" if self.max_len < limit else "")
            )
            return []
        return [int(t) for t in ids]
