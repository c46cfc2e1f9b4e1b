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
    done = subprocess.run(
        [
            BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            f"--user-data-dir={page.parent.parent / 'profile'}", "--window-size=1280,900",
            "--virtual-time-budget=4000", "--dump-dom", driven.as_uri() + fragment,
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    driven.unlink()
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    found = re.search(r'<pre id="driven">(.*?)</pre>', done.stdout)
    assert found, done.stdout[-2000:]
    out = json.loads(base64.b64decode(found[1]))
    assert "error" not in out, out["error"]
    assert out["loaded"] == []
    return out
