#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Creates the release of a tag on the forge, with the notes and all files of the folders that the jobs made.
#   create_release.sh TAG FOLDER
set -eu
tag=$1 folder=$2
for name in notes/notes.md python chart; do
  test -e "$folder/$name" || { echo "$folder/$name is missing" >&2; exit 1; }
done
find "$folder" -type f ! -path "$folder/notes/*" ! -path "$folder/chart/*.digest" -exec \
  gh release create "$tag" --verify-tag --title "Mizzen ${tag#v}" --notes-file "$folder/notes/notes.md" {} +
