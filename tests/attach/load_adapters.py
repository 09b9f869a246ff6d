"""Run in a process without tread: loads saved adapters into stock models and says how far the outputs are off.

The argument is a folder with `manifest.json`: a list of {"case", "loader", "folder"}. Beside each adapter
lies `expected.pt`, the dense output of the model it was trained on.
"""

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.tiny.stock import CASES


def pipeline_with(name: str, transformer: Any) -> Any:
    """A stock pipeline that holds a transformer and nothing else."""
    import diffusers

    kind = getattr(diffusers, name)
    pipeline = kind.__new__(kind)  # its constructor would want tokenizers and a VAE
    parts = set(inspect.signature(kind.__init__).parameters) - {"self", "transformer"}
    pipeline.register_modules(**dict.fromkeys(parts), transformer=transformer)
    return pipeline


def load(loader: str, folder: str, model: Any) -> Any:
    """The stock model with the adapter, by the loader that the docs name."""
    owner, _, method = loader.partition(".")
    if method == "load_lora_weights":
        pipeline = pipeline_with(owner, model)
        pipeline.load_lora_weights(folder)
        return pipeline.transformer
    if method == "load_lora_adapter":
        model.load_lora_adapter(folder, prefix=None, weight_name="pytorch_lora_weights.safetensors")
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    cases = {case.name: case for case in CASES}
    results = []
    for entry in json.loads((folder / "manifest.json").read_text()):
        case = cases[entry["case"]]
        expected = torch.load(Path(entry["folder"]) / "expected.pt", weights_only=True)
        model = load(entry["loader"], entry["folder"], case.model())
        with torch.no_grad():
            output = case.call(model.eval(), case.inputs(case.batch))
            plain = case.call(case.model().eval(), case.inputs(case.batch))
        off, moved = ((output - other).abs().max().item() for other in (expected, plain))
        results.append({**entry, "off": off, "moved": moved})
    assert "tread" not in sys.modules
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
