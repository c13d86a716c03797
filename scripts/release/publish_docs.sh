#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Adds the documentation of this commit to the site on the branch gh-pages, and pushes the branch.
#   publish_docs.sh [OPTION OF build_docs.py]...
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
site=$(mktemp -d)
trap 'git -C "$root" worktree remove --force "$site"' EXIT
if git -C "$root" fetch --depth 1 origin gh-pages 2>/dev/null; then
  git -C "$root" worktree add --quiet --detach "$site" FETCH_HEAD
else
  git -C "$root" worktree add --quiet --detach "$site"
  git -C "$site" checkout --quiet --orphan gh-pages
  git -C "$site" rm -rfq .
fi
python "$root/scripts/release/build_docs.py" "$site" "$@"
git -C "$site" add --all
if git -C "$site" diff --cached --quiet; then
  echo "the site is unchanged"
  exit 0
fi
git -C "$site" -c user.name="${GIT_USER:-release}" -c user.email="${GIT_EMAIL:-release@mizzen.dev}" \
  commit --quiet --message "Build $(git -C "$root" rev-parse --short HEAD)"
if ! git -C "$site" push --quiet origin HEAD:refs/heads/gh-pages; then
  [ "${ATTEMPT:-1}" -lt 3 ] || exit 1
  git -C "$root" worktree remove --force "$site"  # another workflow has pushed meanwhile: build upon its commit
  ATTEMPT=$((${ATTEMPT:-1} + 1)) exec sh "$0" "$@"
fi
