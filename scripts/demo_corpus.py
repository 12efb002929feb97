"""The text the demo model learns from: the standard library of the Python that runs this, plus a little chat.

Nothing is downloaded. Documents are whole source files, printed anew from their syntax trees with docstrings cut to
their first line: plain code in one style is what a model this small can learn. Some files are held out by a hash of
their name, so that the measured loss and draft acceptance are about text the model has not seen. The chat part turns
small documented functions into question and answer, in the tokenizer's chat format, so that a chat answer ends with
``<|im_end|>``.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import random
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How text is cut before byte-pair merges: words, single digits, runs of punctuation, line ends, blanks."""

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "distutils", "lib2to3", "__pycache__"}
)
CORE_FILES = frozenset(
    [
        "argparse.py",
        "bisect.py",
        "calendar.py",
        "cmd.py",
        "collections/__init__.py",
        "configparser.py",
        "contextlib.py",
        "copy.py",
        "csv.py",
        "fileinput.py",
        "fnmatch.py",
        "functools.py",
        "genericpath.py",
        "getopt.py",
        "glob.py",
        "heapq.py",
        "http/client.py",
        "json/decoder.py",
        "json/encoder.py",
        "logging/__init__.py",
        "ntpath.py",
        "posixpath.py",
        "queue.py",
        "random.py",
        "sched.py",
        "shelve.py",
        "shutil.py",
        "socketserver.py",
        "string.py",
        "tempfile.py",
        "textwrap.py",
        "threading.py",
        "urllib/parse.py",
    ]
)
"""Everyday code, small enough to be read several times: most of what the model sees."""
SKIPPED_FILES = frozenset({"entities.py"})
FILE_BYTES_MAX = 300_000
HELD_OUT_OF = 24  # one file in this many is held out

SMALL_TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hi! What would you like to write?"),
    ("Hello, who are you?", "I am a small model trained on Python's standard library."),
    ("Who are you?", "I am a small model trained on Python's standard library."),
    ("What can you do?", "I can write short pieces of Python code. I am small, so please check what I write."),
    ("How are you?", "I am fine, thank you. Which function shall we write?"),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Goodbye", "Goodbye!"),
    ("What is Python?", "Python is a programming language with a large standard library."),
)


@dataclass(frozen=True)
class Corpus:
    """Documents as text: ``core``, ``rest`` and ``held_out`` are plain code, ``chat`` whole conversations."""

    core: tuple[str, ...]
    rest: tuple[str, ...]
    held_out: tuple[str, ...]
    chat: tuple[str, ...]


def read_corpus(seed: int = 0) -> Corpus:
    """Read the standard library's sources and make the chat part from them."""
    sources = {name: text for name, text in _source_files() if not _is_held_out(name)}
    core = {name: text for name, text in sources.items() if name in CORE_FILES}
    rest = [text for name, text in sources.items() if name not in CORE_FILES]
    questions = [pair for text in core.values() for pair in _function_questions(text)]
    random.Random(seed).shuffle(questions)
    talk = [pair for pair in SMALL_TALK for _ in range(max(1, len(questions) // (8 * len(SMALL_TALK))))]
    chat = tuple(conversation(question, answer) for question, answer in (*questions, *talk))
    return Corpus(
        core=_all_plain(core.values()), rest=_all_plain(rest), held_out=_all_plain(held_out_texts()), chat=chat
    )


def plain_code(text: str) -> str:
    """A source text in one style: no comments, one kind of quotes, docstrings of one line. Raises ``SyntaxError``."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        match node.body:
            case [ast.Expr(value=ast.Constant(value=str(documentation)) as constant), *_]:
                constant.value = documentation.strip().partition("\n")[0]
    return ast.unparse(tree) + "\n"


def _all_plain(texts: Iterable[str]) -> tuple[str, ...]:
    plain = []
    for text in texts:
        with contextlib.suppress(SyntaxError):
            plain.append(plain_code(text))
    return tuple(plain)


def held_out_texts() -> tuple[str, ...]:
    """The source files, as they are, that the demo model has not seen. Which these are depends on Python's version."""
    return tuple(text for name, text in _source_files() if _is_held_out(name))


def conversation(question: str, answer: str) -> str:
    """One exchange exactly as the chat template renders it, answer and closing token included."""
    return f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n{answer}{TURN_END}\n"


def _is_held_out(name: str) -> bool:
    digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return digest % HELD_OUT_OF == 0


def _source_files() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(name.parts) or name.name in SKIPPED_FILES:
            continue
        if any(part.startswith("config-") for part in name.parts) or path.stat().st_size > FILE_BYTES_MAX:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) > 200:
            yield name.as_posix(), text


def _function_questions(text: str) -> Iterator[tuple[str, str]]:
    """(question, answer) for every short documented function of a source file."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        documentation = ast.get_docstring(node)
        if not documentation or node.end_lineno is None or node.end_lineno - node.lineno > 25:
            continue
        summary = documentation.splitlines()[0].strip()
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if not 12 < len(summary) < 100 or len(source) > 900:
            continue
        yield f"Write a Python function {node.name}: {summary}", f"```python\n{plain_code(source)}```"
        yield f"What does the function {node.name} do?", summary


def train_tokenizer(texts: Sequence[str], vocabulary_count: int) -> Tokenizer:
    """A byte-level BPE tokenizer of ``vocabulary_count`` entries; the special tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_count,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
