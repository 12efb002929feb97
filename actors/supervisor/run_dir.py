"""The private directory of one run, and the removal of what dead runs left behind.

A run owns a directory (mode 0700) with its sockets, node configurations and keys, and shared-memory segments that
start with its run id. The supervisor holds a file lock in the directory for as long as it lives; the kernel releases
it however the supervisor dies. So "is this run dead?" is "can its lock be taken?", which no reused pid can fool.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from actors.runtime.config import ConfigError
from actors.runtime.nursery import NODE_MODULE, NURSERY_MODULE
from transport.shm_dataplane import unlink_run_segments

PREFIX = "kvferry-run-"
OWNER_FILE = "owner.json"
SOCKET_PATH_BYTES_MAX = 107  # sun_path of a Unix socket, without the final zero
LONGEST_SOCKET_NAME = "supervisor.sock"
OWNERLESS_AGE_S = 600.0
"""A directory without owner file may be one that another supervisor is just making; only an old one is a leftover."""

ORPHAN_END_S = 5.0


class Owner(msgspec.Struct, frozen=True):
    """Content of the owner file, for people and for the next start."""

    pid: int
    run_id: str


@dataclass
class RunDir:
    """A directory this process owns. ``lock`` is the descriptor that holds the lock."""

    path: Path
    run_id: str
    lock: int

    def remove(self) -> None:
        """Remove segments and directory, and give up the lock. May be called again."""
        unlink_run_segments(self.run_id)
        shutil.rmtree(self.path, ignore_errors=True)
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def make_run_dir(configured: str = "") -> RunDir:
    """Create (or take over from a dead run) the run directory. Raises ``ConfigError`` when it cannot be used."""
    if configured:
        path = Path(configured).expanduser().absolute()
        _check_length(path)
        _take_over(path)
        path.mkdir(mode=0o700, parents=True)
    else:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
        _check_length(path)
    run_id = secrets.token_hex(4)
    unfinished = path / (OWNER_FILE + ".new")
    lock = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, msgspec.json.encode(Owner(pid=os.getpid(), run_id=run_id)))
    unfinished.rename(path / OWNER_FILE)  # whoever sees it, sees it locked
    return RunDir(path, run_id, lock)


def is_alive(path: Path) -> bool:
    """Whether a living supervisor owns the run directory ``path``."""
    try:
        lock = os.open(path / OWNER_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def clean_dead_runs(parent: Path | None = None) -> list[str]:
    """Remove directories and segments of runs whose supervisor is dead; returns the directories removed."""
    parent = parent or Path(tempfile.gettempdir())
    removed = []
    for path in sorted(parent.glob(PREFIX + "*")):
        try:
            status = path.lstat()
        except OSError:
            continue
        mine = path.is_dir() and not path.is_symlink() and status.st_uid == os.getuid()
        if mine and _remove_if_dead(path, time.time() - status.st_mtime):
            removed.append(str(path))
    return removed


def _take_over(path: Path) -> None:
    """Make room for a new run at ``path``; refuses a living run's directory and one that is not ours to remove."""
    if not path.exists():
        return
    if not (path / OWNER_FILE).exists():
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
            return
        raise ConfigError(f"run_dir {path} exists and holds other files; name a new directory (option: run_dir)")
    if not _remove_if_dead(path, age_s=0.0):
        owner = _read_owner(path)
        raise ConfigError(
            f"run_dir {path} is in use by pid {owner.pid if owner else '?'}; stop that run or name another directory "
            "(option: run_dir)"
        )


def _remove_if_dead(path: Path, age_s: float) -> bool:
    owner_file = path / OWNER_FILE
    try:
        lock = os.open(owner_file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        if age_s < OWNERLESS_AGE_S:
            return False
        shutil.rmtree(path, ignore_errors=True)
        return True
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # its owner lives
    else:
        _kill_orphans(path)
        owner = _read_owner(path)
        if owner is not None and owner.run_id:
            unlink_run_segments(owner.run_id)
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(lock)


def _kill_orphans(path: Path) -> None:
    """End node processes of a dead run: they end with their supervisor, unless they hang or were stopped."""
    orphans = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            ours = NODE_MODULE in command or NURSERY_MODULE in command
            if ours and any(Path(word).parent == path for word in command):
                process.kill()
                orphans.append(process)
    psutil.wait_procs(orphans, timeout=ORPHAN_END_S)


def _read_owner(path: Path) -> Owner | None:
    try:
        return msgspec.json.decode((path / OWNER_FILE).read_bytes(), type=Owner)
    except (OSError, msgspec.DecodeError):
        return None


def _check_length(path: Path) -> None:
    length = len(os.fsencode(path / LONGEST_SOCKET_NAME))
    if length > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"run_dir {path} is too long for Unix sockets: {length} bytes with a socket's name, at most "
            f"{SOCKET_PATH_BYTES_MAX} (option: run_dir)"
        )
