"""A checkpoint's chat template: Jinja, sandboxed, with the names that such templates may use.

What templates rely on (block trimming, ``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now``, loop
controls, a ``generation`` block that only marks assistant text) follows the convention that ``transformers`` set.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class ChatTemplateError(ValueError):
    """The template refused these messages, or cannot be used; its text is for the client."""


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks what an assistant wrote; rendering passes it through."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The body itself, without the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """One compiled template. Rendering is thread-safe.

    ``special_tokens`` (``bos_token``, …) are names in the template; ``clock`` serves ``strftime_now``.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], clock: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format_: clock().strftime(format_)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the checkpoint's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text. ``variables`` (``enable_thinking``, …) are visible in the template.

        Raises ``ChatTemplateError`` with the template's own words when it refuses the messages.
        """
        names = self._special_tokens | variables
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **names,
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise ChatTemplateError(f"the chat template failed on the messages: {error!r}") from error
