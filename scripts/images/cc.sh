#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Stand-in for the C compiler that Triton looks for. It copies the only module for which Triton needs a compiler,
# the kernel launcher, which was compiled when the image was built. Triton compiles kernels itself, without it.
set -eu
here=$(dirname "$(readlink -f "$0")")
source=${1:-}
output=
while [ $# -gt 0 ]; do
  [ "$1" != -o ] || output=${2:-}
  shift
done
if [ -z "$output" ] || ! cmp -s "$source" "$here/cuda_utils.c"; then
  echo "this image has no C compiler, and Triton needs one for more than its launcher: set CC to a compiler" >&2
  exit 1
fi
cp "$here/cuda_utils.so" "$output"
