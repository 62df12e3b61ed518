"""Take the screenshots of docs/monitoring.md, from a training that this script runs.

It trains with three tiers, damages a file on the nearest disk, resumes, and looks at the page of
``ckpt serve`` with Chromium (``pip install playwright``; ``apt-get install chromium``).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image
from torch import nn

from ckpt import CheckpointManager, Tier

HERE = Path(__file__).resolve().parent
LAST = 150
SHOTS = {
    "page-wide": ("/run/0", 1440, "light"),
    "page-narrow": ("/run/0", 400, "dark"),
    "page-step": ("/run/0/step/NEWEST?tensor=model/0.weight", 1440, "dark"),
}


def train(near: Path, far: Path) -> None:
    """Train, and save each fifth step; resume if there is a step."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "step": 0}
    disk = Tier(str(near), keep_last=12, keep_best=("loss", "min"))
    tiers = [Tier("memory"), disk, Tier(str(far), every=20)]
    with CheckpointManager(tiers) as manager:
        manager.restore(state)
        for step in range(state["step"] + 1, LAST + state["step"] + 1):
            x = torch.randn(32, 512)
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 0:
                state["step"] = step
                manager.save_async(state, step, metrics={"loss": loss.item()})


def damage(root: Path) -> None:
    """Flip a byte in the newest step."""
    newest = max(root.glob("step-*"))
    path = newest / "rank-00000.safetensors"
    with path.open("r+b") as file:
        file.seek(2 << 20)
        byte = file.read(1)[0]
        file.seek(2 << 20)
        file.write(bytes([byte ^ 1]))


@contextmanager
def page_of(*roots: Path) -> Iterator[str]:
    """``ckpt serve`` on a free port. Gives its address."""
    command = [sys.executable, "-um", "ckpt.cli.main", "serve", "--port", "0", *map(str, roots)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603
    assert server.stdout is not None
    try:
        yield server.stdout.readline().split()[-1].rstrip("/")
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()


def shoot(address: str, folder: Path) -> None:
    """Take all pictures."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for name, (path, width, scheme) in SHOTS.items():
            page = browser.new_page(
                viewport={"width": width, "height": 900 if width < 1000 else 1150},
                color_scheme=scheme,
            )
            page.goto(f"{address}/run/0")
            newest = page.locator("#steps th a").first.inner_text()
            page.goto(address + path.replace("NEWEST", newest))
            page.wait_for_selector("#status[data-state=on], h1")
            page.screenshot(path=folder / f"{name}.png")
            page.close()
            shrink(folder / f"{name}.png")
        browser.close()


def shrink(path: Path) -> None:
    """Keep 128 colours, which is all that the page has."""
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def main() -> None:
    """Run the training, and write the pictures into the folder that is given, or beside this."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    with tempfile.TemporaryDirectory(prefix="run-") as scratch:
        near, far = Path(scratch, "nvme"), Path(scratch, "lustre")
        train(near, far)
        damage(near)
        train(near, far)
        command = [sys.executable, "-m", "ckpt.cli.main", "verify", "--root", str(near), "--all"]
        subprocess.run(command, check=True)  # noqa: S603
        with page_of(near, far) as address:
            shoot(address, folder)


if __name__ == "__main__":
    main()
