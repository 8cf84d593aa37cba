"""A plug-in with rewards that raise, hang, crash, take lists or must be awaited."""

PLUG_IN = """
import asyncio, functools, numpy, os, signal, subprocess, sys, time
from megarl.rewards import Score, batched, grouped

def moody(sample):
    print("noise that must not reach the pipes", sys.stdin.read())
    match sample.response:
        case "raise": raise KeyError("x")
        case "leave": sys.exit(3)
        case "hang": time.sleep(600)
        case "hide":
            while True:
                try: time.sleep(600)
                except Exception: pass
        case "stubborn":
            try: time.sleep(600)
            except BaseException: return 1.0
        case "nan": return float("nan")
        case "text": return "1"
        case "crash" if "chosen_verifiers" in sys.argv[0]: os.kill(os.getpid(), signal.SIGSEGV)
        case "start":
            print(subprocess.Popen(["sleep", "600"]).pid, file=open(sample.prompt, "w"), flush=True)
            time.sleep(600)
        case "who": return Score(os.getpid(), "torch" in sys.modules, extracted=" ".join(sockets()))
    return 0.5

def sockets():
    files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    links = [os.readlink(file) for file in files if os.path.islink(file)]
    return [link for link in links if link.startswith("socket")]

calls = []
@batched
def lengths(samples):
    calls.append(len(samples))
    if samples[0].response == "short": return [1.0]
    if samples[0].response == "hang": time.sleep(600)
    return ["no" if sample.response == "raise" else len(sample.response) for sample in samples]

@grouped
def places(samples):
    if samples[0].response == "short": return [1.0]
    if samples[0].response == "hang": time.sleep(600)
    return ["no" if sample.response == "raise" else len(samples) + i / 10 for i, sample in enumerate(samples)]

@batched
async def together(samples):
    return numpy.array([len(sample.response) for sample in samples])

arrived = asyncio.Event()
async def meeting(sample):
    match sample.response:
        case "wait": await arrived.wait()
        case "come": arrived.set()
        case "leave": sys.exit(3)
        case "raise": raise KeyError("x")
        case "hang": await asyncio.sleep(600)
        case "own": raise TimeoutError("of its own")
    return 0.5

class Asker:
    async def __call__(self, sample, factor=2):
        await asyncio.sleep(0)
        return factor * len(sample.response)
    async def method(self, sample):
        return await self(sample, 3)

asker = Asker()
method, part = asker.method, functools.partial(asker, factor=4)

@functools.wraps(meeting)
def wrapped(sample):
    return asker(sample)

def yields(sample): yield 1.0
async def ayields(sample): yield 1.0

@batched
@grouped
def confused(samples): return [1.0] * len(samples)
"""
