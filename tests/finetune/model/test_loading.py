"""Weights read tensor by tensor: the stock loader's model bit for bit, and host memory that holds no whole model."""

import functools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.finetune.tasks import make_config
from tests.programs import PROCESSES, run
from tests.tiny.pipelines import EVERY, PipelineFolder
from tread.errors import ConfigError
from tread.finetune.families import open_family
from tread.finetune.model.quantize import METHODS, quantize
from tread.finetune.model.source import WEIGHTS, Source
from tread.finetune.run import load_models
from tread.training import memory
from tread.training.memory import AnonymousPeak

pytestmark = pytest.mark.filterwarnings("ignore")
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
MB = 2**20
BIG = {
    "num_attention_heads": 4,
    "attention_head_dim": 128,
    "axes_dims_rope": (16, 56, 56),
    "num_layers": 2,
    "num_single_layers": 13,
}
"""Sizes of a FLUX of 280 MB in float32."""


def stock(place: Path, part: str, dtype: torch.dtype, **where: Any) -> nn.Module:
    """A transformer by its own class's loader."""
    cls = Source(str(place)).class_of(part)
    return cls.from_pretrained(str(place), subfolder=part, torch_dtype=dtype, **where)


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every tensor of a model by name: parameters, all buffers, attributes, and the scales of bitsandbytes."""
    for path, module in model.named_modules():
        own = {**module._parameters, **module._buffers, **vars(module)}
        for name, value in own.items():
            several = value if isinstance(value, list | tuple) else [value]
            for i, one in enumerate(several):
                if isinstance(one, Tensor):
                    yield f"{path}.{name}.{i}", one
                    state = getattr(one, "quant_state", None)
                    yield f"{path}.{name}.{i}.absmax", getattr(state, "absmax", None)
                    yield f"{path}.{name}.{i}.SCB", getattr(one, "SCB", None)


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    assert type(model) is type(expected)
    found, wanted = dict(tensors_of(model)), dict(tensors_of(expected))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if tensor is None:
            assert found[name] is None, name
            continue
        assert found[name].dtype == tensor.dtype, name
        assert found[name].device == tensor.device, name
        assert torch.equal(found[name], tensor), name
    assert model.config == expected.config  # pyright: ignore[reportAttributeAccessIssue]
    assert model.training == expected.training


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EVERY)
def test_the_model_is_that_of_the_stock_loader(name: str, dtype: str, pipeline_folder: PipelineFolder) -> None:
    """Parameters, buffers and tables that no file has, in the same dtypes, float32 where a class keeps it."""
    source = Source(str(pipeline_folder(name)))
    for part in (part for part in source.parts if part.startswith("transformer")):
        assert source.empty(part, dtype=DTYPES[dtype]) is not None, "it is not left to the stock loader"
        model = source.transformer(part, dtype=DTYPES[dtype])
        assert_same(model, stock(pipeline_folder(name), part, DTYPES[dtype]))


@pytest.fixture
def flux(pipeline_folder: PipelineFolder, tmp_path: Path) -> Path:
    """A copy of the tiny FLUX, to be changed."""
    return Path(shutil.copytree(pipeline_folder("flux"), tmp_path / "flux"))


def saved_again(place: Path, **how: Any) -> None:
    """Replace the transformer's files by those that `save_pretrained` makes with the arguments given."""
    model: Any = stock(place, "transformer", torch.float32)
    shutil.rmtree(place / "transformer")
    model.to(how.pop("dtype", torch.float32)).save_pretrained(place / "transformer", **how)


@pytest.mark.parametrize("how", [{"max_shard_size": "60KB"}, {"variant": "fp16", "dtype": torch.float16}])
@pytest.mark.parametrize("both", [False, True])
def test_shards_and_variants(how: dict[str, Any], both: bool, flux: Path) -> None:
    how = how | ({"max_shard_size": "60KB", "variant": "fp16"} if both else {})
    saved_again(flux, **how)
    where = {"variant": how["variant"]} if "variant" in how else {}
    source = Source(str(flux), **where)
    if "max_shard_size" in how:
        assert len(set(source.weights("transformer").files.values())) > 2
    assert source.empty("transformer", dtype=torch.bfloat16) is not None
    model = source.transformer("transformer", dtype=torch.bfloat16)
    assert_same(model, stock(flux, "transformer", torch.bfloat16, **where))


def test_a_transformer_need_not_have_the_variant(flux: Path) -> None:
    """Parts beside it may: stock pipelines load it without, and so does the check before anything is encoded."""
    stock = Source(str(flux)).transformer("transformer", dtype=torch.float32).state_dict()
    loaded = Source(str(flux), variant="fp16").transformer("transformer", dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in stock.items())


def test_files_that_are_no_safetensors_are_left_to_the_stock_loader(flux: Path) -> None:
    saved_again(flux, safe_serialization=False)
    source = Source(str(flux))
    assert source.empty("transformer", dtype=torch.float32) is None
    assert_same(source.transformer("transformer", dtype=torch.float32), stock(flux, "transformer", torch.float32))


