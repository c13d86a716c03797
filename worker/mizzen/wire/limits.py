"""Bounds of the engine's socket."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """Bounds of the engine's socket."""

    peers: int = 64
    send_frames: int = 1000
    """Frames that may wait for one peer; one step is one frame."""
    receive_frames: int = 1000
    """Unread frames of one peer; its further ones wait in its own queue."""
    frames_per_receive: int = 128
    """Frames read between two steps at most."""
    file_asks: int = 8
    """Parts of files that one peer may ask for before the first of them has been sent."""
    parts_under_way: int = 2
    """Parts of files that one peer has been sent and its connection has not taken."""
    parts_per_receive: int = 2
    """Parts of files sent between two steps at most, to all peers together."""
    retry_after_seconds: float = 1.0
    """What a gateway is told when the queue is full."""
    heartbeat_seconds: float = 1.0
    heartbeat_timeout_seconds: float = 5.0
    """A peer that does not answer for this long has vanished."""
    stats_seconds: float = 1.0
    stats_change_seconds: float = 0.02
    """Changes are told at most this often."""
    linger_seconds: float = 2.0
    """How long `close` lets the last frames leave."""
