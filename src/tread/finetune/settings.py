"""The settings of `tread finetune`: one flat dataclass, with the key names that people know.

- Defaults are defined here and nowhere else; docs/finetune-keys.md and `tread init` print each docstring.
- Each field has one meaning; `compat` translates the names and values of other trainers when a config is read.
- Checks across fields are in `consistency.py`.
- `plan()` adds the default schedule of fine-tunes to the routes, unless the config says `schedule: null`.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from tread.config.schema import parse, several
from tread.data.captioned.captions import triggered
from tread.data.captioned.entries import DataConfig, data_configs
from tread.errors import ConfigError
from tread.finetune.consistency import check_settings
from tread.finetune.target import Weighting
from tread.kernels.attention.kernel import Attention
from tread.kernels.checkpointing import Checkpointing
from tread.kernels.compiling import Switch
from tread.objectives.density import PARAMETERS, Density, DensityName
from tread.routing import noise
from tread.routing.plan import RoutePlan, tread_mapping
from tread.routing.schedule import Schedule
from tread.training.settings import OptimizerName, Parallel, ScheduleName

Precision = Literal["no_change", "bf16", "fp32", "int8", "int4", "fp8", "fp8-forward", "fp8-matmul", "int8-bnb", "nf4"]
LoraPrecision = Literal["fp32", "bf16", "fp16"]
UNQUANTIZED = ("no_change", "bf16", "fp32")
ENTRY_DEFAULTS = ("resolution", "resolution_type", "minimum_image_size", "trigger_word")
"""Settings of a config that are the defaults of its data entries."""


@dataclass(frozen=True, kw_only=True)
class DefaultSchedule:
    """The schedule of a fine-tune whose tread_config sets none; docs/log.md has the measurement."""

    warmup_fraction: float
    warmup_most: int
    cooldown_fraction: float

    def of(self, steps: int) -> Schedule:
        """The schedule for a run of `steps` optimizer steps."""
        warmup = min(self.warmup_most, round(steps * self.warmup_fraction))
        return Schedule(warmup_steps=warmup, cooldown_fraction=self.cooldown_fraction)


SCRATCH: dict[str, Any] = {
    "model_type": "full",
    "routed_loss": "all",
    "use_ema": True,
    "adam_weight_decay": 0.0,
}
"""Defaults of a config that says `init: scratch`, as the paper trains."""

SCHEDULE = DefaultSchedule(warmup_fraction=0.1, warmup_most=200, cooldown_fraction=0.15)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Everything `tread finetune` reads; `config.read_config` makes it from a file."""

    model_family: str
    """The family of the model; docs/models.md has a table of them."""
    pretrained_model_name_or_path: str
    """The base model in diffusers format: a folder, or an id on the hub."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub."""
    variant: str | None = None
    """Variant of the weight files, e.g. fp16."""
    init: Literal["pretrained", "scratch"] = "pretrained"
    """Where the transformer's weights come from: the base model, or drawn at random by its config (the other parts \
are the base's). scratch has other defaults: model_type full, routed_loss all, use_ema true, adam_weight_decay 0, and \
no schedule of the routes."""
    transformer: dict[str, Any] | None = None
    """Keys of the transformer's config to change for init scratch, e.g. num_layers; null: as the base's."""
    experts: Literal["both", "high", "low"] = "both"
    """Which transformers of Wan 2.2 A14B are trained: both, or only the one for high or for low noise."""
    first_frame: bool = False
    """Condition a model that also draws from text alone (LTX-Video, Wan 2.2 TI2V) on each clip's first frame, so that \
it learns image-to-video; image-to-video models always are."""
    sound: Literal["keep", "train"] = "keep"
    """Whether LTX-2, which draws sound with its video, is trained on the sound of clips too; keep: that part of the \
model stays as it is, and clips are trained without their sound."""

    data: str | dict[str, Any] | tuple[str | dict[str, Any], ...]
    """What to train on: a folder or table, a mapping, or a list of these; docs/data.md lists the keys."""
    resolution: float | None = None
    """Resolution of data entries that set none: in pixels, or in megapixels with resolution_type area."""
    resolution_type: Literal["pixel", "pixel_area", "area"] | None = None
    """What resolution is in data entries that set none: the shorter side, the square root of the area, or the area."""
    minimum_image_size: float | None = None
    """Smaller images are skipped and listed, in data entries that set none."""
    trigger_word: str | None = None
    """The word that should stand for the trained subject, in data entries that set none. It replaces [trigger] in \
captions and validation prompts, and is put in front of captions that have neither."""
    caption_dropout_probability: float = 0.1
    """The share of captions replaced by the empty one, which guidance needs."""
    cache_dir: str = "cache"
    """Where encoded images and captions are kept, for all runs."""
    vae_batch_size: int = 4
    """Images encoded at once."""
    vae_dtype: Literal["bf16", "fp32"] = "fp32"
    """Precision of the autoencoder, which runs once per image."""
    vae_enable_tiling: bool = False
    """Encode and decode in tiles: less memory, seams that are barely visible."""
    tokenizer_max_length: int | None = None
    """Tokens of a caption that are read; null: as many as the family's pipeline reads. FLUX, SD3, AuraFlow and Wan \
compute all of them in every step, so fewer are faster where captions are short."""
    text_encoder_batch_size: int = 4
    """Captions encoded at once."""
    dataloader_num_workers: int = 0
    """Processes that read the cache ahead of training, per GPU."""

    tread_config: dict[str, Any] | str | None = None
    """The routes: a mapping, a preset (balanced, max-speed, high-res, lora, masked, paper, video), or the path of a \
JSON or YAML file; null trains dense."""

    model_type: Literal["lora", "full"] = "lora"
    """Train an adapter, or all weights of the transformer."""
    lora_type: Literal["standard", "lokr", "lycoris"] = "standard"
    """The adapter: LoRA, LoKr, or what lycoris_config says through the lycoris library."""
    lora_rank: int = 16
    """Rank of the adapter; for LoKr, a large one (10000) means full matrices."""
    lora_alpha: float | None = None
    """The adapter's update is scaled by lora_alpha / lora_rank; null: lora_rank, a scale of 1."""
    lora_dropout: float = 0.0
    """The share of the adapter's inputs set to 0 in training."""
    use_dora: bool = False
    """DoRA: learn the length of each row of an adapted weight beside its direction; a step takes longer, because it \
computes the norms of the adapted weights. For lora_type standard."""
    init_lora: str | None = None
    """Start from an existing adapter of the same rank: a safetensors file, a folder, or an id on the hub, under the \
names of diffusers, peft, ComfyUI or kohya; null: a new adapter, whose update is zero."""
    lora_dtype: LoraPrecision = "fp32"
    """Precision of the adapter's file; training is in float32."""
    lora_targets: tuple[str, ...] | None = None
    """Names of the linear layers that get an adapter; null: the family's own."""
    lokr_factor: int = -1
    """Size of LoKr's smaller Kronecker factor; -1: both as square as possible."""
    lycoris_config: dict[str, Any] | None = None
    """Settings of the lycoris library for lora_type lycoris; a config may name their JSON file."""
    base_model_precision: Precision = "no_change"
    """Precision of the base's weights: bf16, fp32, or quantized to int8, int4 or fp8, or by bitsandbytes to int8-bnb \
or nf4; fp8-forward also multiplies in float8 in the forward pass, fp8-matmul in both passes (Ada and Hopper GPUs); \
no_change: that of mixed_precision, or float32 when all weights are trained."""
    quantize_via: Literal["cpu", "accelerator"] = "accelerator"
    """Where the base is quantized; cpu is slower, and needs no more GPU memory than the quantized model."""

    max_train_steps: int = 1000
    """Optimizer steps."""
    num_train_epochs: int = 0
    """Passes over the data; above 0 it takes the place of max_train_steps."""
    train_batch_size: int = 1
    """Samples per GPU and forward."""
    gradient_accumulation_steps: int = 1
    """Forwards per optimizer step."""
    gradient_checkpointing: Checkpointing = True
    """true: recompute activations in the backward pass, which takes far less memory and about a third more time; \
selective: recompute only cheap ones, which saves a quarter of a FLUX LoRA's activations for 3 % more time; dense: \
recompute all, but only in the steps of tread_config's schedule that drop fewer tokens."""
    mixed_precision: Literal["auto", "bf16", "no"] = "auto"
    """Precision of the computation; no: float32; auto: bf16 on a GPU or with a base in bf16, else float32, because \
bf16 is far slower on a CPU."""
    compile: Switch = "auto"
    """Compile the layers, which takes minutes at the start; auto: on a GPU."""
    attention: Attention = "auto"
    """The attention kernel; auto: cudnn on Hopper and newer, elsewhere flash, or another for masks, which flash does \
not take; cudnn, flash, efficient and math use that kernel alone; default leaves the choice to torch."""
    graphs: bool = False
    """Replay the network as CUDA graphs, on one GPU, so that steps do not wait for the host to launch kernels. A \
routed LoRA step on FLUX gets 5 to 15 % faster and takes 0.3 GiB more. If a model cannot be captured, the run says so \
and continues without."""
    offload: Literal["none", "auto"] | int = "none"
    """Layers whose frozen weights stay in host memory, quantized if the base is, and copied to the GPU when they are \
needed: a number, or auto for as few as the memory of the first step allows. Their activations are recomputed in the \
backward pass, whatever gradient_checkpointing is. For adapters."""
    parallel: Parallel = "ddp"
    """How processes share the model: ddp keeps it whole on each GPU; fsdp keeps a shard of weights, average and \
moments on each; hsdp does so in groups of shard_size processes. Sharded runs write their result at the end."""
    shard_size: int | None = None
    """Processes that share one copy of the weights with hsdp; null: those of one machine."""
    cpu_offload: bool = False
    """Keep the shards of fsdp and hsdp in host memory and copy them to the GPU layer by layer: much slower."""
    timeout_minutes: float = 30.0
    """How long a process waits for the others, at the start and in a step, before it ends with an error."""
    seed: int = 42
    """The same seed gives the same run."""

    optimizer: OptimizerName = "adamw"
    """The optimizer; the 8-bit ones keep their moments in a quarter of the memory. Lion wants a tenth of AdamW's \
rate and an adam_beta2 of 0.99, adafactor about a hundred times the rate; adamw-bf16 is for all weights in bf16. \
prodigy finds the rate by itself and wants a learning_rate of 1; adamw-schedule-free averages the weights instead of \
lowering the rate; muon takes AdamW's rate and orthogonalises the steps of matrices."""
    learning_rate: float = 1e-4
    """The highest learning rate."""
    lr_scheduler: ScheduleName = "constant"
    """Learning-rate schedule after the warm-up: constant, or a decay to lr_end at the last step."""
    lr_warmup_steps: int = 0
    """Steps of linear warm-up from 0, with every lr_scheduler."""
    lr_end: float = 0.0
    """The rate at the last step, for every lr_scheduler but constant."""
    lr_power: float = 1.0
    """Exponent of lr_scheduler polynomial: (1 - step / steps) ** lr_power, counted from the end of the warm-up."""
    lr_num_cycles: int = 1
    """Cycles of lr_scheduler cosine_with_restarts, each of which decays from learning_rate."""
    adam_beta1: float = 0.9
    """Decay of the optimizer's first moment."""
    adam_beta2: float = 0.999
    """Decay of its second moment."""
    adam_epsilon: float = 1e-8
    """Added to the denominator of AdamW's and Prodigy's updates; lion and adafactor have none."""
    adam_weight_decay: float = 0.01
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm; 0: no clipping."""
    use_ema: bool = False
    """Keep an exponential moving average of the trained weights, which previews, validation and the result use."""
    ema_decay: float = 0.999
    """Decay of the moving average at each step."""
    routed_loss: Literal["all", "kept"] = "kept"
    """Which tokens of a routed step carry loss: those that no route dropped, or all. A model that was trained dense \
