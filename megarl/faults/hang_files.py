"""What a rank leaves when its run hangs: the stacks of all its threads and its last collectives, in `DIR/hang/`.

`rank_R.txt` is for readers: what the rank did, Python stacks, the last collectives. `rank_R.json` has all collectives
that torch's flight recorder holds (TORCH_FR_BUFFER_SIZE, by default 2000), each with its Python frames;
`flight_recorder/fr_trace_R` is the same in the format that torch's program `torchfrtrace` reads.
"""

import contextlib
import faulthandler
import json
import pickle
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.deferred import torch
from megarl.observe.files import write_atomically
from megarl.observe.terminal import ranges_text, table

FOLDER, RECORDER = "hang", "flight_recorder"
LAST = 12  # collectives in the text
RECORDER_SECONDS = 20.0  # longest time for the flight recorder, which may wait for locks of a hung thread


def write(folder: Path, rank: int, where: str):
    """Writes this rank's files into the run's folder, as far as it can: the run ends whatever happens here.

    `where`: what this rank does, in one line.
    """
    folder = folder / FOLDER
    with contextlib.suppress(OSError):
        (folder / RECORDER).mkdir(parents=True, exist_ok=True)
        path = folder / f"rank_{rank}.txt"
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"rank {rank}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {where}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        recorder = threading.Thread(target=_write_collectives, args=(folder, rank, path), daemon=True)
        recorder.start()
        recorder.join(RECORDER_SECONDS)


def _write_collectives(folder: Path, rank: int, path: Path):
    """Adds the last collectives to a rank's text, and writes all that are recorded."""
    recorded = _flight_recorder()
    if recorded is None:
        return
    dist = torch.distributed
    ranks = {name: dist.get_process_group_ranks(group) for group, name in dist.distributed_c10d._world.pg_names.items()}
    recorded["pg_config"] = {  # gloo names its groups otherwise than its collectives, so that torchfrtrace fails
        name: {"name": name, "desc": "", "ranks": str(members)} for name, members in ranks.items()
    }
    with contextlib.suppress(OSError):
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n".join(["", *_lines(recorded.get("entries", []), ranks), ""]))
        write_atomically(folder / f"rank_{rank}.json", json.dumps(recorded, indent=1) + "\n")
        write_atomically(folder / RECORDER / f"fr_trace_{rank}", pickle.dumps(recorded, protocol=2))


def _flight_recorder() -> dict | None:
    """What torch has recorded for the backend in use; None if this torch records nothing."""
    from torch._C import _distributed_c10d as c10d

    dist = torch.distributed
    name = "_dump_nccl_trace" if dist.is_initialized() and dist.get_backend() == "nccl" else "_dump_fr_trace"
    dump = getattr(c10d, name, None)
    return None if dump is None else pickle.loads(dump())  # what torch has written in this process


def _lines(entries: list[dict], ranks: Mapping[Any, list[int]]) -> list[str]:
    """The last collectives as text, the latest at the end."""
    rows = [["number", "collective", "state", "elements", "group", "its ranks"]]
    for entry in entries[-LAST:]:
        name = entry["process_group"][0]
        state = "ended" if entry["retired"] else "not ended"
        sizes = [*entry["input_sizes"], *entry["output_sizes"][:1]]
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        elements, members = sizes[0] if sizes else "-", ranges_text(ranks.get(name, [])) or "-"
        rows.append(list(map(str, (number, entry["profiling_name"], state, elements, name, members))))
    head = f"last {len(rows) - 1} of {len(entries)} recorded collectives, numbered within their group:"
    return [head, *table(rows)]
