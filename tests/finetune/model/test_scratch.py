"""Training from scratch: new weights of every family, other sizes, the run's own defaults, and a result that loads."""

import functools
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from tests.tiny.autoencoders import tiny_autoencoder
from tests.tiny.pictures import write_shapes
from tests.tiny.pipelines import TINY
from tests.tiny.text_encoders import t5_text
from tests.tiny.tokenizers import t5_tokenizer
from tread.attach.registry import layers_of
from tread.errors import ConfigError
from tread.finetune.config import read_config
from tread.finetune.model import scratch
from tread.finetune.model.source import Source
from tread.finetune.result.export import export
from tread.finetune.run import finetune
from tread.finetune.settings import FinetuneConfig
from tread.finetune.starter import starter_config
from tread.training.checkpoint import list_checkpoints
from tread.training.metrics import read_metrics
from tread.training.parts import load_part

pytestmark = pytest.mark.filterwarnings("ignore")
Folder = Callable[[str], Path]
ROUTES = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}]}
FIRST = {tiny.family: name for name, tiny in reversed(TINY.items())}
"""One tiny pipeline of each family."""


@pytest.fixture
def base(pipeline_folder: Folder, tmp_path: Path) -> Path:
    """An AuraFlow whose transformer has a config and no weights."""
    folder = shutil.copytree(pipeline_folder("auraflow"), tmp_path / "base")
    for file in (folder / "transformer").glob("*.safetensors"):
        file.unlink()
    return folder


@pytest.fixture
def config(base: Path, tmp_path: Path) -> Callable[..., FinetuneConfig]:
    """`config(key=value)`: what `read_config` makes of a file that says `init: scratch`."""
    data = write_shapes(tmp_path / "shapes")

    def make(**changes: Any) -> FinetuneConfig:
        settings: dict[str, Any] = {
            "model_family": "auraflow",
            "pretrained_model_name_or_path": str(base),
            "init": "scratch",
            "transformer": {"num_single_dit_layers": 2},
            "data": str(data),
            "resolution": 64,
            "tokenizer_max_length": 16,
            "output_dir": str(tmp_path / "run"),
            "cache_dir": str(tmp_path / "cache"),
            "tread_config": ROUTES,
            "max_train_steps": 4,
            "train_batch_size": 3,
            "num_eval_images": 6,
            "eval_steps_interval": 4,
            "mixed_precision": "no",
            "report_to": "none",
        }
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(settings | changes))
        return read_config(tmp_path / "c.yaml")

    return make


