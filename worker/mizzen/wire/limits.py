# SPDX-License-Identifier: Apache-2.0
"""Limits and intervals of the engine's end of the wire."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """Limits and intervals of `mizzen.wire.server.engine_server.WireServer`."""

    peers: int = 64
    """Maximum number of connected gateways."""
    send_frames: int = 1000
    """Maximum number of frames queued for one gateway; a step's outputs are one frame."""
    receive_frames: int = 1000
    """Maximum number of unread frames of one gateway; further frames wait in the gateway's send queue."""
    frames_per_receive: int = 128
    """Maximum number of frames read between two steps, per listening socket."""
    file_requests: int = 8
    """Maximum number of requests for file parts that one gateway may have pending."""
    queued_parts: int = 2
    """Maximum number of file parts queued in ZMQ for one gateway; requests for more parts wait unanswered."""
    parts_per_receive: int = 2
    """Maximum number of file parts sent between two steps, to all gateways together."""
    image_bytes: int = 512 * 1024 * 1024
    """Maximum size of all images that were requested from gateways and have not arrived completely."""
    gateway_image_bytes: int = 256 * 1024 * 1024
    """The same for the images of one gateway; requests for further images wait."""
    image_seconds: float = 30.0
    """Maximum time until the next part of a requested image arrives."""
    bytes_per_receive: int = 4 * 1024 * 1024
    """Number of bytes read between two steps, per listening socket, after which further frames wait."""
    retry_after_seconds: float = 1.0
    """Delay after which a gateway may retry a request that was rejected because the queue is full."""
    heartbeat_seconds: float = 1.0
    """Interval of ZMTP heartbeats."""
    heartbeat_timeout_seconds: float = 5.0
    """Time without an answer to a heartbeat after which a gateway is considered gone."""
    stats_seconds: float = 1.0
    """Maximum interval between two `Stats` messages; an unchanged load is sent at this interval."""
    stats_change_seconds: float = 0.02
    """Minimum interval between two `Stats` messages; a changed load is sent after this interval."""
    linger_seconds: float = 2.0
    """Maximum time for which `WireServer.close` waits until the last frames are sent."""
