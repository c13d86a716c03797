#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the Mizzen wheel into /opt/mizzen, reduces its size, collects license texts, and writes the bill of materials.
#   finish.sh NAME MODULE...
# NAME is the program's name; every MODULE must be importable afterwards.
set -eu
name=$1; shift
/opt/build/bin/pip --python /opt/mizzen/bin/python install -q --no-deps /wheel/*.whl
# hf-xet only speeds up downloads from a hub; no image uses it.
/opt/build/bin/pip --python /opt/mizzen/bin/python uninstall -q -y hf-xet
# Strip debug information. Skip libraries with an RPATH: auditwheel has patched them, and stripping would break them.
find /opt/mizzen -name '*.so' -type f -not -path '*.libs/*' | while read -r library; do
  if readelf -S "$library" | grep -q '\.debug_info' && ! readelf -d "$library" | grep -qE 'R(UN)?PATH'; then
    strip --strip-debug "$library"
  fi
done
mkdir -p /opt/mizzen/share/sbom
/opt/build/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type application \
  --output-reproducible --output-format JSON --output-file "/opt/mizzen/share/sbom/mizzen-$name.cdx.json" /opt/mizzen/bin/python
packages=/opt/mizzen/share/debian-packages.json
test ! -e $packages || python scripts/images/add_packages.py "/opt/mizzen/share/sbom/mizzen-$name.cdx.json" $packages
site=$(/opt/mizzen/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
/opt/mizzen/bin/python scripts/images/licenses.py "$site" /opt/mizzen/share/licenses
/opt/mizzen/bin/python scripts/images/slim.py "$site"
for module in "$@"; do /opt/mizzen/bin/python -c "import $module"; done