def test_a_tensor_of_another_shape_is_refused(flux: Path) -> None:
    config = flux / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"joint_attention_dim": 48}))
    with pytest.raises(ConfigError, match=r"cannot load transformer of .*context_embedder"):
        Source(str(flux)).transformer("transformer", dtype=torch.float32)


def change_class(monkeypatch: pytest.MonkeyPatch, place: Path, change: Callable[[Any], None]) -> None:
    """Let the class of a transformer make `change` to each new model."""
    cls = Source(str(place)).class_of("transformer")
    own = cls.__init__

    @functools.wraps(own)  # diffusers reads its signature
    def changed(self: Any, *arguments: Any, **named: Any) -> None:
        own(self, *arguments, **named)
        change(self)

    monkeypatch.setattr(cls, "__init__", changed)


def change_file(place: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = place / "transformer" / WEIGHTS
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_module_that_two_names_share_is_filled_once(monkeypatch: pytest.MonkeyPatch, flux: Path) -> None:
    """Its file has it under one name."""

    def tie(model: Any) -> None:
        model.transformer_blocks[1].ff.net[2] = model.transformer_blocks[0].ff.net[2]

    change_file(
        flux, lambda tensors: [tensors.pop(f"transformer_blocks.1.ff.net.2.{name}") for name in ("weight", "bias")]
    )
    change_class(monkeypatch, flux, tie)
    source = Source(str(flux))
    assert source.empty("transformer", dtype=torch.bfloat16) is not None
    model: Any = source.transformer("transformer", dtype=torch.bfloat16)
    assert model.transformer_blocks[1].ff.net[2] is model.transformer_blocks[0].ff.net[2]
    assert_same(model, stock(flux, "transformer", torch.bfloat16))


def test_buffers_are_read_or_computed(monkeypatch: pytest.MonkeyPatch, flux: Path) -> None:
    """In the dtype of the job, as the stock loader computes tables; a file's tensor replaces a buffer that is saved."""

    def add(model: Any) -> None:
        model.register_buffer("stored", torch.zeros(4))
        model.register_buffer("counts", torch.zeros(4, dtype=torch.int64))
        model.register_buffer("computed", torch.full((4,), 1 / 3))
        model.register_buffer("table", torch.arange(4) / 3, persistent=False)
        model.own = torch.arange(4) / 7

    found = {"stored": torch.randn(4), "counts": torch.arange(4), "table": torch.randn(4)}
    change_file(flux, lambda tensors: tensors.update(found))
    change_class(monkeypatch, flux, add)
    source = Source(str(flux))
    assert source.empty("transformer", dtype=torch.bfloat16) is not None
    model: Any = source.transformer("transformer", dtype=torch.bfloat16)
    assert torch.equal(model.stored, found["stored"].bfloat16())
    assert_same(model, stock(flux, "transformer", torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", METHODS)
def test_quantized_as_it_is_read(precision: str, dtype: str, flux: Path) -> None:
    """What quantizing the stock loader's model gives."""
    saved_again(flux, max_shard_size="60KB")
    source = Source(str(flux))
    expected = stock(flux, "transformer", DTYPES[dtype])
    quantize(expected, precision, "cpu")
    model = source.empty("transformer", dtype=DTYPES[dtype])
    assert model is not None
    quantize(model, precision, "cpu", source.weights("transformer"))
    assert_same(model, expected)


@pytest.mark.parametrize("changes", [{}, {"use_dora": True}, {"lora_type": "lokr"}])
@pytest.mark.parametrize("precision", ["bf16", "int8", "nf4"])
def test_an_adapter_on_top(
    precision: str, changes: dict[str, Any], flux: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model that a config trains begins as it does on the stock loader's."""
    if (precision, changes.get("lora_type")) == ("nf4", "lokr"):
        pytest.skip("peft cannot combine them")
    settings = {"base_model_precision": precision, "mixed_precision": "bf16", "lora_rank": 4, **changes}
    config = make_config(flux, {"instance_data_dir": "data"}, **settings)
    family = open_family("flux", Source(str(flux)))
    (model,) = load_models(config, family, torch.device("cpu")).values()
    monkeypatch.setattr(Source, "empty", lambda *_, **__: None)
    (expected,) = load_models(config, family, torch.device("cpu")).values()
    assert_same(model, expected)


@pytest.mark.parametrize("dtype", ["no", "bf16"])
@pytest.mark.parametrize("changes", [{}, {"use_dora": True}, {"lora_type": "lokr"}])
def test_an_adapter_of_a_base_to_be_sharded(dtype: str, changes: dict[str, Any], flux: Path) -> None:
    """It begins as on a base that is there, DoRA's magnitudes too, and leaves the base on the meta device."""
    settings = {"mixed_precision": dtype, "lora_rank": 4, **changes}
    family = open_family("flux", Source(str(flux)))
    whole, empty = (
        load_models(
            make_config(flux, {"instance_data_dir": "data"}, parallel=parallel, **settings), family, torch.device("cpu")
        )["transformer"]
        for parallel in ("ddp", "fsdp")
    )
    found = dict(empty.named_parameters())
    assert any("lora_magnitude_vector" in name for name in found) == ("use_dora" in changes)
    for name, parameter in whole.named_parameters():
        if parameter.requires_grad:
            assert parameter.dtype == found[name].dtype == torch.float32
            assert torch.equal(parameter, found[name]), name
        else:
            assert found[name].is_meta
            assert found[name].dtype == parameter.dtype


def climb(folder: Path, base: Path, tiny: Path, processes: bool, **jobs: dict[str, Any]) -> dict[str, list[Any]]:
    """What each process of `memory.py` wrote down of each of the `jobs`, changes to a config by name."""
    launch = PROCESSES if processes else []
    paths = []
    for name, changes in [("tiny", next(iter(jobs.values()))), *jobs.items()]:
        place = tiny if name == "tiny" else base
        keys = {"model_family": "flux", "pretrained_model_name_or_path": str(place), "data": str(folder)}
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps({**keys, "mixed_precision": "bf16", "report_to": "none", **changes}))
    run(*launch, "-m", "tests.finetune.model.memory", folder, *paths, ACCELERATE_USE_CPU="true")
    return {name: [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-*.json"))] for name in jobs}


@pytest.fixture(scope="module")
def big(pipeline_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FLUX of 280 MB in float32, in shards of 40 MB."""
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    place = tmp_path_factory.mktemp("big")
    shutil.copytree(pipeline_folder("flux"), place, dirs_exist_ok=True)
    config = {**Source(str(place)).config("transformer"), **BIG}
    shutil.rmtree(place / "transformer")
    torch.manual_seed(0)
    model: Any = FluxTransformer2DModel.from_config(config)
    model.save_pretrained(place / "transformer", max_shard_size="40MB")
    assert sum(parameter.nbytes for parameter in model.parameters()) > 250 * MB
    return place


@pytest.mark.skipif(not memory.STATUS.is_file(), reason="anonymous memory is known on Linux alone")
def test_host_memory_holds_no_whole_model(big: Path, pipeline_folder: PipelineFolder, tmp_path: Path) -> None:
    """At most 1.3 times the quantized size and one shard; the stock loader's bfloat16 copy alone is more."""
    shard = max(path.stat().st_size for path in (big / "transformer").glob("*.safetensors"))
    assert shard < 50 * MB
    jobs = {"int4": {"base_model_precision": "int4"}}
    (one,) = climb(tmp_path, big, pipeline_folder("flux"), False, **jobs)["int4"]
    limit = 1.3 * one["held"] + shard
    assert one["climbed"] < limit
    assert one["whole"] > limit, "or the limit is none"


SHARDED: dict[str, dict[str, Any]] = {
    "lora": {"lora_rank": 4},
    "dora": {"lora_rank": 4, "use_dora": True},
    "scratch": {"init": "scratch"},
}
"""Jobs whose model is never whole on a process; the last has all weights in float32."""


@pytest.fixture(scope="module")
def ranks(big: Path, pipeline_folder: PipelineFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What two processes took and held of each."""
    jobs = {name: {**changes, "parallel": "fsdp"} for name, changes in SHARDED.items()}
    return climb(tmp_path_factory.mktemp("ranks"), big, pipeline_folder("flux"), True, **jobs)


@pytest.mark.contract
@pytest.mark.skipif(not memory.STATUS.is_file(), reason="anonymous memory is known on Linux alone")
@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_job_holds_its_shards(name: str, ranks: dict[str, list[Any]]) -> None:
    """Each of two processes has half of the model, and never much more: its largest layer has 36 MB in float32."""
    half = (130 if name == "scratch" else 65) * MB
    assert len(ranks[name]) == 2
    for rank in ranks[name]:
        assert half < rank["held"] < 1.23 * half
        assert rank["climbed"] < 1.3 * rank["held"]
        assert rank["whole"] > 1.8 * rank["held"], "or the limit is none"


@pytest.mark.skipif(not memory.STATUS.is_file(), reason="anonymous memory is known on Linux alone")
def test_the_peak_is_that_of_allocated_memory(tmp_path: Path) -> None:
    """A tensor that is gone at the end counts, and a mapped file does not."""
    path = tmp_path / WEIGHTS
    path.write_bytes(bytes(64 * MB))
    with AnonymousPeak() as peak:
        gone = torch.ones(128 * MB, dtype=torch.uint8)  # too much to come from memory that was freed before
        for _ in range(10_000):
            if peak._most - peak._before > 100 * MB:
                break
            time.sleep(memory.PERIOD)
        del gone
        mapped = torch.from_file(str(path), size=64 * MB, dtype=torch.uint8)
        assert mapped.max() == 0
    assert peak.bytes is not None
    assert 100 * MB < peak.bytes < 180 * MB
