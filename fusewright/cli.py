"""The command line.  Exit codes: 0 verified (nothing gained included), 1 verification failed, 2 a user's mistake."""

from __future__ import annotations

import importlib.metadata
import json
import re
from functools import partial
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.text import Text
from torch import nn
from typer.core import TyperGroup

import fusewright
from fusewright.dispatch import Options
from fusewright.doctor import examine
from fusewright.emit.building import TEXTS
from fusewright.emit.header import of_eager_rounding
from fusewright.emit.writing import check_output, write_solution
from fusewright.errors import UnsupportedError
from fusewright.peers import PEERS, peers
from fusewright.peers import bench as run_peers
from fusewright.plan import Plan
from fusewright.problem import Arguments, Problem, load_candidate, load_problem
from fusewright.report import bench_view, plan_view, verdict_view
from fusewright.report.text import scaled, table
from fusewright.runtime import cache
from fusewright.schedule.wishes import Wishes
from fusewright.terminal import FAILED, VERIFIED, check_target, clean_errors, save, show, stage, steps


class _Group(TyperGroup):
    """Every command's mistakes end in the same place."""

    def invoke(self, ctx: Any) -> Any:
        with clean_errors():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Group,
    help="Makes PyTorch models do less: rewrites their algebra, proves the result, keeps what is faster.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cache_app = typer.Typer(help="Looks into the cache directory, or empties it.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")

ProblemFile = Annotated[
    Path, typer.Argument(metavar="PROBLEM.py", help="A file with class Model, get_inputs() and get_init_inputs().")
]
DeviceOption = Annotated[
    Literal["cpu", "cuda"] | None, typer.Option("--device", help="Where to run; a GPU if there is one.")
]
TrainingOption = Annotated[
    bool | None, typer.Option("--training/--inference", help="Train or eval mode; by default as constructed.")
]
BatchOption = Annotated[
    int | None, typer.Option("--batch", min=1, metavar="N", help="Replace the leading size of every tensor input.")
]
PrecisionOption = Annotated[
    Literal["eager", "fp32", "tf32"], typer.Option(help="eager: as accurate as PyTorch under its own flags.")
]
RewriteOption = Annotated[
    Literal["cost", "always", "never"], typer.Option(help="cost: where the estimate says that it pays.")
]
KernelsOption = Annotated[Literal["auto", "always", "never"], typer.Option(help="auto: where they measure faster.")]
GraphsOption = Annotated[
    Literal["auto", "always", "never"],
    typer.Option(help="auto: replay forwards as CUDA graphs where that measures faster."),
]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON.")]


def main() -> None:
    """Runs the command line."""
    app(prog_name="fusewright")


def _examples(*lines: str) -> str:
    # A blank line between them: help text joins neighbouring lines into a paragraph.
    return "\n\n".join(["Examples:", *(f"  fusewright {line}" for line in lines)])


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fusewright {importlib.metadata.version('fusewright')}")
        raise typer.Exit


@app.callback(epilog=_examples("optimize model.py --batch 8", "verify model.py candidate.py", "doctor"))
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Only carries `--version`; its callback has done the work."""


@app.command(epilog=_examples("optimize model.py --batch 8", "optimize model.py --inference --json plan.json"))
def optimize(
    problem: ProblemFile,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="SOLUTION.py", help="Write the result as one file.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="DEVICES", help="What the file is for: cuda (even without a GPU), cpu or cuda,cpu."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    kernel_name: Annotated[str, typer.Option(metavar="NAME", help="Call the file's kernels so.")] = "",
    single_kernel: Annotated[
        bool, typer.Option("--single-kernel", help="One launch that allocates its output alone, or nothing.")
    ] = False,
    keep: Annotated[str, typer.Option(metavar="OPS", help="Operators to leave alone: conv,sigmoid.")] = "",
    only: Annotated[str, typer.Option(metavar="OPS", help="The only operators to replace.")] = "",
    device: DeviceOption = None,
    training: TrainingOption = None,
    precision: PrecisionOption = "eager",
    rewrite: RewriteOption = "cost",
    kernels: KernelsOption = "auto",
    graphs: GraphsOption = "auto",
    finite: Annotated[bool, typer.Option("--finite", help="Allow rules that may lose a NaN.")] = False,
    batch: BatchOption = None,
    json_file: JsonOption = None,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Trust the estimate, time nothing.")] = False,
) -> None:
    """Optimizes a problem file's model, verifies the result and prints the plan."""
    check_target(json_file)
    if output is not None:
        _refuse(output, {"--batch": batch, "--device": device, "--precision": None if precision == "eager" else 1})
        wishes = _wishes(keep, only, kernel_name, single_kernel)
        options = Options(training, precision, rewrite, kernels, finite, measure=not no_measure, wishes=wishes)
        _write(problem, output, options, _emission_targets(target), force, json_file)
    _need_output({"--target": target, "--force": force, "--kernel-name": kernel_name})
    _need_output({"--single-kernel": single_kernel, "--keep": keep, "--only": only})
    with stage(f"loading {problem.name}"):
        _, model, inputs = _load(problem, device, training, batch)
    doing = "rewriting and verifying" if no_measure else "rewriting, verifying and measuring"
    with stage(doing):
        fast = fusewright.optimize(
            model,
            inputs,
            training=training,
            precision=precision,
            rewrite=rewrite,
            kernels=kernels,
            graphs=graphs,
            finite=finite,
            verify=True,
            measure=not no_measure,
        )
        plan = fusewright.explain(fast)
    _finish_plan(plan, json_file)


