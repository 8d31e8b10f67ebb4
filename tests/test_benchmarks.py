"""What the README claims is what the data say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_readme_tables_are_the_data() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "table.py"), "--check"], check=False)
    assert done.returncode == 0, "run: python benchmarks/table.py"
