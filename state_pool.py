"""The state pool under its public name; the parts are in `rwkv_batch/sessions/`."""

from rwkv_batch.sessions.pool import Lease, StatePool

__all__ = ["Lease", "StatePool"]
