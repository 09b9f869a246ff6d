"""The bounds of the settings: what lies outside is refused by name, with what is allowed."""

import shlex
from pathlib import Path

import pytest

from tread.errors import ConfigError
from tread.pretrain.config import compose


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.steps=0", "train.steps is 0; it must be at least 1."),
        ("train.epochs=0", "train.epochs is 0; it must be at least 1."),
        ("train.batch_size=0", "train.batch_size is 0; it must be at least 1."),
        ("train.micro_steps=0", "train.micro_steps is 0; it must be at least 1."),
        ("train.seed=-1", "train.seed is -1; it must be at least 0."),
        ("train.workers=-1", "train.workers is -1; it must be at least 0."),
        ("train.class_dropout=1", "train.class_dropout is 1.0; allowed is 0 <= value < 1."),
        (
            "train.class_dropout=0",
            "sample.guidance is 1.5, but train.class_dropout is 0, so the null class that guidance needs is never "
            "trained: set sample.guidance=1, or drop some labels.",
        ),
        (
            "train.precision=fp16",
            "train.precision is 'fp16'; it must be one of 'auto', 'bf16', 'bf16-stream', 'float32'.",
        ),
        ("train.float8=true", "train.float8 is True; it must be one of 'rowwise', 'tensorwise' or null."),
        (
            "train.attention=fast",
            "train.attention is 'fast'; it must be one of 'auto', 'flash', 'cudnn', 'efficient', 'math', 'default'.",
        ),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate is -1.0; it must be at least 0."),
        ("optimizer.betas=[0.9]", "optimizer.betas is [0.9]; it must be a list of 2 (a number each)."),
        ("optimizer.betas=[0.9,1]", "optimizer.betas is [0.9, 1.0]; it must be two numbers with 0 <= value < 1."),
        ("train.timeout_minutes=-1", "train.timeout_minutes is -1.0; it must be above 0 and at most 10080 (a week)."),
        ("optimizer.eps=0", "optimizer.eps is 0.0; it must be above 0, or an update divides by 0."),
        ("optimizer.clip=0", "optimizer.clip is 0.0; it must be above 0, or null for no clipping."),
        ("ema.decay=1", "ema.decay is 1.0; allowed is 0 <= value < 1."),
        ("ema.warmup=0", "ema.warmup is 0; it must be at least 1."),
        ("checkpoint.every=-1", "checkpoint.every is -1; it must be at least 0."),
        ("checkpoint.keep=0", "checkpoint.keep is 0; it must be at least 1."),
        ("validation.samples=-1", "validation.samples is -1; it must be at least 0."),
        ("sample.interval=[1]", "sample.interval is [1]; it must be a list of 2 (a number each) or null."),
        ("sample.interval=[0.7,0.1]", "sample.interval is (0.7, 0.1); its lower end must be below its upper end."),
        ("sample.churn=-1", "sample.churn is -1.0; it must be at least 0."),
        (
            "sample.churn=3",
            "sample.churn is 3.0, but it needs objective=edm with the solver heun, and this run has flow with euler: "
            "set sample.churn=0.",
        ),
        ("sample.churn_interval=[1]", "sample.churn_interval is [1]; it must be a list of 2 (a number each) or null."),
        (
            "sample.churn_interval=[2,1]",
            "sample.churn_interval is (2.0, 1.0); its lower end must be below its upper end.",
        ),
        (
            "evaluate.guidance=-1",
            "evaluate.guidance is -1.0; it must be a scale of at least 0, or a list of different ones.",
        ),
        (
            "evaluate.guidance=[]",
            "evaluate.guidance is []; it must be a scale of at least 0, or a list of different ones.",
        ),
        (
            "evaluate.guidance=[2,1,2]",
            "evaluate.guidance is [2.0, 1.0, 2.0]; it must be a scale of at least 0, or a list of different ones.",
        ),
        ("evaluate.guidance=[1,x]", "evaluate.guidance[1] is 'x'; it must be a number."),
        ("sample.guidance=-1", "sample.guidance is -1.0; it must be at least 0."),
        ("sample.guidance=.inf", "sample.guidance is inf; it must be a number."),
        ("sample.solver=ddim", "sample.solver is 'ddim'; it must be one of 'euler', 'heun' or null."),
        (
            "train.checkpointing=selectiv",
            "train.checkpointing is 'selectiv'; it must be true or false or one of 'selective', 'dense'.",
        ),
        ("log.trackers=mlflow", "log.trackers is 'mlflow'; it must be one of 'auto', 'none', 'tensorboard', 'wandb'."),
        ("data={}", "there is no data={}; choose one of: digits, images, latents."),
        ("model.tread_config.selector=best", "selector is 'best'. Choose one of: random, l1."),
    ],
)
def test_out_of_bounds(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose([setting])
    assert str(error.value) == message


def test_overrides_are_what_differs_from_the_preset() -> None:
    model = compose(["model=tread", "model.width=32", "model.rope=false"]).model
    assert model.overrides() == {"width": 32, "rope": False}


def test_an_interval_is_a_pair() -> None:
    assert compose(["sample.interval=[0.1,0.7]"]).sample.interval == (0.1, 0.7)
    assert compose([]).sample.interval is None


def test_a_shell_reads_the_command_that_goes_on() -> None:
    command = compose([]).resume_command(Path("my runs/a"))
    assert shlex.split(command) == ["tread", "train", "resume=my runs/a"]
