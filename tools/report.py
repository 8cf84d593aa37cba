"""Makes the report of a run at any time, also of one that is training or has crashed.

    python tools/report.py runs/quickstart/ppo
    python tools/report.py runs/new --against runs/old     overlaid curves, changed settings
    python tools/report.py runs/long --steps 1200-1400     every step of a part of a long run

Exit status: 0, or 2 with one line for wrong input. docs/report.md describes the page.
"""

import sys

from megarl.observe.report import main

if __name__ == "__main__":
    sys.exit(main())
