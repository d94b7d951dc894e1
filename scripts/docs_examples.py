"""For the documentation site: examples in docstrings become blocks of code, and roles such as :func:`x` plain code."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^ *>>> .*(?:\n(?! *$).*)*", re.M)  # up to the next empty line
ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?([\w]+)`")


def as_markdown(docstring: str) -> str:
    """The docstring with its examples fenced.

    >>> as_markdown("Text.\\n\\n>>> f(1)\\n[1]").splitlines()
    ['Text.', '', '```pycon', '>>> f(1)', '[1]', '```']
    """
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", ROLE.sub(r"`\1`", docstring))


class Examples(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
