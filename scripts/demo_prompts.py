"""Beginnings of Python text for demos and tests: sixty prompts, from one word to a page; and as many more as asked for,
cut from sources that the demo model has not seen."""

from __future__ import annotations

import random

_SHORT = (
    "import os",
    "def ",
    "class",
    "import sys\nimport re\n",
    "from collections import",
    "def main():\n    ",
    "if __name__ == '__main__':\n    ",
    "class Error(Exception):\n",
    "@property\ndef name(self):\n",
    "for i in range(",
    "try:\n    import ",
    "while True:\n    line = ",
    "with open(filename",
    "return self._",
    "raise ValueError(",
    "assert isinstance(",
    '"""This module provides',
    "# Copyright",
    "lambda x: x",
    "__all__ = [",
)

_MEDIUM = (
    'def read_file(filename, encoding=\'utf-8\'):\n    """Return the contents of a file."""\n    with open(',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        ",
    "def parse_args(argv):\n    parser = argparse.ArgumentParser(\n        description=",
    "import threading\n\nclass Worker(threading.Thread):\n    def __init__(self, queue):\n        ",
    "def is_valid(value):\n    if not isinstance(value, str):\n        raise TypeError(",
    "class Node:\n    def __init__(self, value, next=None):\n        self.value = value\n        ",
    "def _get_default(self, key, default=None):\n    try:\n        return self[key]\n    except KeyError:\n        ",
    "import socket\n\ndef connect(host, port, timeout=None):\n    sock = socket.socket(socket.AF_INET, ",
    "    def __repr__(self):\n        return '<%s at %#x>' % (self.__class__.__name__, ",
    'def quote(string):\n    """Quote a string so that it can be used in a shell command.\n\n    >>> quote(\'a b\')\n',
    "class TestCase(unittest.TestCase):\n    def setUp(self):\n        self.path = ",
    "from functools import wraps\n\ndef cached(function):\n    cache = {}\n    @wraps(function)\n    def wrapper(",
    "import logging\n\nlogger = logging.getLogger(__name__)\n\ndef handle(record):\n    logger.",
    "def copy_tree(source, target):\n    names = os.listdir(source)\n    os.makedirs(target)\n    for name in names:\n",
    "    def __eq__(self, other):\n        if not isinstance(other, ",
    "def fibonacci(n):\n    a, b = 0, 1\n    while a < n:\n        ",
    "async def fetch(reader, writer):\n    data = await reader.read(",
    "import json\n\ndef load(path):\n    with open(path) as file:\n        return json.",
    "def split_header(line):\n    name, sep, value = line.partition(':')\n    if not sep:\n        ",
    "class Counter(dict):\n    '''Dict subclass for counting hashable items.'''\n    def most_common(self, n=None):\n",
)

_CHAT_LIKE = (
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a Python function join: Join path components.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat does the function close do?<|im_end|>\n<|im_start|>assistant\n",
)

_PREAMBLE = '''"""Utilities for reading configuration files.

The classes in this module parse a simple format: one option per line, a name
and a value separated by an equal sign. Lines that start with a hash sign are
comments, and blank lines are ignored.
"""

import os
import re
import sys

from collections import OrderedDict

__all__ = ["ConfigError", "ConfigReader", "read_config"]


class ConfigError(Exception):
    """Raised when a line cannot be parsed."""

    def __init__(self, filename, lineno, message):
        super().__init__(message)
        self.filename = filename
        self.lineno = lineno
        self.message = message

    def __str__(self):
        return "%s:%d: %s" % (self.filename, self.lineno, self.message)


class ConfigReader:
    """Read options from a file object, line by line."""

    _option = re.compile(r"(?P<name>[a-z]+)\\s*=\\s*(?P<value>.*)$")

    def __init__(self, fileobj, filename="<string>"):
        self._file = fileobj
        self._filename = filename
        self._lineno = 0
        self._options = OrderedDict()

    def readline(self):
        line = self._file.readline()
        self._lineno += 1
        return line

'''

_ENDINGS = (
    "    def read(self):\n        while True:\n            line = self.readline()\n            if not line:\n",
    "    def __len__(self):\n        return ",
    "    def __iter__(self):\n        ",
    '    def get(self, name, default=None):\n        """Return the value of an option."""\n        ',
    "    def items(self):\n        return self._options.",
    "def read_config(path):\n    with open(path) as file:\n        reader = ConfigReader(",
    "    def close(self):\n        if self._file is not None:\n            ",
    "    def write(self, fileobj):\n        for name, value in self._options.items():\n            ",
)

_LONG = tuple(_PREAMBLE * repeat + ending for repeat, ending in zip((1, 1, 1, 1, 2, 2, 3, 4), _ENDINGS, strict=True))
_CUT = tuple(_PREAMBLE[:length] for length in (33, 64, 127, 256, 400, 511, 640, 900))
_SHOWN = (_MEDIUM[0], _LONG[0], _CHAT_LIKE[1], _MEDIUM[15])

DEMO_PROMPTS: tuple[str, ...] = tuple(dict.fromkeys((*_SHOWN, *_SHORT, *_MEDIUM, *_CHAT_LIKE, *_CUT, *_LONG)))
"""Sixty different prompts of 1 to about 1,700 tokens; the first four are what ``kvferry demo`` shows."""


def accuracy_prompts(count: int, seed: int = 0) -> list[str]:
    """``count`` prompts of 10 to 1,500 characters, cut from unseen sources at line starts: the same for one Python."""
    from scripts.demo_corpus import held_out_texts

    chooser = random.Random(seed)
    texts = [text for text in held_out_texts() if len(text) > 2_000]
    prompts = []
    for _ in range(count):
        text = chooser.choice(texts)
        start = text.rfind("\n", 0, chooser.randrange(len(text) - 1_600)) + 1
        prompts.append(text[start : start + int(10 * 150 ** chooser.random())])
    return prompts


def perplexity_text(length: int = 6_000) -> str:
    """The beginning of an unseen source file, for comparing perplexities."""
    from scripts.demo_corpus import held_out_texts

    return max(held_out_texts(), key=len)[:length]
