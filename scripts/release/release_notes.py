# SPDX-License-Identifier: Apache-2.0
"""Print the release notes of a version: its section of CHANGELOG.md, and how to install and verify it.

    python scripts/release/release_notes.py 0.1.0 --registry registry.example.com/team

It fails if CHANGELOG.md has no section of the version, or if the heading still says "(unreleased)" and
`--draft` is not given.
"""

from __future__ import annotations

import argparse
import re
import sys

from set_version import ROOT

INSTALL = """\
### Install

```console
$ helm install mizzen oci://{registry}/charts/mizzen --version {version} \\
    --namespace mizzen-system --create-namespace --wait
$ pip install mizzen=={version}
```
"""
VERIFY = """\
### Verify

Images, the chart and all files of the release are signed without a key, by the workflow of this repository:

```console
$ cosign verify {registry}/mizzen/gateway:{version} \\
    --certificate-oidc-issuer https://token.actions.githubusercontent.com \\
    --certificate-identity {repository}/.github/workflows/release.yml@refs/tags/v{version}
```
"""


def find_section(changelog: str, version: str, *, draft: bool = False) -> str:
    """Return the text below the heading of a version, without the heading.

    Args:
        changelog: text of CHANGELOG.md.
        version: version, such as 0.1.0.
        draft: accept a heading that says "(unreleased)".

    Raises:
        ValueError: the section is absent, is empty, or is marked as unreleased; the message says what to do.
    """
    heading = re.search(rf"^## {re.escape(version)}(?![\w.])(.*)$", changelog, re.MULTILINE)
    if heading is None:
        raise ValueError(f"CHANGELOG.md has no section of version {version}: add `## {version}`")
    if "unreleased" in heading[1] and not draft:
        raise ValueError(f"CHANGELOG.md says that {version} is unreleased: remove the mark from its heading")
    section = re.split(r"^## ", changelog[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not section:
        raise ValueError(f"the section {version} of CHANGELOG.md is empty")
    return section


def make_links_absolute(text: str, base: str) -> str:
    """Prefix relative links of Markdown with a URL, because release notes have no files beside them."""
    return re.sub(r"\]\((?![a-z]+:|#)([^)]+)\)", rf"]({base}/\1)", text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version")
    parser.add_argument("--draft", action="store_true", help="accept a section that is marked as unreleased")
    parser.add_argument(
        "--registry", default="", help="registry and organisation of the images and the chart"
    )
    parser.add_argument("--repository", default="", help="URL of the repository on the forge")
    options = parser.parse_args()
    try:
        notes = find_section((ROOT / "CHANGELOG.md").read_text(), options.version, draft=options.draft)
    except ValueError as error:
        sys.exit(str(error))
    parts = [notes]
    if options.repository:
        parts[0] = make_links_absolute(notes, f"{options.repository}/blob/v{options.version}")
    if options.registry:
        parts.append(INSTALL.format(registry=options.registry, version=options.version))
    if options.registry and options.repository:
        parts.append(VERIFY.format(**vars(options)))
    print("\n\n".join(part.strip() for part in parts))


if __name__ == "__main__":
    main()
