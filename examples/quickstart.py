"""The shortest use of ckpt: one process. Interrupt it and run it again: it goes on where it was.

python examples/quickstart.py [folder or URL]
"""

import argparse
from typing import Any

import torch
from torch import nn

from ckpt import CheckpointManager


def main(root: str) -> None:
    """Fit y = sin(x), saving every 50 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.linspace(-3, 3, 256).unsqueeze(1)

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    with CheckpointManager(root) as manager:
        if report := manager.restore(state):
            print(f"resumed from step {report.step}")
        for step in range(state["step"] + 1, 501):
            loss = (model(x) - x.sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                state["step"] = step
                manager.save_async(state, step=step)  # returns in milliseconds; training goes on
                print(f"step {step}  loss {loss.item():.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", default="runs/quickstart", help="folder or URL")
    main(parser.parse_args().root)
