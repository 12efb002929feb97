"""The newest messages of a running cluster that writes no trace: every node is asked for the ring it keeps anyway."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import psutil

from actors.runtime.nursery import NODE_MODULE
from actors.runtime.process import RING_SIGNAL
from actors.runtime.trace import RINGS
from actors.runtime.trace_file import TraceError

WAIT_S: Final = 10.0
_LOOK_AGAIN_S: Final = 0.05


def node_processes(run_dir: Path) -> dict[int, str]:
    """pid → node, of the node processes that were started from configurations in ``run_dir`` and listen already."""
    found: dict[int, str] = {}
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = [word for word in process.info["cmdline"] or [] if word]  # a forked node's ends with empty ones
        if NODE_MODULE in command and Path(command[-1]).parent == run_dir and _catches(process.info["pid"]):
            found[process.info["pid"]] = Path(command[-1]).stem
    return found


def _catches(pid: int) -> bool:
    """Whether the process has a handler for ``RING_SIGNAL``: without one the signal would end it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line for line in lines if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (RING_SIGNAL - 1) & 1)


def collect_rings(run_dir: Path, wait_s: float = WAIT_S) -> list[Path]:
    """Have every node of the cluster in ``run_dir`` write its ring; the files (rings of failed nodes are among them).

    Raises ``TraceError`` when no node runs there, or when one does not answer within ``wait_s`` seconds.
    """
    run_dir = run_dir.resolve()
    processes = node_processes(run_dir)
    if not processes:
        raise TraceError(f"no node of a cluster in {run_dir} is running (see 'kvferry status')")
    rings = run_dir / RINGS
    before = _written(rings)
    for pid in processes:
        os.kill(pid, RING_SIGNAL)
    deadline_s = time.monotonic() + wait_s
    missing = set(processes.values())
    while missing:
        now = _written(rings)
        fresh = {path.stem.rpartition(".")[0] for path, when in now.items() if when != before.get(path)}
        missing = set(processes.values()) - fresh
        if missing and time.monotonic() > deadline_s:
            raise TraceError(f"{', '.join(sorted(missing))} did not write a ring within {wait_s:.0f} s")
        time.sleep(_LOOK_AGAIN_S)
    return sorted(now)


def _written(rings: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in rings.glob("*.trace")} if rings.is_dir() else {}
