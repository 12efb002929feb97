"""What the worker asks its shell to do. Data only."""

from __future__ import annotations

from actors.runtime.machine import Job
from messages.batch import ExecuteBatch


class LoadModel(Job, frozen=True, kw_only=True):
    """Register the caches, join the TP group, load this rank's weights. Result: ``ModelLoaded`` or ``LoadFailed``."""


class ExecuteStep(Job, frozen=True, kw_only=True):
    """Run one step; emits ``LayerReady`` on the way. Result: ``BatchResult`` or ``StepFailed``. Steps run in order."""

    batch: ExecuteBatch
