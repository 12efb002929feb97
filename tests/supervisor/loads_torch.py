"""A rank's module that loads torch, as a worker's does."""

from __future__ import annotations

import torch

from tests.supervisor.dummies import build_rank

__all__ = ["build_rank", "torch"]