@app.command(epilog=_examples("explain model.py", "explain model.py --batch 4"))
def explain(
    problem: ProblemFile,
    device: DeviceOption = None,
    training: TrainingOption = None,
    batch: BatchOption = None,
    json_file: JsonOption = None,
) -> None:
    """Says what optimize would do to a problem file's model, and why."""
    check_target(json_file)
    with stage(f"loading {problem.name}"):
        _, model, inputs = _load(problem, device, training, batch)
    with stage("capturing and rewriting"):
        plan = fusewright.explain(model, inputs)
    _finish_plan(plan, json_file)


@app.command(epilog=_examples("verify model.py candidate.py", "verify model.py candidate.py --json verdict.json"))
def verify(
    reference: Annotated[Path, typer.Argument(metavar="REFERENCE.py", help="A problem file: what is right.")],
    candidate: Annotated[Path, typer.Argument(metavar="CANDIDATE.py", help="A file with class ModelNew.")],
    device: DeviceOption = None,
    training: TrainingOption = None,
    batch: BatchOption = None,
    json_file: JsonOption = None,
) -> None:
    """Checks somebody's candidate against its reference, and names every check."""
    check_target(json_file)
    with stage(f"loading {reference.name} and {candidate.name}"):
        problem, model, inputs = _load(reference, device, training, batch)
        other = load_candidate(candidate, problem).build(device=_device(device))
        _set_mode(other, training)
        _share_weights(model, other)
    with stage("verifying"):
        verdict = fusewright.verify(model, other, inputs)
    show(verdict_view(verdict))
    save(json_file, verdict.to_json())
    raise typer.Exit(VERIFIED if verdict.ok else FAILED)


@app.command(epilog=_examples("bench model.py", "bench a.py b.py --peers compile,openvino --batch 8 --json bench.json"))
def bench(
    problems: Annotated[list[Path], typer.Argument(metavar="PROBLEM.py...", help="Problem files.")],
    peer_names: Annotated[
        str, typer.Option("--peers", metavar="NAMES", help=f"Of {', '.join(PEERS)}; eager always runs.")
    ] = "eager,compile",
    device: DeviceOption = None,
    training: TrainingOption = None,
    batch: BatchOption = None,
    json_file: JsonOption = None,
) -> None:
    """Times eager, its peers and Fusewright in one run, each checked against eager first."""
    check_target(json_file)
    names = [name.strip() for name in peer_names.split(",") if name.strip()]
    peers(names)
    results = []
    # Per problem: loading, each peer's turn (eager's included), Fusewright's, and the timing.
    with steps("measuring", total=len(problems) * (len({*names, "eager"}) + 3)) as progress:
        for path in problems:
            progress.next(path.stem, "loading")
            _, model, inputs = _load(path, device, training, batch)
            measured = run_peers(
                model,
                inputs,
                names,
                include={"fusewright": fusewright.optimize},
                training=model.training,
                progress=partial(progress.next, path.stem),
            )
            results.append(measured)
            show(bench_view(path.stem, measured))
    save(json_file, json.dumps([result.record() for result in results], indent=2))
    failed = any(row.name == "fusewright" and row.forward is None for result in results for row in result.rows)
    raise typer.Exit(FAILED if failed else VERIFIED)


@app.command()
def doctor() -> None:
    """Says what this machine has: PyTorch, GPU, compilers, cache, peers."""
    marks = {True: Text("ok", style="green"), False: Text("problem", style="red"), None: Text("-", style="dim")}
    made = table(("", "", "found"), fixed=("",))
    for fact in examine():
        made.add_row(Text(fact.name), marks[fact.ok], Text(fact.value))
    show(made)