unlearns while it is taught to answer for dropped tokens; from scratch, all is right."""
    loss_type: Literal["l2", "huber"] = "l2"
    """Distance between prediction and target; huber is less sensitive to outliers."""
    loss_weighting: Weighting = "none"
    """Weight of the loss by time t of a flow model: none, sigma_sqrt (1 / t^2) or cosmap (2 / pi (1 - 2t + 2t^2)). \
The validation loss has no weights."""
    snr_gamma: float | None = None
    """Min-SNR weighting: the signal-to-noise ratio is clipped to this in the loss weights, usually 5; for models that \
predict noise or v (PixArt, CogVideoX)."""
    noise_offset: float = 0.0
    """Standard deviation of a value added to each channel of a sample's noise, which lets a model learn dark and \
bright images."""
    noise_offset_probability: float = 1.0
    """The share of samples whose noise has that offset."""
    flow_schedule_shift: float | None = None
    """Shift of the training times towards noise (1: none); null: as the model's own sampler shifts them."""
    flow_shift_tokens: int | None = None
    """Tokens of a sample at which that shift holds, e.g. 4096 for 1024x1024: larger samples are shifted more, by the \
root of the ratio; null: one shift for all sizes, unless the model's own sampler has one for each."""
    time_density: DensityName | None = None
    """Density of the training times before the shift; null: logit-normal for flow models, uniform for others."""
    logit_mean: float = Density.logit_mean
    """Mean of logit(t) for time_density logit-normal; above 0 trains more on noise."""
    logit_std: float = Density.logit_std
    """Standard deviation of logit(t) for time_density logit-normal."""
    mode_scale: float = Density.mode_scale
    """Scale of time_density mode: above 0 prefers the middle, below 0 the ends; 0 is uniform."""
    beta_alpha: float = Density.beta_alpha
    """First shape parameter of time_density beta; above the second it prefers noise."""
    beta_beta: float = Density.beta_beta
    """Second shape parameter of time_density beta."""

    output_dir: str = "runs/finetune"
    """The folder of the run: checkpoints, previews, metrics and the result."""
    checkpoint_step_interval: int = 500
    """Steps between checkpoints."""
    checkpoints_total_limit: int = 3
    """Checkpoints that are kept, the newest ones."""
    checkpoints_keep_best: bool = True
    """Keep the checkpoint of the lowest dense validation loss too; each is validated when it is written, unless \
eval_steps_interval is 0. `tread export RUN --best` writes its result."""
    resume_from_checkpoint: str | None = None
    """Resume a run: latest (the one in output_dir, if there is one), or the folder of a run."""
    data_changed: Literal["refuse", "accept"] = "refuse"
    """accept: resume a run although its data has changed; this is for one resume and is not saved."""

    num_eval_images: int = 16
    """Samples of the dense validation loss: from data entries of dataset_type eval, else from the training data."""
    eval_steps_interval: int = 100
    """Steps between validation losses; 0: none."""
    validation_prompt: str | tuple[str, ...] | None = None
    """The prompt or prompts that previews are drawn for, or a file of them: .txt with one in each line, or a list or \
mapping in .json or .yaml."""
    validation_negative_prompt: str = ""
    """What previews are guided away from."""
    validation_steps: int = 500
    """Steps between previews; 0: none."""
    validation_on_startup: bool = False
    """Draw previews and compute the validation loss before the first step too, as a baseline."""
    validation_num_inference_steps: int | None = None
    """Solver steps of a preview; null: the family's."""
    validation_guidance: float | None = None
    """Guidance scale of previews; null: the family's."""
    validation_seed: int = 42
    """Seed of previews, the same at every step."""
    validation_resolution: str | int | None = None
    """Size of previews as WIDTHxHEIGHT, or one number for a square; null: that of the data."""
    validation_num_video_frames: int | None = None
    """Frames of a preview video; null: as many as the longest clip of the data has."""
    validation_image: str | tuple[str, ...] | None = None
    """The image that previews start from: the source of an edit (or several), the first frame of image-to-video."""
    validation_last_image: str | None = None
    """The image that previews end with, for models of a first and a last frame."""
    framerate: int | None = None
    """Frames per second of clips and of preview videos; null: the family's."""

    push_to_hub: bool = False
    """Upload the result, its card and the previews to the Hugging Face hub at the end, with the token in HF_TOKEN."""
    hub_model_id: str | None = None
    """The repository that push_to_hub writes to, OWNER/NAME; null: one of yours, named like output_dir."""
    hub_private: bool = True
    """Whether push_to_hub makes a private repository; one that exists stays as it is."""

    logging_steps: int = 10
    """Steps between lines of metrics."""
    report_to: Literal["auto", "none", "tensorboard", "wandb"] = "auto"
    """Where metrics go besides metrics.jsonl; auto: the trackers that are installed."""
    tracker_project_name: str = "tread-finetune"
    """Name of the project in a tracker."""
    tracker_run_name: str | None = None
    """Name of the run in a tracker; null: that of output_dir."""

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def sharded(self) -> bool:
        """Whether each process holds only a shard of the weights (fsdp, hsdp)."""
        return self.parallel != "ddp"

    @property
    def quantized(self) -> bool:
        """Whether the base's weights are quantized."""
        return self.base_model_precision not in UNQUANTIZED

    @property
    def offloads(self) -> bool:
        """Whether layers are kept in host memory."""
        return self.offload not in ("none", 0)

    @property
    def adapts(self) -> bool:
        """Whether an adapter is trained instead of all weights."""
        return self.model_type == "lora"

    @property
    def prompts(self) -> tuple[str, ...]:
        """The validation prompts, with [trigger] replaced by the trigger word."""
        return tuple(triggered(prompt, self.trigger_word) for prompt in several(self.validation_prompt or None))

    @property
    def validation_images(self) -> tuple[str, ...]:
        """The images that previews start from."""
        return several(self.validation_image or None)

    @property
    def validation_size(self) -> tuple[int, int] | None:
        """Width and height of previews; None: those of the data."""
        value = self.validation_resolution
        if value is None:
            return None
        sides = re.fullmatch(r"(\d+)(?:x(\d+))?", str(value).replace(" ", ""))
        if sides is None:
            raise ConfigError(
                f"validation_resolution is {value!r}; write WIDTHxHEIGHT, e.g. 1024x768, or one number for a square."
            )
        return int(sides[1]), int(sides[2] or sides[1])

    def density(self) -> Density | None:
        """The density of training times; None: the model's usual one."""
        given = {name: getattr(self, name) for name in PARAMETERS}
        if self.time_density is not None:
            return Density(name=self.time_density, **given)
        if changed := [name for name, value in given.items() if value != getattr(Density, name)]:
            raise ConfigError(
                f"{changed[0]} is {given[changed[0]]}, but time_density is null: set it to {PARAMETERS[changed[0]]!r}, "
                f"or leave {changed[0]} out."
            )
        return None

    def with_steps(self, batches: int) -> "FinetuneConfig":
        """The config with num_train_epochs turned into max_train_steps; `batches` are the micro-steps of an epoch."""
        if self.num_train_epochs == 0:
            return self
        # rounded up: the last epoch is completed
        steps = -(-self.num_train_epochs * batches // self.gradient_accumulation_steps)
        return replace(self, max_train_steps=steps, num_train_epochs=0)

    def seed_of(self, part: str) -> int:
        """The seed for the initial weights of a transformer's adapter, or of the transformer itself (init scratch)."""
        return int(noise.bits(self.seed, *part.encode()))

    def plan(self) -> RoutePlan | None:
        """The routing plan, with the default schedule if tread_config sets none; None: dense."""
        if self.tread_config is None:
            return None
        mapping = tread_mapping(self.tread_config)
        plan = RoutePlan.from_config(mapping)
        if "schedule" not in mapping and self.init == "pretrained":
            plan = replace(plan, schedule=SCHEDULE.of(self.max_train_steps))
        return plan.with_total_steps(self.max_train_steps) if self.max_train_steps else plan

    def data_entries(self) -> list[dict[str, Any]]:
        """The data as a list of mappings, each completed by the ENTRY_DEFAULTS of the config."""
        defaults = {name: getattr(self, name) for name in ENTRY_DEFAULTS if getattr(self, name) is not None}
        return [{**defaults, **entry} for entry in data_configs(self.data)]

    def entries(self) -> list[DataConfig]:
        """The data entries, parsed."""
        return [parse(DataConfig, entry, f"data[{i}]") for i, entry in enumerate(self.data_entries())]
