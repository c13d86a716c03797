#!/bin/sh
# Makes /opt/mizzen with what some extras of pyproject.toml require, at the versions of constraints.txt.
#   install.sh EXTRA... [--without NAME...]; TORCH_INDEX names an index of wheels to take torch from.
set -eu
python -m venv --without-pip /opt/mizzen
python scripts/images/requirements.py pyproject.toml "$@" > /tmp/requirements.txt
pip() { /opt/build/bin/pip --python /opt/mizzen/bin/python "$@"; }
if [ -n "${TORCH_INDEX:-}" ]; then
  pip install -q --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
  # The build for CPUs has a version of its own, as in 2.13.0+cpu, which the constraint allows.
fi
pip install -q -c constraints.txt -r /tmp/requirements.txt
