"""The worker process: claims jobs, runs their handlers, keeps their leases, records their outcomes.

Its control plane is threads over connections of its own: one claims, one renews leases, one records outcomes, one
listens, one does the housekeeping. Handlers run elsewhere, sync ones in threads, async ones on one event loop, each
with a session of the application's. So a handler may block its loop or its thread; it cannot block the worker.
"""

from __future__ import annotations

from sqla_jobqueue.worker.hooks import JobSnapshot, WorkerHooks
from sqla_jobqueue.worker.signals import EXIT_CRASHED, EXIT_FORCED, EXIT_STOPPED
from sqla_jobqueue.worker.worker import Worker

__all__ = ["EXIT_CRASHED", "EXIT_FORCED", "EXIT_STOPPED", "JobSnapshot", "Worker", "WorkerHooks"]
