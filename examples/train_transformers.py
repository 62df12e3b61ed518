"""Teach a small vision transformer to read scikit-learn's digits, with the Trainer of transformers;
kill it, and the next run goes on.

    python examples/train_transformers.py --output-dir runs/vit
"""

import argparse
import hashlib
from typing import Any

import torch
from sklearn.datasets import load_digits
from transformers import (  # type: ignore[import-not-found, unused-ignore]
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

from ckpt.integrations.transformers import make_ckpt_trainer

TEST_IMAGES = 360  # the last fifth of the 1797


def digits() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the training set and the test set."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16
    rows = [
        {"pixel_values": image, "labels": int(label)}
        for image, label in zip(images, bunch.target, strict=True)
    ]
    return rows[:-TEST_IMAGES], rows[-TEST_IMAGES:]


def accuracy(predicted: Any) -> dict[str, float]:
    """Return the share of the images that were read right."""
    return {"accuracy": float((predicted.predictions.argmax(1) == predicted.label_ids).mean())}


def main() -> None:
    """Train, or go on with the training."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output-dir", default="runs/vit")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--save-steps", type=int, default=15)
    given = parser.parse_args()

    torch.set_num_threads(1)
    set_seed(1)
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, num_labels=10, hidden_size=64,
        num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, hidden_dropout_prob=0.1,
        initializer_range=0.1,
    )  # fmt: skip
    train_set, test_set = digits()
    args = TrainingArguments(
        given.output_dir,
        num_train_epochs=given.epochs,
        per_device_train_batch_size=32,
        learning_rate=5e-3,
        save_steps=given.save_steps,
        save_total_limit=3,
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = make_ckpt_trainer(Trainer)(
        model=ViTForImageClassification(config),
        args=args,
        train_dataset=train_set,
        eval_dataset=test_set,
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint="auto")

    found = trainer.evaluate()["eval_accuracy"]
    weights = b"".join(value.numpy().tobytes() for value in trainer.model.state_dict().values())
    fingerprint = hashlib.sha256(weights).hexdigest()[:16]
    print(f"accuracy {found:.4f}  weights {fingerprint}", flush=True)


if __name__ == "__main__":
    main()
