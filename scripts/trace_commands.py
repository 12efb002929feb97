"""Everything that ``kvferry trace`` can do, by name. Each function takes the trace directory first.

All raise ``TraceError`` with a text for people when the directory holds no trace or lacks what was asked for.
"""

from __future__ import annotations

from actors.runtime.trace_file import TraceError
from scripts.trace_grep import grep
from scripts.trace_html import sequence_html
from scripts.trace_path import path_text
from scripts.trace_perfetto import write_perfetto
from scripts.trace_replay import replay_text
from scripts.trace_sequence import sequence_mermaid, sequence_text
from scripts.trace_stuck import stuck_text

__all__ = [
    "TraceError",
    "grep",
    "path_text",
    "replay_text",
    "sequence_html",
    "sequence_mermaid",
    "sequence_text",
    "stuck_text",
    "write_perfetto",
]
