#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Precompiles Triton's kernel launcher module, so that the image needs no compiler. cc.sh recognizes the module by
# its source, and fails if another version of Triton needs another module.
set -eu
site=${SITE:-/opt/mizzen}
target=$site/libexec
nvidia=$("$site/bin/python" -c 'import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec("triton").origin).parent / "backends/nvidia")')
include=$("$site/bin/python" -c 'import sysconfig; print(sysconfig.get_paths(scheme="posix_prefix")["include"])')
if ! command -v gcc >/dev/null; then
  headers=$(test -e "$include/Python.h" || echo python3-dev)
  apt-get install -qq -y --no-install-recommends gcc libc6-dev $headers >/dev/null
fi
mkdir -p "$target"
stub=$(mktemp -d)
# The driver library exists only on the nodes. Linking needs only its soname, so link against a stub.
gcc -shared -Wl,-soname,libcuda.so.1 -o "$stub/libcuda.so.1" -x c /dev/null
cp "$nvidia/driver.c" "$target/cuda_utils.c"
gcc "$target/cuda_utils.c" -O3 -shared -fPIC -Wno-psabi -o "$target/cuda_utils.so" \
  -Wl,--no-as-needed -L"$stub" -l:libcuda.so.1 -I"$nvidia/include" -I"$include"
rm -rf "$stub"
cp "$(dirname "$0")/cc.sh" "$target/cc"
chmod 755 "$target/cc"
