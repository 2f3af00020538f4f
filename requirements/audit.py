"""Looks up the known vulnerabilities of every version that lock files pin: `python requirements/audit.py FILE…`.

It runs pip-audit, which exits 0 with "No known vulnerabilities found" also where the advisory service knows none of the
packages, as behind a mirror that serves files only. Such a package counts as not audited here. Exit status: 0 if
nothing is open, 1 if a vulnerability is open, 3 if a package could not be audited. It needs only what tools.txt pins.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

# Installs nothing: the files pin every dependency. The timeout, in seconds, is for one connection.
COMMAND = ["-m", "pip_audit", "--disable-pip", "--no-deps", "--format=json", "--progress-spinner=off", "--timeout=15"]
NOTHING_OPEN, VULNERABLE, NOT_AUDITED = 0, 1, 3


def report(audited: list[dict[str, Any]]) -> tuple[list[str], int]:
    """Lines to print and the exit status, from the `dependencies` of pip-audit's JSON."""
    audited = [
        package for number, package in enumerate(audited) if package not in audited[:number]
    ]  # some files overlap
    unknown = [package for package in audited if "skip_reason" in package]
    lines = [
        f"{package['name']} {package['version']}: {found['id']} ({', '.join(found.get('aliases', [])) or 'no alias'}), "
        f"fixed in {', '.join(found['fix_versions']) or 'no version'}"
        for package in audited
        for found in package.get("vulns", [])
    ]
    num_vulnerabilities = len(lines)
    lines += [f"not audited: {package['skip_reason']}" for package in unknown[:3]]
    lines.append(
        f"{num_vulnerabilities} known vulnerabilities in {len(audited) - len(unknown)} packages; "
        f"{len(unknown)} packages could not be audited"
    )
    if num_vulnerabilities:
        return lines, VULNERABLE
    return lines, NOT_AUDITED if unknown or not audited else NOTHING_OPEN


def main(paths: list[str]) -> int:
    audited = []
    for path in paths:  # one at a time, because pip-audit wants hashes in every file or in none
        command = [sys.executable, *COMMAND, "--requirement", path]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            audited += json.loads(run.stdout)["dependencies"]
        except (ValueError, KeyError):
            print(run.stderr.rstrip()[-2000:], file=sys.stderr)
            print(
                f"{path} was not audited: pip-audit failed, or its advisory service cannot be reached", file=sys.stderr
            )
            return NOT_AUDITED
    lines, status = report(audited)
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
