"""Train a small GPT on CPython's own documentation; kill it whenever you like; the next run goes on
bit for bit.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --parallel fsdp2 --root runs/gpt

The lines that concern checkpoints are marked `# ckpt`. Everything else is an ordinary training
script.
"""

import argparse
import json
import os
import sys
from collections import deque
from contextlib import redirect_stdout
from functools import partial
from pydoc_data.topics import topics
from typing import Any, TextIO, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckpt import CheckpointManager, PendingSave, PerRank, RngState
from ckpt.errors import TierBehind
from ckpt.events import Event, Restored, SaveCommitted, SaveStaged

VOCABULARY = 256  # a token is a byte
SEED = 1234


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a LayerNorm and added to the stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, context, width) to the same shape."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.projection(attended.transpose(1, 2).flatten(2)))
        return cast(Tensor, x + self.dropout(self.mlp(self.mlp_norm(x))))


class GPT(nn.Module):
    """A decoder-only transformer whose output head is tied to its token embedding."""

    def __init__(self, layers: int, width: int, context: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, max(1, width // 64), dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return the loss of predicting every byte of (batch, context + 1) from those before it."""
        inputs, targets = text[:, :-1], text[:, 1:]
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=text.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Excerpts:
    """An endless stream of random excerpts. Its position is all there is to save.

    Every rank draws the offsets of the whole global batch and takes its part. So the position is
    equal on all ranks (no PerRank needed), and a batch depends on nothing but the seed and the
    position.
    """

    def __init__(self, batch: int, context: int, rank: int, world: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.batch, self.context, self.rank, self.world = batch, context, rank, world
        self.position = 0

    def __next__(self) -> Tensor:
        """Return this rank's next (batch, context + 1) bytes."""
        generator = torch.Generator().manual_seed(SEED + self.position)
        self.position += 1
        last, shape = len(self.text) - self.context, (self.world * self.batch, 1)
        offsets = torch.randint(last, shape, generator=generator)
        mine = offsets[self.rank :: self.world] + torch.arange(self.context + 1)
        return self.text[mine].long()

    def state_dict(self) -> dict[str, int]:
        """Return what a resumed run needs to go on with the next batch."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken."""
        self.position = state["position"]


def report_commits(saves: deque[PendingSave], log: TextIO) -> None:
    """Tell of every save that became durable since the last call; an error in the background is
    raised here.
    """
    while saves and saves[0].done():
        save = saves.popleft()
        try:
            save.result()
        except TierBehind as behind:  # nearer tiers have it
            print(f"step {save.step:5d}  {behind}", flush=True)
            continue
        print(
            f"step {save.step:5d}  committed, durable after {save.durable_seconds:.2f} s",
            flush=True,
        )
        record = {"step": save.step, "stall": save.stall_seconds, "durable": save.durable_seconds}
        print(json.dumps(record), file=log)


def report_tier(log: TextIO, event: Event) -> None:
    """Note how a save travels from tier to tier, and where a restore has found it; called from
    background threads.
    """
    record: dict[str, Any] = {}
    if isinstance(event, SaveStaged):
        record["staged"] = {"step": event.step, "stall": event.stall_seconds}
    elif isinstance(event, SaveCommitted):
        record["committed"] = {
            "step": event.step,
            "tier": event.tier,
            "seconds": event.durable_seconds,
        }
    elif isinstance(event, Restored):
        record["restored"] = {"step": event.step, "tier": event.tier, "seconds": event.seconds}
    if record:
        log.write(json.dumps(record) + "\n")


def train(
    args: argparse.Namespace, device: torch.device, rank: int, world: int, log: TextIO
) -> None:
    """Run from the newest checkpoint under `args.root`, or from the start, to `args.steps`."""
    # equal weights on all ranks: FSDP2 shards what each has, it does not broadcast
    torch.manual_seed(SEED)
    model: nn.Module = GPT(args.layers, args.width, args.context).to(device)
    if args.parallel == "ddp":
        model = DistributedDataParallel(model)
    elif args.parallel == "fsdp2":
        for block in model.get_submodule("blocks").children():
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    excerpts = Excerpts(args.batch, args.context, rank, world)
    # other dropout on every rank, so the generator's state is PerRank
    torch.manual_seed(SEED + 1 + rank)

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}  # ckpt
    # ckpt
    state |= {"data": excerpts, "rng": PerRank(RngState(), on_resize="same_rank"), "step": 0}
    saves: deque[PendingSave] = deque()
    observers = [partial(report_tier, log)]
    with CheckpointManager(
        args.root, observers=observers
    ) as manager:  # ckpt: on leaving, all is durable, or it raises
        stop = manager.on_signals()  # ckpt: SIGTERM and SIGUSR1, as torchrun and Slurm send them
        report = manager.restore(state)  # ckpt: None if there is nothing to go on from
        if report is not None:
            print(f"resumed from {report}", flush=True)

        for step in range(state["step"] + 1, args.steps + 1):
            loss = model(next(excerpts).to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

            mean = loss.detach() / world
            if world > 1:
                dist.all_reduce(mean)
            print(json.dumps({"step": step, "loss": mean.item().hex()}), file=log)
            if step % args.print_every == 0:
                print(f"step {step:5d}  loss {mean.item():.4f}", flush=True)

            last = step == args.steps or stop.requested(step)  # ckpt: on all ranks the same
            if last or step % args.save_every == 0:
                state["step"] = step  # ckpt
                # ckpt: training goes on, the bytes follow
                save = manager.save_async(state, step=step)
                saves.append(save)
                print(
                    f"step {step:5d}  saving, stall {save.stall_seconds * 1e3:.1f} ms", flush=True
                )
            report_commits(saves, log)
            if last:
                break
    report_commits(saves, log)


def main() -> None:
    """Read the command line, make the run deterministic, join the other ranks, train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parallel", choices=["none", "ddp", "fsdp2"], default="none")
    places = "folders or URLs of the checkpoints, nearest first; `memory` is this machine's memory"
    parser.add_argument("--root", nargs="+", default=["runs/gpt"], help=places)
    parser.add_argument(
        "--losses", default=os.devnull, help="file for exact losses and commits (JSON lines)"
    )
    for name, default in {"steps": 200, "save-every": 20, "print-every": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in {"layers": 4, "width": 256, "context": 128, "batch": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()

    # without it cuBLAS is not deterministic
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the order of a parallel sum depends on the number of threads
    device, rank, world = torch.device("cpu"), 0, 1
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if args.parallel != "none":
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    losses = args.losses if rank == 0 else os.devnull
    with redirect_stdout(sys.stdout if rank == 0 else None), open(losses, "a", buffering=1) as log:
        train(args, device, rank, world, log)  # rank 0 speaks for all
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
