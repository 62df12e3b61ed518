"""Train a small network on scikit-learn's digits with Lightning; kill it, and the next run resumes.

    python examples/train_lightning.py --root runs/lightning

`--devices 2` trains on two processes with DDP.
"""

import argparse
import hashlib
import logging

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt.integrations.lightning import CkptCheckpoint

TEST_IMAGES = 360  # the last fifth of the 1797

Batch = tuple[Tensor, Tensor]


class Digits(LightningModule):
    """A network from 64 pixels to ten logits, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.25), nn.Linear(256, 10)
        )

    def training_step(self, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: Batch) -> None:
        """Log the accuracy."""
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """Print where the training is."""
        if self.trainer.is_global_zero:
            accuracy = float(self.trainer.callback_metrics["accuracy"])
            print(f"step {self.global_step:4d}  accuracy {accuracy:.4f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training set and the test set."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.data).float() / 16
    labels = torch.from_numpy(bunch.target)
    train_set = TensorDataset(images[:-TEST_IMAGES], labels[:-TEST_IMAGES])
    return train_set, TensorDataset(images[-TEST_IMAGES:], labels[-TEST_IMAGES:])


def main() -> None:
    """Train from the newest checkpoint on, and print the accuracy and the weights' hash."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--root", default="runs/lightning", help="folder or URL of the checkpoints")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    seed_everything(1, workers=True, verbose=False)
    train_set, test_set = digits()
    model = Digits()
    callback = CkptCheckpoint(args.root, monitor="accuracy", mode="max", save_last=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices,
        max_epochs=args.epochs,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    loader = DataLoader(train_set, 32, shuffle=True)
    trainer.fit(model, loader, DataLoader(test_set, TEST_IMAGES), ckpt_path="last")
    if trainer.is_global_zero:
        weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        fingerprint = hashlib.sha256(weights).hexdigest()[:16]
        print(f"step {trainer.global_step}  weights {fingerprint}", flush=True)


if __name__ == "__main__":
    main()
