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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import coconet_ops as co

FUSED = "DistributedFusedAdam"
DDP = "DDP + AdamW"
BARE = "bare"  # no communication, no optimizer: what a backward costs by itself
BARE_EVERY = 8
COUNTS = {
    "steps": (400, "training steps"),
    "batch": (8, "sequences per rank and step"),
    "seq": (64, "bytes per sequence"),
    "layers": (2, "transformer blocks"),
    "dim": (256, "width of the model"),
    "heads": (4, "attention heads"),
    "max-bytes": (16_000_000, "read no more text"),
}
NOTES = """\
Milliseconds: medians over the steps, each taken from its slowest rank.
backward         DDP reduces the gradients in here, overlapped with the computation.
step             fused: reduce the gradients, update, gather the parameters. DDP: update only.
                 From the fastest rank: the others' time is waiting for a later backward.
backward + step  the same work on both sides: the row to compare.
beyond backward  backward + step less a bare backward timed in the same run: what the
                 communication and the update cost."""


class ByteLM(nn.Module):
    """Decoder-only transformer over the 256 byte values."""

    def __init__(self, layers: int, dim: int, heads: int, seq: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, dim)
        self.position = nn.Embedding(seq, dim)
        block = nn.TransformerEncoderLayer(
            dim, heads, 4 * dim, 0.0, F.gelu, batch_first=True, norm_first=True, bias=False
        )
        norm = nn.LayerNorm(dim, bias=False)
        self.blocks = nn.TransformerEncoder(block, layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return next-byte logits [batch, seq, 256] of int64 tokens [batch, seq]."""
        length = tokens.shape[1]
        x = self.byte(tokens) + self.position.weight[:length]
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        return self.head(self.blocks(x, causal, is_causal=True))

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


class Run:
    """One model in training, and what was recorded of it."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self.losses: list[float] = []  # mean over the ranks
        self.seconds: list[tuple[float, float, float]] = []  # forward, backward, step
        self.medians: dict[str, float] = {}  # by phase
        torch.manual_seed(args.seed)  # the same weights in every run and on every rank
        self.module = self.model = ByteLM(args.layers, args.dim, args.heads, args.seq)
        if name == BARE:
            return
        matrices = [p for p in self.module.parameters() if p.dim() == 2]
        vectors = [p for p in self.module.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
        options = {"lr": args.lr, "betas": (0.9, 0.95), "weight_decay": 0.0}
        if name == FUSED:
            self.optimizer = co.optim.DistributedFusedAdam(groups, **options)
        else:
            self.optimizer = torch.optim.AdamW(groups, **options, fused=True)
            self.model = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        warmup = args.steps // 10

        def factor(step: int) -> float:  # of the learning rate: linear warm-up, cosine decay
            angle = math.pi * (step - warmup) / (args.steps - warmup)
            return (step + 1) / (warmup + 1) if step < warmup else 0.55 + 0.45 * math.cos(angle)

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Take one training step and return this rank's loss."""
        start = time.perf_counter()
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        if self.name != BARE:
            self.optimizer.step()
        self.model.zero_grad()
        end = time.perf_counter()
        if self.name != BARE:
            self.schedule.step()
        self.seconds.append((forward - start, backward - forward, end - backward))
        return loss.detach()

    def phases(self) -> dict[str, Tensor]:
        """Return each phase's seconds [steps], as NOTES says. Collective."""
        forward, backward, step = torch.tensor(self.seconds, dtype=torch.float64).unbind(1)
        update = backward + step
        names = ("forward", "backward", "step", "backward + step", "whole step")
        table = torch.stack([forward, backward, -step, update, forward + update])
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        table[2].neg_()
        return dict(zip(names, table, strict=True))


def read_text(path: Path | None, limit: int) -> Tensor:
    """Concatenate a file, or a folder's files in the order of their names: uint8 [bytes]."""
    folder, pattern = (path, "*") if path else (Path(torch.__file__).parent, "*.py")
    files = sorted(filter(Path.is_file, folder.rglob(pattern))) or [folder]
    text = bytearray()
    for file in files:
        if len(text) < limit:
            with file.open("rb") as stream:
                text += stream.read(limit - len(text))
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def train(args: argparse.Namespace, rank: int) -> int:
    """Train on this rank, report on rank 0, and return the exit code, equal on all ranks."""
    console = Console(quiet=rank != 0, markup=False, highlight=False, soft_wrap=True)
    windows = read_text(args.data, args.max_bytes).unfold(0, args.seq + 1, 1)
    draw = torch.Generator().manual_seed(args.seed + 1 + rank)  # every rank has its own batches
    names = [FUSED, DDP] if args.compare else [DDP if args.baseline else FUSED]
    runs = [Run(name, args) for name in names]
    bare = Run(BARE, args)
    parameters = sum(p.numel() for p in bare.model.parameters()) / 1e6
    console.print(
        f"ranks: {args.ranks}, threads per rank: {torch.get_num_threads()}, parameters: "
        f"{parameters:.2f} M, text: {len(windows) / 1e6:.1f} MB, bytes per rank and step: "
        f"{args.batch} x {args.seq}"
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
            mean = torch.stack([losses[name] for name in names]) / args.ranks
            dist.all_reduce(mean)
            for run, loss in zip(runs, mean.tolist(), strict=True):
                run.losses.append(loss)
            shown = "loss " + "  ".join(f"{run.losses[-1]:.4f}" for run in runs)
            progress.update(task, advance=1, loss=shown)
            if not console.is_terminal and step % math.ceil(args.steps / 10) == 0:
                console.print(f"step {step + 1}/{args.steps}  {shown}")

    backward = bare.phases()["backward"] if args.compare else None
    for run in runs:
        phases = run.phases()
        if args.compare:
            phases["beyond backward"] = phases["backward + step"][::BARE_EVERY] - backward
        run.medians = {name: float(seconds.median()) for name, seconds in phases.items()}
    curves = torch.tensor([run.losses for run in runs], dtype=torch.float64)
    gap = float((curves[0] - curves[-1]).abs().max())
    agree = gap <= args.tolerance  # False for nan too
    if rank == 0:
        report(args, runs, console)
        if args.compare:
            verdict = "within" if agree else "BEYOND"
            console.print(f"Losses differ by {gap:.1e} at most, {verdict} {args.tolerance:g}.")
    return int(args.compare and not agree)


def report(args: argparse.Namespace, runs: list[Run], console: Console) -> None:
    """Print table and sample, write plot and JSON."""
    table = Table("", *(run.name for run in runs), *["ratio"] * (len(runs) - 1))
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("first loss", *(f"{run.losses[0]:.4f}" for run in runs))
    table.add_row("last loss", *(f"{run.losses[-1]:.4f}" for run in runs))
    tokens = args.ranks * args.batch * args.seq
    table.add_row("tokens/s", *(f"{tokens / run.medians['whole step']:,.0f}" for run in runs))
    for name in runs[0].medians:
        times = [1e3 * run.medians[name] for run in runs]
        comparable = name not in ("forward", "backward", "step") and times[0] > 0
        ratio = f"{times[-1] / times[0]:.2f}x" if comparable else ""
        cells = [f"{value:.2f}" for value in times] + [ratio] * (len(runs) - 1)
        table.add_row(f"{name} (ms)", *cells)
    console.print(table)
    if args.sample:
        sample = runs[0].module.generate(b"\n", args.sample, args.seed)
        text = "".join(chr(b) if 32 <= b < 127 or b == 10 else "." for b in sample)
        console.print(f"\nA sample of {args.sample} bytes:\n{text}\n")
    if args.compare:
        console.print(NOTES)
    if args.plot:
        draw_losses(args.plot, runs, args.tolerance)
        console.print(f"Loss curves: {args.plot}")
    if args.json:
        records = {run.name: {"losses": run.losses, "median_s": run.medians} for run in runs}
        args.json.write_text(json.dumps({"tokens_per_step": tokens, "runs": records}, indent=1))


def draw_losses(path: Path, runs: list[Run], tolerance: float) -> None:
    """Draw the loss curves and, below two of them, their difference, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2 + 2 * len(runs)), layout="constrained")
    axes = figure.subplots(len(runs), sharex=True, squeeze=False, height_ratios=[5, 2][: len(runs)])
    styles = {"color": "black", "linewidth": 1, "zorder": 3}, {"color": "orange", "linewidth": 4}
    for run, style in zip(runs, styles, strict=False):
        axes[0, 0].plot(run.losses, label=run.name, **style)
    axes[0, 0].set_ylabel("loss (nats per byte), mean over ranks")
    axes[0, 0].legend()
    if len(runs) > 1:
        pairs = zip(runs[0].losses, runs[1].losses, strict=True)
        axes[1, 0].semilogy([max(abs(a - b), 1e-8) for a, b in pairs], color="black", linewidth=1)
        axes[1, 0].axhline(max(tolerance, 1e-8), color="tab:red", linestyle="--", label="tolerance")
        axes[1, 0].set_ylabel("difference")
        axes[1, 0].legend()
    axes[-1, 0].set_xlabel("step")
    figure.savefig(path, format="png", dpi=150)


def worker(rank: int, args: argparse.Namespace, init_method: str, codes: Any = None) -> int:
    """Be one rank, and return the exit code; also into the queue codes if launch started it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank at once, without traceback
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // args.ranks
    if codes and share:
        os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])
    if codes or args.threads:
        torch.set_num_threads(args.threads or 1)
    dist.init_process_group("gloo", init_method, rank=rank, world_size=args.ranks)
    code = train(args, rank)
    dist.barrier()  # nobody leaves while rank 0 still reports
    dist.destroy_process_group()
    if codes and rank == 0:
        codes.put(code)
    return code


def launch(args: argparse.Namespace) -> int:
    """Start the ranks, wait for them and return the exit code. No rank outlives this call."""
    codes = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (args, f"file://{folder}/store", codes)
        # Ranks inherit that Ctrl-C is ignored, so they are quiet while they import torch.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        ranks = mp.start_processes(worker, arguments, args.ranks, join=False)
        signal.signal(signal.SIGINT, handler)
        try:
            while not ranks.join():
                pass
            return codes.get()
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for process in ranks.processes:
                process.kill()
                process.join()


def positive(text: str) -> int:
    """Read an integer of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return int(text)


def parse_arguments() -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--baseline", action="store_true", help="train with DDP + AdamW instead")
    mode.add_argument("--compare", action="store_true", help="train with both, side by side")
    add = parser.add_argument
    add("--ranks", type=positive, help="local ranks to start (default 2; torchrun has its own)")
    add("--threads", type=positive, help="threads per rank (default 1; torchrun has its own)")
    add("--data", type=Path, help="file or folder to learn (default: torch's Python sources)")
    for name, (default, text) in COUNTS.items():
        add(f"--{name}", type=positive, default=default, help=f"{text} (default {default})")
    add("--lr", type=float, default=1e-3, help="peak learning rate (default %(default)s)")
    add("--seed", type=int, default=0, help="of weights, batches, sample (default %(default)s)")
    add("--sample", type=int, default=300, help="bytes to generate at the end (default 300)")
    add("--plot", type=Path, help="PNG of the loss curves (with --compare: train_lm.png)")
    add("--json", type=Path, help="write losses and times as JSON")
    add("--tolerance", type=float, default=1e-4, help="of --compare (default %(default)s)")
    args = parser.parse_args()

    if dist.is_torchelastic_launched():
        if args.ranks:
            parser.error("--ranks: torchrun has started the ranks already")
        args.ranks = int(os.environ["WORLD_SIZE"])
    args.ranks = args.ranks or 2
    args.plot = args.plot or (Path("train_lm.png") if args.compare else None)
    if args.dim % args.heads:
        parser.error(f"--dim {args.dim} is not a multiple of --heads {args.heads}")
    for path in filter(None, (args.plot, args.json)):
        if not path.parent.is_dir():
            parser.error(f"{path}: no such folder")
    try:
        if len(read_text(args.data, args.max_bytes)) <= args.seq:
            parser.error(f"the text is shorter than one sequence of {args.seq + 1} bytes")
    except OSError as error:
        parser.error(f"--data: {error}")
    return args


def main() -> int:
    """Be one of torchrun's ranks, or start ranks."""
    try:
        args = parse_arguments()
        if dist.is_torchelastic_launched():
            return worker(int(os.environ["RANK"]), args, "env://")
        return launch(args)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
