#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Removes from a base image everything that the programs do not need: package managers, Perl, pip, documentation and
# set-user-ID bits. dpkg's package list stays accurate, so that scanners see the remaining packages.
set -eu
here=$(readlink -f "$0")

installed() { dpkg-query -W -f '${db:Status-Abbrev} ${Package}\n' | awk '$1 ~ /^i/ {print $2}'; }

wanted="apt apt-utils debian-archive-keyring gpgv sqv perl-base debconf debconf-i18n python3-pip-whl
  python3-setuptools-whl python3-venv python3.11-venv python3-distutils python3-lib2to3"
gone=$(for package in $wanted; do installed | grep -x "$package" || true; done)
# Use --remove instead of --purge: the image builder may have mounted configuration below /etc/apt.
DEBIAN_FRONTEND=noninteractive dpkg --remove --force-all $gone >/tmp/dpkg.log 2>&1 || { cat /tmp/dpkg.log >&2; exit 1; }
find /usr/share/doc -type f ! -name copyright -delete  # licenses require that their texts stay
rm -rf /usr/share/man /usr/share/info /usr/share/locale /usr/share/lintian /usr/share/python-wheels \
  /var/cache/* /var/log/* /var/lib/apt /usr/lib/apt
rm -rf /usr/lib/*/gconv  # used only by iconv; Python has its own codecs
python=$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
for part in ensurepip idlelib lib2to3 test tkinter turtledemo turtle.py pydoc_data; do rm -rf "${python:?}/$part"; done
rm -rf "$python"/site-packages/pip* "$python"/site-packages/setuptools* "$python"/site-packages/wheel* \
  "$python"/config-*/*.a /usr/local/bin/pip* /usr/local/bin/wheel /usr/local/bin/idle* /usr/local/bin/2to3*
find / -xdev -type f -perm /6000 -exec chmod a-s {} +
rm -f /tmp/dpkg.log "$here"
