"""What people read: plans, verdicts and measurements as tables, for a terminal or as plain text."""

from fusewright.report.bench import bench_view, render_bench
from fusewright.report.plan import plan_view, render_plan
from fusewright.report.text import render
from fusewright.report.verdict import render_verdict, verdict_view

__all__ = [
    "bench_view",
    "plan_view",
    "render",
    "render_bench",
    "render_plan",
    "render_verdict",
    "verdict_view",
]
