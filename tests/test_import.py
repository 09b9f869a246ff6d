"""`import tread` pulls in torch and nothing heavier."""

import subprocess
import sys

HEAVY = [
    *("accelerate", "diffusers", "hydra", "omegaconf", "webdataset", "transformers"),
    *("peft", "PIL", "matplotlib", "sklearn", "safetensors", "tqdm"),
]


def test_import_needs_torch_alone():
    code = f"import sys, tread; print([name for name in {HEAVY} if name in sys.modules])"
    torch_alone = f"import sys, torch; print([name for name in {HEAVY} if name in sys.modules])"
    loaded, by_torch = (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for program in (code, torch_alone)
    )
    assert loaded == by_torch
