"""Train a byte-level language model on local CPU ranks with DistributedFusedAdam.

The text is the Python source of the installed torch package, so there is nothing to download.

    python examples/train_lm.py --compare               # beside DDP + AdamW: table, loss curves
    python examples/train_lm.py --data ~/notes          # a file or folder of your own
    torchrun --standalone --nproc-per-node 2 examples/train_lm.py --steps 100
"""

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

FUSED = "DistributedFusedAdam"
DDP = "DDP + AdamW"
BARE = "bare"  # no communication, no optimizer: what a backward costs by itself
BARE_EVERY = 8
NOTES = """\
Milliseconds: medians over the steps; a step takes as long as its slowest rank.
backward         DDP reduces the gradients in here, overlapped with the computation.
step             fused: reduce the gradients, update, gather the parameters. DDP: update only,
                 by torch.optim.AdamW(fused=True).
backward + step  the same work on both sides: the row to compare.
beyond backward  backward + step less a bare backward timed in the same run: what the
                 communication and the update cost."""


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a GELU MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # [batch, seq, 3 * dim] -> q, k, v of [batch, heads, seq, dim / heads]
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteLM(nn.Module):
    """Decoder-only transformer over the 256 byte values."""

    def __init__(self, layers: int, dim: int, heads: int, seq: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, dim)
        self.position = nn.Embedding(seq, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return next-byte logits [batch, seq, 256] of int64 tokens [batch, seq]."""
        x = self.byte(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, seed: int) -> bytes:
        """Return count bytes sampled after prompt."""
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt)
        for _ in range(count):
            context = torch.tensor([text[-self.position.num_embeddings :]])
            weights = (self(context)[0, -1] / 0.7).softmax(-1)
            text.append(int(torch.multinomial(weights, 1, generator=generator)))
        return bytes(text[len(prompt) :])


@dataclass
class Run:
    """One model in training, and what was recorded of it."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    losses: list[float] = field(default_factory=list)  # mean over the ranks
    seconds: list[tuple[float, float, float]] = field(default_factory=list)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Take one training step and return this rank's loss."""
        start = time.perf_counter()
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        if self.optimizer:
            self.optimizer.step()
        self.model.zero_grad()
        end = time.perf_counter()
        if self.schedule:
            self.schedule.step()
        self.seconds.append((forward - start, backward - forward, end - backward))
        return loss.detach()

    def phases(self) -> dict[str, Tensor]:
        """Return each phase's seconds [steps] on the slowest rank. Collective."""
        forward, backward, step = torch.tensor(self.seconds, dtype=torch.float64).unbind(1)
        update = backward + step
        names = ("forward", "backward", "step", "backward + step", "whole step")
        table = torch.stack([forward, backward, step, update, forward + update])
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        return dict(zip(names, table, strict=True))


def start_run(name: str, args: argparse.Namespace) -> Run:
    """Build the model, the same for every run and rank, and its optimizer."""
    torch.manual_seed(args.seed)
    model: nn.Module = ByteLM(args.layers, args.dim, args.heads, args.seq)
    if name == BARE:
        return Run(name, model)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer
    if name == FUSED:
        import coconet_ops as co

        optimizer = co.optim.DistributedFusedAdam(groups, lr=args.lr, betas=(0.9, 0.95))
    else:
        optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def warmup_cosine(step: int) -> float:
        warmup = args.steps // 10
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (args.steps - warmup))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine)
    return Run(name, model, optimizer, schedule)


