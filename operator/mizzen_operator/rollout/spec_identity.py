# SPDX-License-Identifier: Apache-2.0
"""Identity of a spec: its hash, and the id of its golden prompts.

An abandoned spec remains abandoned until its hash changes. A change of `spec.replicas` does not change the
hash.
"""

from __future__ import annotations

from mizzen_operator.api import reasons
from mizzen_operator.api.types import InferenceService
from mizzen_operator.kube.objects import digest
from mizzen_operator.rollout.state import load_state


def spec_hash(service: InferenceService) -> str:
    """Return the hash of a spec; it does not cover `replicas`, because autoscalers change that field too."""
    return digest({key: value for key, value in service.spec.items() if key != "replicas"})


def verification_id(service: InferenceService) -> str:
    """Return the id of a spec's verification; empty if the spec has no golden prompts.

    The id changes if any field of the spec except `replicas` changes. Then a failed group is verified again.
    """
    return spec_hash(service)[:8] if service.rollout.verification is not None else ""


def has_failed_verification(service: InferenceService, revision: str) -> bool:
    """Return whether the status says that `revision` of the current spec failed its golden prompts."""
    abandoned = load_state(service.status).abandoned
    return abandoned is not None and (abandoned.reason, abandoned.revision, abandoned.spec_hash) == (
        reasons.VERIFICATION_FAILED,
        revision,
        spec_hash(service),
    )
