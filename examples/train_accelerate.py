"""Teach a small ConvNet to read scikit-learn's digits with Accelerate; kill it, and the next run
goes on.

    python examples/train_accelerate.py --root runs/accelerate
    torchrun --nproc-per-node=2 examples/train_accelerate.py --root runs/accelerate
"""

import argparse
import hashlib

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader
from train_digits import convnet, digits

from ckpt.integrations.accelerate import AcceleratorCheckpoints


class Progress:
    """The position in the training, registered with the accelerator."""

    def __init__(self) -> None:
        self.epoch = self.batches = 0

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take the position of a checkpoint."""
        self.epoch, self.batches = state["epoch"], state["batches"]


def main() -> None:
    """Continue from the newest checkpoint, train, and print the accuracy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--root", default="runs/accelerate", help="folder or URL of the checkpoints"
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="images per rank")
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)

    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        project_config=ProjectConfiguration(total_limit=3),
    )
    set_seed(1)
    train_set, test_images, test_labels = digits()
    # With a generator of its own the loader leaves the global one alone: an epoch that is resumed
    # half-way then draws the same numbers as one that was not.
    loader = DataLoader(train_set, args.batch, shuffle=True, generator=torch.Generator())
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=args.epochs * len(loader)
    )
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    set_seed(1, device_specific=True)  # dropout differs between the ranks
    criterion = nn.CrossEntropyLoss()

    with AcceleratorCheckpoints(accelerator, args.root) as checkpoints:
        if (report := checkpoints.load_state()) is not None:
            place = f"epoch {progress.epoch}, batch {progress.batches}"
            accelerator.print(f"resumed from step {report.step}: {place}", flush=True)

        for epoch in range(progress.epoch, args.epochs):
            loader.set_epoch(epoch)
            batches = accelerator.skip_first_batches(loader, progress.batches)
            batches.set_epoch(epoch)  # accelerate before 1.14 forgets it
            progress.epoch = epoch
            for images, labels in batches:
                loss = criterion(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                progress.batches += 1
                step = epoch * len(loader) + progress.batches
                if step % 10 == 0:
                    accelerator.print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
                if step % args.save_every == 0 or progress.batches == len(loader):
                    checkpoints.save_state(step)
            progress.batches = 0

    trained = accelerator.unwrap_model(model).eval()
    with torch.no_grad():
        found = trained(test_images.to(accelerator.device)).argmax(1).cpu()
    right = (found == test_labels).sum().item()
    weights = b"".join(value.cpu().numpy().tobytes() for value in trained.state_dict().values())
    fingerprint = hashlib.sha256(weights).hexdigest()[:16]
    accelerator.print(f"accuracy {right / len(test_labels):.4f}  weights {fingerprint}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
