# SPDX-License-Identifier: Apache-2.0
"""Finds what the engines of a model serve, which decides how texts are scored."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import Scope

from mizzen.gateway.errors import unavailable
from mizzen.gateway.requests.generation_request import GenerationRequest
from mizzen.gateway.text.model import TextModel
from mizzen.gateway.text.model_properties import ModelProperties

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """Text model and properties of one of a service's engines."""

    text: TextModel
    properties: ModelProperties


async def find_service_model(gateway: Gateway, scope: Scope, generation: GenerationRequest) -> ServiceModel:
    """Return what the engines of a request's model serve.

    If no engine serves, this waits in the queue, like a request, until one does.

    Args:
        gateway: The gateway.
        scope: ASGI scope of the HTTP request.
        generation: One of the request's prompts, from which the model and the priority are taken.

    Raises:
        ApiError: the model is unknown or may not be used, or no engine served in time.
    """
    service = gateway.find_active_service(generation.model, scope)
    served = service.table.find_served()
    if served is None:
        entry = gateway.new_queue_entry(scope, generation)
        entry.expected_tokens = 1
        entry.deadline = max(entry.deadline, time.monotonic() + gateway.config.wake_timeout_seconds)
        await service.admission.enter(entry)
        service.admission.leave(entry)
        served = service.table.find_served()
        if served is None:
            raise unavailable(service.table.unavailable_reason())
    return ServiceModel(*served)
