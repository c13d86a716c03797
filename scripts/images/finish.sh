#!/bin/sh
# Adds the distribution to /opt/mizzen, makes it small, and writes down what is in it.
#   finish.sh NAME MODULE...: of the program, and modules that must be found.
set -eu
name=$1; shift
/opt/build/bin/pip --python /opt/mizzen/bin/python install -q --no-deps /wheel/*.whl
# It speeds up downloads from a hub, and no image downloads anything.
/opt/build/bin/pip --python /opt/mizzen/bin/python uninstall -q -y hf-xet
# Debug information of libraries; those whose loading was patched when their wheel was made break when stripped.
find /opt/mizzen -name '*.so' -type f -not -path '*.libs/*' | while read -r library; do
  if readelf -S "$library" | grep -q '\.debug_info' && ! readelf -d "$library" | grep -qE 'R(UN)?PATH'; then
    strip --strip-debug "$library"
  fi
done
mkdir -p /opt/mizzen/share/sbom
/opt/build/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type application \
  --output-reproducible --output-format JSON --output-file "/opt/mizzen/share/sbom/mizzen-$name.cdx.json" /opt/mizzen/bin/python
/opt/mizzen/bin/python scripts/images/slim.py "$(/opt/mizzen/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
for module in "$@"; do /opt/mizzen/bin/python -c "import $module"; done
