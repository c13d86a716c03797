#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes room for a large image on a hosted runner of the forge: removes toolchains that a release does not use.
#   free_disk.sh GB
# Fails if fewer than GB are free afterwards. On other machines, it removes nothing and only checks.
set -eu
if [ "${RUNNER_ENVIRONMENT:-}" = github-hosted ]; then
  sudo rm -rf /usr/share/dotnet /usr/local/lib/android /opt/ghc /usr/local/.ghcup /usr/share/swift \
    /usr/local/share/boost /usr/local/share/powershell /usr/local/share/chromium /opt/hostedtoolcache/CodeQL \
    /opt/microsoft /opt/az
  docker image prune --all --force >/dev/null
fi
free=$(df --output=avail --block-size=1G . | tail -n 1)
echo "$((free)) GB are free"
if [ "$((free))" -lt "$1" ]; then
  echo "the disk has $((free)) GB free, and the image needs $1: set the variable ENGINE_RUNNER to a larger runner" >&2
  exit 1
fi
