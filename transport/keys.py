"""The secrets of one run: the CURVE key pair of its links and the shared secret of its TCP data plane.

All nodes of a run share one key pair. A node takes part exactly when it can read the run's key file (mode 0600, in the
run directory, or copied to other hosts by the operator): its public key is known to nobody else either.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec
import zmq

FILE_NAME = "keys.json"


class RunKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CURVE keys in Z85 (40 characters each), the data plane's secret in hexadecimal."""

    curve_public: str
    curve_secret: str
    data_secret: str


class KeysError(ValueError):
    """The key file is missing, readable by others, or not a key file."""


def make_keys() -> RunKeys:
    """New random keys."""
    public, secret = zmq.curve_keypair()
    return RunKeys(
        curve_public=public.decode(), curve_secret=secret.decode(), data_secret=secrets.token_bytes(32).hex()
    )


def write_keys(path: Path, keys: RunKeys) -> None:
    """Write a new key file, readable by its owner only. Raises ``FileExistsError`` when there is one."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(keys))


def read_keys(path: Path) -> RunKeys:
    """The keys in ``path``. Raises ``KeysError``, which says what is wrong with the file."""
    try:
        if path.stat().st_mode & 0o077:
            raise KeysError(f"{path} may be read by others: chmod 600 it")
        return msgspec.json.decode(path.read_bytes(), type=RunKeys)
    except OSError as error:
        raise KeysError(f"no key file: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise KeysError(f"{path} is not a key file: {error}") from error
