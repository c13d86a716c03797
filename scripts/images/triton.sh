#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the compiler with which Triton builds its C modules at run time (see cc.py).
set -eu
site=${SITE:-/opt/mizzen}
include=$("$site/bin/python" -c 'import sysconfig; print(sysconfig.get_paths(scheme="posix_prefix")["include"])')
headers=$(test -e "$include/Python.h" || echo python3-dev)
apt-get install -qq -y --no-install-recommends tcc libc6-dev $headers >/dev/null
"$site/bin/python" scripts/images/install_compiler.py "$site"
