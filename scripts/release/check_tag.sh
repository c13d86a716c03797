#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks that a tag can be released: it is the version of all files, and a registry is configured with a valid path.
#   check_tag.sh TAG REGISTRY
set -eu
version=$(python "$(dirname "$0")/set_version.py")
if [ "$1" != "v$version" ]; then
  echo "the tag is $1, but the files have version $version: run set_version.py, or tag v$version" >&2
  exit 1
fi
case $2 in
  "" | /*)
    echo "set the repository's variable REGISTRY to a registry and organisation, or REGISTRY_HOST to a registry" >&2
    exit 1 ;;
  */*[[:upper:]]*)
    echo "the path of the registry $2 has upper-case letters, which no registry accepts: set the variable REGISTRY" >&2
    exit 1 ;;
esac
