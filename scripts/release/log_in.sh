#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Logs in to the registry with $REGISTRY_USER and $REGISTRY_TOKEN, for docker, skopeo, cosign and helm.
#   log_in.sh REGISTRY
set -eu
host=${1%%/*}
printf %s "$REGISTRY_TOKEN" | docker login "$host" --username "$REGISTRY_USER" --password-stdin
printf %s "$REGISTRY_TOKEN" | skopeo login "$host" --username "$REGISTRY_USER" --password-stdin
printf %s "$REGISTRY_TOKEN" | helm registry login "$host" --username "$REGISTRY_USER" --password-stdin
