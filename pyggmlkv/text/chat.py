"""Chat templates: the file's own Jinja template, run in a sandbox that cannot reach Python.

Knows messages and text, no ids. Upstream: `tokenizer.chat_template` as Hugging Face's apply_chat_template runs it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from pyggmlkv.errors import TextError
from pyggmlkv.text.extra import require

Message: TypeAlias = Mapping[str, Any]


class ChatTemplate:
    """A compiled chat template; `source` is the template's text."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        sandbox = require("jinja2.sandbox", "text")
        loops = require("jinja2.ext", "text").loopcontrols
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loops]
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.filters["tojson"] = _to_json
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
        except Exception as cause:
            raise TextError(f"the chat template does not compile: {cause}", source=source) from cause

    def apply(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for `messages` (each with `role` and `content`), ending where the assistant speaks.

        Raises: TextError when the template refuses the messages; the message is the template's own.
        """
        values = {**self._tokens, **(variables or {})}
        values |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return str(self._template.render(values))
        except TextError:
            raise
        except Exception as cause:
            raise TextError(f"the chat template failed: {cause}", messages=messages) from cause


def _refuse(message: str) -> NoReturn:
    raise TextError(f"the chat template refuses these messages: {message}")


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