def read_text(path: Path | None, limit: int) -> Tensor:
    """Concatenate a file, or a folder's files in the order of their names: uint8 [bytes]."""
    folder, pattern = (path, "*") if path else (Path(torch.__file__).parent, "*.py")
    files = sorted(folder.rglob(pattern)) if folder.is_dir() else [folder]
    text = bytearray()
    for file in files:
        if len(text) < limit and file.is_file():
            with file.open("rb") as stream:
                text += stream.read(limit - len(text))
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def train(args: argparse.Namespace, rank: int, console: Console) -> int:
    """Train on this rank, report on rank 0, and return the exit code, equal on all ranks."""
    world = dist.get_world_size()
    windows = read_text(args.data, args.max_bytes).unfold(0, args.seq + 1, 1)
    draw = torch.Generator().manual_seed(args.seed + 1 + rank)  # every rank has its own batches
    names = [FUSED, DDP] if args.compare else [DDP if args.baseline else FUSED]
    runs = [start_run(name, args) for name in names]
    bare = start_run(BARE, args)
    parameters = sum(p.numel() for p in bare.model.parameters())
    say(
        console,
        f"{world} ranks x {torch.get_num_threads()} threads, {parameters / 1e6:.2f} M parameters, "
        f"{len(windows) / 1e6:.1f} MB of text, {args.batch} x {args.seq} bytes per rank and step",
    )
    loss_column = TextColumn("{task.fields[loss]}")
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), loss_column
    with Progress(*columns, console=console, disable=rank != 0, transient=True) as progress:
        if console.is_terminal:
            console.show_cursor(True)  # a rank ended by Ctrl-C could not bring it back
        task = progress.add_task("", total=args.steps, loss="")
        for step in range(args.steps):
            batch = windows[torch.randint(len(windows), (args.batch,), generator=draw)].long()
            tokens, targets = batch[:, :-1], batch[:, 1:]
            # Runs take each step in turns, so that the machine's noise meets both alike.
            losses = {run.name: run.step(tokens, targets) for run in runs[:: (1, -1)[step % 2]]}
            if args.compare and step % BARE_EVERY == 0:
                bare.step(tokens, targets)
            mean = torch.stack([losses[name] for name in names]) / world
            dist.all_reduce(mean)
            for run, loss in zip(runs, mean.tolist(), strict=True):
                run.losses.append(loss)
            shown = "loss " + "  ".join(f"{loss:.4f}" for loss in mean.tolist())
            progress.update(task, advance=1, loss=shown)
            if not console.is_terminal and step % math.ceil(args.steps / 10) == 0:
                say(console, f"step {step + 1}/{args.steps}  {shown}")
    return report(args, rank, runs, bare, console)


def report(
    args: argparse.Namespace, rank: int, runs: list[Run], bare: Run, console: Console
) -> int:
    """Print table and sample, write plot and JSON; return 1 if the loss curves differ, else 0."""
    phases = [run.phases() for run in runs]
    if args.compare:
        backward = bare.phases()["backward"]
        for phase in phases:
            phase["beyond backward"] = phase["backward + step"][::BARE_EVERY] - backward
    difference = max(abs(a - b) for a, b in zip(runs[0].losses, runs[-1].losses, strict=True))
    agree = difference <= args.tolerance
    if rank == 0:
        medians = [{name: float(times.median()) for name, times in p.items()} for p in phases]
        tokens = dist.get_world_size() * args.batch * args.seq
        rates = [tokens / times["whole step"] for times in medians]
        console.print(result_table(runs, rates, medians))
        if args.compare:
            say(console, NOTES)
            word = "within" if agree else "BEYOND"
            say(console, f"largest difference of the losses {difference:.1e}, {word} {args.tolerance:.0e}")
        if args.sample:
            model = getattr(runs[0].model, "module", runs[0].model)
            text = model.generate(b"\n", args.sample, args.seed).decode("ascii", "replace")
            say(console, "sample:\n" + "".join(c if c.isprintable() or c == "\n" else "?" for c in text))
        if args.plot:
            draw_losses(args.plot, runs, args.tolerance)
            say(console, f"loss curves: {args.plot}")
        if args.json:
            runs_json = {
                run.name: {"losses": run.losses, "tokens_per_s": rate, "median_s": times}
                for run, rate, times in zip(runs, rates, medians, strict=True)
            }
            result = {"ranks": dist.get_world_size(), "runs": runs_json, "difference": difference}
            args.json.write_text(json.dumps(result, indent=1))
    return 0 if agree else 1


def result_table(runs: list[Run], rates: list[float], medians: list[dict[str, float]]) -> Table:
    """Lay out the runs side by side, with a ratio where both sides do the same work."""
    table = Table("", *(run.name for run in runs), *(["ratio"] if len(runs) > 1 else []))
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("first loss", *(f"{run.losses[0]:.4f}" for run in runs))
    table.add_row("last loss", *(f"{run.losses[-1]:.4f}" for run in runs))
    rate_cells = [f"{rate:,.0f}" for rate in rates]
    table.add_row("tokens/s", *rate_cells, *ratio(rates[0], rates[1:]))
    for name in medians[0]:
        times = [median[name] for median in medians]
        equal_work = name in ("backward + step", "whole step", "beyond backward")
        cells = [f"{seconds * 1e3:.2f}" for seconds in times]
        table.add_row(f"{name}, ms", *cells, *(ratio(times[-1], times[:-1]) if equal_work else []))
    return table


def draw_losses(path: Path, runs: list[Run], tolerance: float) -> None:
    """Draw the loss curves and, of two runs, their difference."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        len(runs), figsize=(8, 3 + 2 * len(runs)), sharex=True, squeeze=False, height_ratios=...
    )
