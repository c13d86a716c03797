"""Limits of the engine's socket."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """Limits of the engine's socket."""

    peers: int = 64
    """Maximum number of connected gateways."""
    send_frames: int = 1000
    """Maximum number of frames queued for one peer; one step is one frame."""
    receive_frames: int = 1000
    """Maximum number of unread frames of one peer; further ones wait in the peer's queue."""
    frames_per_receive: int = 128
    """Maximum number of frames read between two steps."""
    file_asks: int = 8
    """Maximum number of file parts that one peer may have requested and not received."""
    parts_under_way: int = 2
    """Maximum number of file parts sent to one peer that its connection has not accepted."""
    parts_per_receive: int = 2
    """Maximum number of file parts sent between two steps, to all peers together."""
    retry_after_seconds: float = 1.0
    """Retry-After that a gateway receives if the queue is full."""
    heartbeat_seconds: float = 1.0
    """Interval of ZMTP heartbeats."""
    heartbeat_timeout_seconds: float = 5.0
    """Time without an answer after which a peer is considered gone."""
    stats_seconds: float = 1.0
    """Maximum interval between two `Stats`."""
    stats_change_seconds: float = 0.02
    """Minimum interval between two `Stats`."""
    linger_seconds: float = 2.0
    """Maximum time that `close` waits for the last frames to be sent."""