@cache_app.command("ls")
def cache_ls() -> None:
    """Lists what is cached, and where."""
    found = cache.entries()
    made = table(("name", "size"), right=("size",))
    for entry in found:
        made.add_row(Text(entry.name), scaled(entry.size, "B"))
    if found:
        show(made)
    total = scaled(sum(entry.size for entry in found), "B")
    show(Text(f"{_files(len(found))}, {total}, in {cache.cache_path()}"))


@cache_app.command("clear")
def cache_clear() -> None:
    """Deletes everything that is cached."""
    show(Text(f"{_files(cache.clear())} deleted from {cache.cache_path()}"))


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def _load(
    path: Path, device: str | None, training: bool | None, batch: int | None
) -> tuple[Problem, nn.Module, Arguments]:
    """The problem, its model and its inputs, after one forward of a twin has shown that they fit together."""
    where = _device(device)
    problem = load_problem(path)
    if batch is not None:
        problem = problem.with_batch(batch)
    inputs = problem.inputs(device=where)
    # A twin, because a forward may update buffers; its own inputs, because it may write into them.
    problem.try_forward(_set_mode(problem.build(device=where), training), problem.inputs(device=where))
    return problem, _set_mode(problem.build(device=where), training), inputs


def _device(chosen: str | None) -> str:
    if chosen == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("--device cuda: PyTorch finds no GPU here; `fusewright doctor` says what there is")
    if chosen is not None:
        return chosen
    return "cuda" if torch.cuda.is_available() else "cpu"


def _set_mode(model: nn.Module, training: bool | None) -> nn.Module:
    return model if training is None else model.train(training)


def _share_weights(reference: nn.Module, candidate: nn.Module) -> None:
    """Gives the candidate the reference's weights where their names and shapes agree; else the common seed decides."""
    theirs, ours = candidate.state_dict(), reference.state_dict()
    if {k: v.shape for k, v in theirs.items()} == {k: v.shape for k, v in ours.items()}:
        candidate.load_state_dict(ours)


def _refuse(output: Path, given: dict[str, object]) -> None:
    """A solution file is for its problem as it stands, under PyTorch's own settings."""
    name = next((name for name, value in given.items() if value is not None), None)
    if name is not None:
        raise UnsupportedError(f"-o {output}: a solution file takes inputs and settings as they are; leave {name} out")


def _need_output(given: dict[str, object]) -> None:
    """These options are about solution files."""
    name = next((name for name, value in given.items() if value), None)
    if name is not None:
        raise UnsupportedError(f"{name} is about the solution file; name that with -o")


def _wishes(keep: str, only: str, name: str, single: bool) -> Wishes:
    """What was asked of the kernels."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,60}|", name) or iskeyword(name):
        raise UnsupportedError(f"--kernel-name {name}: use small letters, digits and underscores, a letter first")
    return Wishes(tuple(filter(None, keep.split(","))), tuple(filter(None, only.split(","))), name, single)


def _emission_targets(asked: str | None) -> list[str]:
    """The devices that a solution file is made for."""
    if asked is None:
        return ["cuda" if torch.cuda.is_available() else "cpu"]
    targets = list(dict.fromkeys(name.strip() for name in asked.split(",")))
    unknown = next((name for name in targets if name not in TEXTS), None)
    if unknown is not None:
        raise UnsupportedError(f"--target {asked}: a solution file is for {' or '.join(TEXTS)}, or for both: cuda,cpu")
    return targets


def _write(path: Path, output: Path, options: Options, targets: list[str], force: bool, json_file: Path | None) -> None:
    check_output(output, path, force)
    with stage(f"loading {path.name}"):
        problem = load_problem(path)
    with stage(f"writing {output.name}"):
        written = write_solution(problem, output, options, targets=targets, force=force, timed=options.measure)
    for plan in written.plans:
        show(plan_view(plan))
    show(Text(f"\nwrote {written.path}"))
    for rounds in (known.facts["eager rounds"] for known in written.checked if "eager rounds" in known.facts):
        show(Text(of_eager_rounding(rounds)))
    plans = [plan.to_json() for plan in written.plans]
    save(json_file, plans[0] if len(plans) == 1 else f"[{', '.join(plans)}]")
    raise typer.Exit(VERIFIED)


def _finish_plan(plan: Plan, json_file: Path | None) -> None:
    show(plan_view(plan))
    save(json_file, plan.to_json())
    raise typer.Exit(FAILED if plan.verdict is not None and not plan.verdict.ok else VERIFIED)
