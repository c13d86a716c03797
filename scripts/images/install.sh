#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Creates /opt/mizzen and installs the requirements of extras of pyproject.toml, at the versions in constraints.txt.
#   install.sh EXTRA... [--without NAME...]
# If the variable OVERRIDES names a file, its versions replace those in constraints.txt. If the variable TORCH_INDEX is
# set, torch is installed from that package index.
set -eu
python -m venv --without-pip /opt/mizzen
python scripts/images/requirements.py pyproject.toml "$@" > /tmp/requirements.txt
python scripts/images/merge_constraints.py constraints.txt "${OVERRIDES:-/dev/null}" > /tmp/constraints.txt
pip() { /opt/build/bin/pip --python /opt/mizzen/bin/python "$@"; }
if [ -n "${TORCH_INDEX:-}" ]; then
  pip install -q --index-url "$TORCH_INDEX" "$(grep '^torch==' /tmp/constraints.txt)"
  # The CPU build has a local version such as 2.13.0+cpu, which satisfies the constraint.
fi
pip install -q -c /tmp/constraints.txt -r /tmp/requirements.txt
