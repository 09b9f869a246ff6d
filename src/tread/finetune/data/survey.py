"""`tread data CONFIG`: the data as a fine-tune would see it, before anything is encoded.

- Only headers are read, as at the start of a run: which samples there are, in which buckets, what is left out and why.
- Errors that would stop a run (references, sizes, sound, mirrored text) become notes: one report shows them all.
- A model that is not on this disk is not downloaded: buckets then have sides that are multiples of 16.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tread.data.captioned.buckets import Bucket, Crop, bucket_of, crop_of
from tread.data.captioned.entries import DataConfig
from tread.data.captioned.finding import Skipped
from tread.data.captioned.samples import Sample, collect
from tread.errors import ConfigError, DataError, printable
from tread.finetune.data.hashes import content_hash
from tread.finetune.data.prepare import data_checks
from tread.finetune.families import family_class
from tread.finetune.preflight import is_here, open_model
from tread.finetune.settings import FinetuneConfig
from tread.words import counted

MULTIPLE, FRAME_FACTOR = 16, 4
"""`multiple` and `frame_factor` assumed for a model that is not on this disk."""


@dataclass(frozen=True)
class Seen:
    """A sample, its data entry and its bucket."""

    sample: Sample
    config: DataConfig
    bucket: Bucket

    @property
    def crop(self) -> Crop:
        """The crop that a run would encode."""
        random = self.config.crop_style == "random"
        content = content_hash(self.sample.media) if random else None
        return crop_of(self.sample.size, self.bucket, self.config, content or "0" * 16)


@dataclass(frozen=True)
class Survey:
    """The samples of a config's data by bucket, the most frequent bucket first, what is left out, and notes."""

    buckets: dict[Bucket, list[Seen]]
    entries: list[DataConfig]
    skipped: list[Skipped]
    notes: list[str]
    batch: int
    """Samples of a batch in one process."""

    def of(self, entry: int) -> list[Seen]:
        """The samples of one entry."""
        return [one for some in self.buckets.values() for one in some if one.sample.dataset == entry]

    @property
    def count(self) -> int:
        """The number of samples."""
        return sum(map(len, self.buckets.values()))

    @property
    def batches(self) -> int:
        """Batches of an epoch in one process: each has samples of one bucket."""
        return sum(-(-visits(some) // self.batch) for some in self.buckets.values() if visits(some))

    @property
    def summary(self) -> str:
        """Samples, buckets and the length of an epoch in one line."""
        buckets, batches = counted(len(self.buckets), "bucket"), counted(self.batches, "batch")
        return f"{counted(self.count, 'sample')} in {buckets}; an epoch is {batches} of {self.batch} in one process"


def visits(some: Sequence[Seen]) -> int:
    """The number of visits to these samples in an epoch; those of eval entries have none."""
    return sum(one.sample.repeats for one in some if not one.sample.held_out)


def survey(config: FinetuneConfig) -> Survey:
    """Collect the data of a config into buckets and run the checks of a run on it."""
    notes: list[str] = []
    family, name_or_path = None, config.pretrained_model_name_or_path
    if is_here(name_or_path, config.revision):
        family = open_model(config)
    else:
        notes.append(
            f"The model {name_or_path} is not on this disk: buckets are for sides that are multiples of {MULTIPLE}."
        )
    video = family_class(config.model_family).video
    multiple, factor = MULTIPLE, FRAME_FACTOR if video else 1
    if family is not None:
        multiple, factor = family.multiple, family.frame_factor
    configs = config.entries()
    collected = collect(configs, video=video, say=notes.append)
    for check in data_checks(family, collected.samples, configs):
        try:
            check()
        except (ConfigError, DataError) as error:
            notes.append(f"A run refuses this: {error}")
    buckets: dict[Bucket, list[Seen]] = {}
    for sample in collected.samples:
        entry = configs[sample.dataset]
        bucket = bucket_of(sample.size, entry, multiple, frames=sample.frames, frame_factor=factor)
        buckets.setdefault(bucket, []).append(Seen(sample, entry, bucket))
    by_size = dict(sorted(buckets.items(), key=lambda one: (-len(one[1]), one[0])))
    return Survey(by_size, configs, collected.skipped, notes, config.train_batch_size)


def described(survey: Survey) -> str:
    """The text that `tread data` prints."""
    lines = [survey.summary]
    width = max(len(str(bucket)) for bucket in survey.buckets)
    for bucket, some in survey.buckets.items():
        seen = visits(some)
        often = f", {counted(seen, 'visit')} an epoch" if seen != len(some) else ""
        lines.append(f"  {str(bucket).ljust(width)}  {counted(len(some), 'sample')}{often}")
    for index, entry in enumerate(survey.entries):
        if some := survey.of(index):
            lines.append(f"{entry.name}: {'; '.join(facts(entry, some))}")
    if survey.skipped:
        lines.append(f"{counted(len(survey.skipped), 'file')} left out:")
        lines += [f"  {Path(name).name}: {reason}" for name, reason in survey.skipped[:5]]
        more = len(survey.skipped) - 5
        lines += [f"  and {more} more, which --html PAGE lists"] if more > 0 else []
    return printable("\n".join([*lines, *survey.notes]))


def facts(entry: DataConfig, some: Sequence[Seen]) -> list[str]:
    """The properties of an entry's samples, a few words each."""
    captions = Counter(len(one.sample.captions) for one in some)
    fewest, most = min(captions), max(captions)
    masked = sum(one.sample.mask is not None for one in some)
    references = sum(bool(one.sample.references) for one in some)
    told = {
        counted(len(some), "sample"): True,
        "for the validation loss": some[0].sample.held_out,
        f"{entry.repeats} visits each": entry.repeats > 1,
        f"{fewest} captions each" if fewest == most else f"{fewest} to {most} captions each": most > 1,
        f"trigger word {entry.trigger_word!r}": bool(entry.trigger_word),
        f"{masked} with a mask": masked > 0,
        f"{references} with references": references > 0,
        "half of the visits mirrored": bool(entry.horizontal_flip) and not some[0].sample.held_out,
        f"loss weight {entry.loss_weight:g}": entry.loss_weight != 1,
        f"read at {entry.video.frame_rate} frames per second": entry.video.frame_rate is not None,
    }
    return [words for words, is_so in told.items() if is_so]
