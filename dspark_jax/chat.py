"""Chat templates: messages to the ids of a prompt, by the Jinja text that comes with a model."""

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dspark_jax.config import read_json
from dspark_jax.errors import CheckpointError, RequestError, raise_all


class ChatTemplate:
    """A model's template with the tokenizer that knows its control tokens.

    Args:
      source: Jinja text as transformers takes it.
      tokenizer: of the model; the given one stays as it is.
      names: `bos_token` and the like, which templates use.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, names: Mapping[str, str]):
        self.source, self.names = source, dict(names)
        self._tokenizer = copy.deepcopy(tokenizer)
        self._tokenizer.encode_special_tokens = False
        added = tokenizer.get_added_tokens_decoder().values()
        self._control = [token.content for token in added if token.special]

    def encode(self, messages: Sequence[Mapping[str, str]], **options: Any) -> list[int]:
        """Ids of the conversation and of the opening of an answer; a prompt for `LM.generate`.

        Args:
          messages: in order, each with `role` ("system", "user", "assistant") and `content`.
          options: further variables of the template, such as `enable_thinking` of Qwen3.

        Raises RequestError for messages of another form, for one that spells a control token, and for what the template
        itself refuses; CheckpointError where the package jinja2 is missing.
        """
        return self._tokenizer.encode(self.render(messages, **options), add_special_tokens=False).ids

    def render(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        """The text that `encode` encodes, control tokens spelt out."""
        raise_all(RequestError, "messages", self._faults(messages))
        try:
            import jinja2
        except ImportError:
            raise CheckpointError("a chat template needs the package jinja2: pip install 'dspark-jax[chat]'") from None
        values = {"add_generation_prompt": True, **self.names, **options, "messages": [dict(m) for m in messages]}
        try:
            return _template(self.source).render(values)
        except (jinja2.TemplateError, TypeError) as error:
            raise RequestError(f"messages: the model's chat template refuses them: {error}") from error

    def _faults(self, messages: Any) -> list[str]:
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
            return [f"is {messages!r:.60}; expected a list of messages, each with role and content"]
        faults = []
        for i, message in enumerate(messages):
            found = message if isinstance(message, Mapping) else {}
            if not isinstance(found.get("role"), str) or not isinstance(found.get("content"), str):
                faults.append(f"messages[{i}] is {message!r:.60}; expected role and content, both texts")
                continue
            # The template's own control tokens are recognised, so a message's would be, too.
            spelt = [token for token in self._control if token in found["role"] + "\0" + found["content"]]
            if spelt:
                faults.append(f"messages[{i}] spells the control token {spelt[0]!r}; remove it")
        return faults


@functools.lru_cache(maxsize=16)
def _template(source: str) -> Any:
    """The compiled template: compiling one takes longer than a conversation's rendering."""
    import jinja2
    import jinja2.sandbox

    def refuse(reason: str) -> None:
        raise jinja2.TemplateError(reason)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
    return environment.from_string(source)


def read_chat(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of a checkpoint folder (chat_template.jinja, or in tokenizer_config.json); None without one.

    Raises CheckpointError for files that cannot be read.
    """
    config, single = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    found = read_json(config) if config.is_file() else {}
    source = found.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((one.get("template") for one in source if isinstance(one, dict) and one.get("name") == "default"), None)
    if single.is_file():
        try:
            source = single.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{single}: cannot be read ({error}); download it again") from error
    if not isinstance(source, str):
        return None
    names = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = found.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            names[name] = token
    return ChatTemplate(source, tokenizer, names)
