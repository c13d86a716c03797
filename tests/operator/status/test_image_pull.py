# SPDX-License-Identifier: Apache-2.0
"""An image that cannot be pulled: the message names the field that sets it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mizzen_operator.status.conditions import build_conditions
from service_kit import GOOD, SERVING, SPEC, service

IMAGE = "registry.example/engine:v9"
MESSAGE = f'Back-off pulling image "{IMAGE}"'
OWN = service(engine={**SPEC["engine"], "image": IMAGE})


def failed_message(demo: Any, reason: str, message: str) -> str:
    waiting = replace(SERVING, routable=False, containers_ready=False, reason=reason, message=message)
    inputs = replace(GOOD, service=demo, groups=[waiting], engine_image=IMAGE)
    failed = next(found for found in build_conditions(inputs) if found.type == "Failed")
    assert (failed.status, failed.reason) == (True, reason)
    return failed.message


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff"])
def test_the_message_names_the_field_of_the_image(reason: str) -> None:
    message = failed_message(OWN, reason, MESSAGE)
    assert f"{MESSAGE}; spec.engine.image names the image: correct it, or name a Secret in " in message
    assert "spec.podTemplate.imagePullSecrets" in message
    assert "the chart's value images.engine names the image" in failed_message(service(), reason, MESSAGE)


def test_other_images_and_other_problems_are_not_explained() -> None:
    assert "spec.engine.image" not in failed_message(OWN, "ErrImagePull", 'Failed to pull image "proxy:v1"')
    assert "spec.engine.image" not in failed_message(OWN, "CrashLoopBackOff", MESSAGE)
