# SPDX-License-Identifier: Apache-2.0
"""Environment variables of the model hub: `HF_ENDPOINT` and `HF_TOKEN`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from mizzen.fetch.config import FetchConfig
from mizzen.fetch.errors import FetchError


def use_hub_endpoint(config: FetchConfig, environment: Mapping[str, str] = os.environ) -> FetchConfig:
    """Return the configuration with the endpoint of `HF_ENDPOINT`, unless the configuration sets an endpoint.

    Raises:
        FetchError: `HF_ENDPOINT` is not a URL.
    """
    endpoint = environment.get("HF_ENDPOINT", "").strip()
    if config.endpoint or not endpoint:
        return config
    try:
        return dataclasses.replace(config, endpoint=endpoint)
    except ValueError as error:
        raise FetchError(f"HF_ENDPOINT is invalid: {error}") from error


def read_hub_token(config: FetchConfig, environment: Mapping[str, str] = os.environ) -> str:
    """Return the token of `HF_TOKEN`, or an empty string.

    The token belongs to the public hub, or to the hub of `HF_ENDPOINT`. It is not sent to any other endpoint;
    a token for such a hub is given as `--credentials`.
    """
    trusted = ("", environment.get("HF_ENDPOINT", "").strip())
    return environment.get("HF_TOKEN", "").strip() if config.endpoint in trusted else ""
