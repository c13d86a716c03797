# SPDX-License-Identifier: Apache-2.0
"""Makes the provenance of an image: an in-toto statement with a predicate of SLSA provenance 1.0.

BuildKit makes this statement itself and stores it beside the image; buildah does not.
"""

from __future__ import annotations

from typing import Any

BUILD_TYPE = "https://mizzen.dev/release/build-images/v1"


def make_statement(
    image: tuple[str, str], *, parameters: dict[str, str], source: tuple[str, str], times: tuple[str, str]
) -> dict[str, Any]:
    """Return the provenance of an image.

    Args:
        image: reference without tag, and digest, of the image.
        parameters: what the builder was asked for: builder, target, base image and build arguments.
        source: URL of the repository, and commit.
        times: start and end of the build, RFC 3339.
    """
    name, digest = image
    algorithm, _, value = digest.partition(":")
    repository, commit = source
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {algorithm: value}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": parameters,
                "resolvedDependencies": [{"uri": f"git+{repository}", "digest": {"gitCommit": commit}}],
            },
            "runDetails": {
                "builder": {"id": f"{repository}#{parameters['builder']}"},
                "metadata": {"startedOn": times[0], "finishedOn": times[1]},
            },
        },
    }
