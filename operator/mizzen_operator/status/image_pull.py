# SPDX-License-Identifier: Apache-2.0
"""Names the field of a service that sets an image which a node cannot pull. Pure."""

from __future__ import annotations

from mizzen_operator.api.types import InferenceService
from mizzen_operator.pods.container_state import IMAGE_REASONS


def explain_image_pull(service: InferenceService, image: str, reason: str, message: str) -> str:
    """Return a message about an engine pod; if its image cannot be pulled, add the fields to correct.

    Args:
        service: the service.
        image: the engine's image.
        reason: reason of the pod's problem.
        message: the kubelet's message.
    """
    if reason not in IMAGE_REASONS or image not in message:
        return message
    source = "spec.engine.image" if service.engine.image else "the chart's value images.engine"
    advice = f"{source} names the image: correct it, or name a Secret in spec.podTemplate.imagePullSecrets"
    return f"{message}; {advice} if the registry needs a login"