@pytest.fixture
def unfilled() -> Any:
    """Memory that a class leaves uninitialised is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)


@pytest.mark.usefixtures("unfilled")
@pytest.mark.parametrize("family", FIRST)
def test_new_weights_are_drawn_whole_by_the_seed(pipeline_folder: Folder, family: str) -> None:
    """By the stock class: every number is set, and none is the base's."""
    source = Source(str(pipeline_folder(FIRST[family])))
    before = torch.get_rng_state()
    one, again, other = (scratch.make(source, "transformer", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.isfinite(parameter).all() for parameter in one.parameters())
    assert same(one, again)
    assert not same(one, other)
    assert not same(one, source.transformer("transformer", dtype=torch.float32))
    torch.manual_seed(1)
    assert same(one, type(one).from_config(source.config("transformer")))  # pyright: ignore[reportAttributeAccessIssue]


def drawn(source: Source) -> dict[str, Tensor]:
    """The weights that `scratch.draw` gives a process that keeps all of them."""
    model = scratch.empty(source, "transformer")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    own = {name: torch.full_like(tensor, 7, device="cpu") for name, tensor in model.state_dict().items()}
    scratch.draw(source, "transformer", own, seed=1)
    return own


@pytest.mark.parametrize("family", FIRST)
def test_layers_are_drawn_one_by_one(pipeline_folder: Folder, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the model that is made whole, and at any time one layer of it at most is there."""
    source = Source(str(pipeline_folder(FIRST[family])))
    layers: list[nn.Module] = []
    own_keep = scratch._keep

    def keep(module: nn.Module, prefix: str, own: Any) -> None:
        assert all(parameter.is_meta for layer in layers for parameter in layer.parameters())
        own_keep(module, prefix, own)
        layers.append(module)

    monkeypatch.setattr(scratch, "_keep", keep)
    expected, before = scratch.make(source, "transformer", seed=1), torch.get_rng_state()
    found = drawn(source)
    assert len(layers[:-1]) >= len(layers_of(expected))
    assert {type(layer) for layer in layers[:-1]} == {type(layer) for layer in layers_of(expected)}
    assert type(layers[-1]) is type(expected), "what is no layer comes last"
    assert torch.equal(torch.get_rng_state(), before)
    assert found.keys() == expected.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.state_dict().items())
    again = scratch.make(source, "transformer", seed=1)
    assert same(expected, again), "the classes are as they were"
    empty = dict(scratch.empty(source, "transformer").named_buffers())
    assert all(torch.equal(empty[name], buffer) for name, buffer in expected.named_buffers())


def test_a_layer_that_is_written_to_again(pipeline_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A constructor that changes its layers in the end has the last word; nothing else says that they are gone."""
    source = Source(str(pipeline_folder("auraflow")))
    cls = source.class_of("transformer")
    own = cls.__init__

    @functools.wraps(own)  # diffusers reads its signature
    def changed(self: Any, *arguments: Any, **named: Any) -> None:
        own(self, *arguments, **named)
        layer: Any
        for layer in layers_of(self):
            layer.attn.to_q.weight.data.normal_()

    monkeypatch.setattr(cls, "__init__", changed)
    found = drawn(source)
    for name, tensor in scratch.make(source, "transformer", seed=1).state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_a_run_from_scratch_has_the_paper_s_defaults(config: Callable[..., FinetuneConfig]) -> None:
    found = config()
    assert (found.model_type, found.routed_loss, found.use_ema, found.adam_weight_decay) == ("full", "all", True, 0.0)
    plan = found.plan()
    assert plan is not None
    assert plan.schedule is None
    assert not config(use_ema=False).use_ema


def test_a_few_steps_lower_the_dense_loss_and_the_result_is_stock(
    config: Callable[..., FinetuneConfig], base: Path, tmp_path: Path
) -> None:
    """The weights of the moving average, in the changed sizes; a resumed run and an exported result are the same."""
    from diffusers.models.transformers.auraflow_transformer_2d import AuraFlowTransformer2DModel
    from diffusers.pipelines.aura_flow.pipeline_aura_flow import AuraFlowPipeline

    steps = {"max_train_steps": 40, "learning_rate": 2e-3, "ema_decay": 0.5, "eval_steps_interval": 20}
    folder = finetune(config(**steps, checkpoint_step_interval=20))
    losses = [line["val_loss"] for line in read_metrics(folder) if "val_loss" in line]
    assert losses[-1] < losses[0]
    made: Any = AuraFlowTransformer2DModel.from_pretrained(folder / "transformer")
    assert len(made.single_transformer_blocks) == 2
    averaged = load_part(list_checkpoints(folder / "checkpoints")[-1], "ema")
    assert all(torch.equal(value, averaged[name]) for name, value in made.named_parameters())
    pipeline: Any = AuraFlowPipeline.from_pretrained(base, transformer=made)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline("a red circle", height=64, width=64, num_inference_steps=1).images[0].size == (64, 64)
    card = (folder / "README.md").read_text()
    assert "from-scratch" in card
    assert "base_model" not in card
    export(folder, step=40, out=tmp_path / "out")
    assert same(made, AuraFlowTransformer2DModel.from_pretrained(tmp_path / "out" / "transformer"))
    finetune(config(**(steps | {"max_train_steps": 20}), output_dir=str(tmp_path / "two")))
    resumed = finetune(config(**steps, output_dir=str(tmp_path / "two"), resume_from_checkpoint="latest"))
    assert same(made, AuraFlowTransformer2DModel.from_pretrained(resumed / "transformer"))


def test_all_tokens_carry_loss(config: Callable[..., FinetuneConfig], tmp_path: Path) -> None:
    """The first step's loss is that of a run with `kept`, over more tokens: another number."""
    runs = [
        finetune(config(routed_loss=kind, output_dir=str(tmp_path / kind), max_train_steps=1, logging_steps=1))
        for kind in ("all", "kept")
    ]
    one, other = ([line["loss"] for line in read_metrics(run) if "loss" in line] for run in runs)
    assert one != other


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"transformer": {"num_layer": 2}},
            r"transformer has the key 'num_layer'.* A AuraFlowTransformer2DModel has: ",
        ),
        (
            {"transformer": {"in_channels": 8}},
            r"in_channels of transformer is 8, but the other parts of \S+ need 4; leave",
        ),
        (
            {"transformer": {"attention_head_dim": "x"}},
            r"cannot be made with transformer \{'attention_head_dim': 'x'\}: ",
        ),
        (
            {"transformer": {"num_attention_heads": 3}, "tread_config": None},
            r"with transformer \{'num_attention_heads': 3\} cannot compute a batch .* must be changed together",
        ),
        (
            {"init": "pretrained"},
            r"transformer is \{.*\}, but init is 'pretrained', and released weights have the sizes",
        ),
        ({"model_type": "lora"}, r"init is 'scratch' and model_type 'lora', but an adapter needs a trained base: set"),
    ],
)
def test_what_cannot_be_made_is_said_in_a_sentence(
    config: Callable[..., FinetuneConfig], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        finetune(config(**changes))


def test_init_writes_a_config_from_scratch(base: Path, tmp_path: Path) -> None:
    data = write_shapes(tmp_path / "data")
    (tmp_path / "i.yaml").write_text(starter_config("auraflow", str(base), str(data), scratch=True))
    found = read_config(tmp_path / "i.yaml")
    assert (found.init, found.model_type, found.use_ema, found.routed_loss) == ("scratch", "full", True, "all")
    assert found.transformer == {"num_mmdit_layers": 2, "num_single_dit_layers": 3, "num_attention_heads": 2}


def test_the_example_s_pipeline_trains_as_the_recipe_says(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    example = runpy.run_path(str(root / "examples" / "small_pipeline.py"))
    parts = tiny_autoencoder(channels=16), t5_text(), t5_tokenizer()
    example["assemble"](*parts).save_pretrained(tmp_path / "pipeline")
    small = {
        "pretrained_model_name_or_path": tmp_path / "pipeline",
        "data": write_shapes(tmp_path / "shapes"),
        "output_dir": tmp_path / "run",
        "cache_dir": tmp_path / "cache",
        "resolution": 32,
        "max_train_steps": 1,
        "train_batch_size": 2,
        "num_eval_images": 1,
        "validation_steps": 0,
        "report_to": "none",
    }
    recipe = root / "recipes" / "finetune" / "auraflow-scratch.yaml"
    folder = finetune(read_config(recipe, [f"{name}={value}" for name, value in small.items()]))
    assert (folder / "transformer" / "config.json").is_file()
