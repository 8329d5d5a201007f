"""Pictures of the site in Chromium, at the widths of a desk and a phone, light and dark: `make look`.

No test: somebody has to look at build/look.
"""

import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

PAGES = "index", "guides/recode", "guides/when", "reference/neurocoder", "paper", "claims"
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
SCHEMES = {"light": "1", "dark": "0"}


def main(site: Path, out: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no chromium or google-chrome is installed: install one of them to look at the site")
    out.mkdir(parents=True, exist_ok=True)
    for page, width, (scheme, number) in product(PAGES, (1280, 390), SCHEMES.items()):
        file = out / f"{page.replace('/', '-')}.{width}.{scheme}.png"
        with tempfile.TemporaryDirectory() as profile:
            view = [f"--window-size={width},1800", f"--blink-settings=preferredColorScheme={number}"]
            command = [chromium, "--headless", *QUIET, "--hide-scrollbars", f"--user-data-dir={profile}", *view]
            command += [f"--screenshot={file.resolve()}", (site / f"{page}.html").resolve().as_uri()]
            subprocess.run(command, check=True, capture_output=True)
        print(file)


if __name__ == "__main__":
    main(Path("build/docs/html"), Path("build/look"))
