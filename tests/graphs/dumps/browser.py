"""A page in headless Chromium: a script drives it and says what it saw."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from typing import Any

BROWSER = shutil.which("chromium")

_DRIVER = """{
const key = (key, target = document.body) =>
  target.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
const all = (selector) => [...document.querySelectorAll(selector)];
const texts = (selector) => all(selector).map(one => one.textContent);
const wait = () => new Promise(resolve => setTimeout(resolve, 30));
const open_ = async hash => { location.hash = hash; await wait(); };
const search_ = async text => {
  const input = document.getElementById("search");
  input.value = text;
  input.dispatchEvent(new Event("input"));
  await wait();
  return input;
};
addEventListener("load", async () => {
  const out = {};
  try { %s } catch (error) { out.error = String(error.stack); }
  out.loaded = performance.getEntriesByType("resource").map(one => one.name);
  const pre = document.createElement("pre");
  pre.id = "driven";
  pre.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(out))));
  document.body.append(pre);
});
}"""


def drive(page, script: str, fragment: str = "") -> dict[str, Any]:
    """What `script` put into `out`, from file://. No error, and nothing was loaded.

    The page allows its own script alone, by its hash; the driver's is added to that.
    """
    code = _DRIVER % script
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    text = page.read_text().replace("script-src '", f"script-src 'sha256-{digest}' '", 1)
    driven = page.with_name("driven.html")
    driven.write_text(f"{text}<script>{code}</script>")
    done = _shown(driven.as_uri() + fragment, page.parent.parent, "--virtual-time-budget=4000")
    driven.unlink()
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    found = re.search(r'<pre id="driven">(.*?)</pre>', done.stdout)
    assert found, done.stdout[-2000:]
    out = json.loads(base64.b64decode(found[1]))
    assert "error" not in out, out["error"]
    assert out["loaded"] == []
    return out


def rendered_ms(page) -> int:
    """Real time from the start of the navigation until the page is drawn and usable."""
    done = _shown(page.as_uri(), page.parent.parent)
    found = re.search(r'data-rendered="(\d+)"', done.stdout)
    assert found, done.stdout[:500]
    return int(found[1])


def _shown(address: str, folder, *options: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None, "tests without a browser are skipped"
    return subprocess.run(
        [
            BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}", "--window-size=1280,900", *options,
            "--dump-dom", address,
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
