"""The commands of training from scratch: `train`, `sample`, `eval`, `encode`."""

from pathlib import Path

from tread.commands import make_parser


def train(arguments: list[str]) -> None:
    """train a model from scratch, dense or routed"""
    if {"-h", "--help"} & set(arguments):
        from tread.report.settings import train_help

        print(train_help())
        return
    from tread.pretrain.config import compose
    from tread.pretrain.run import pretrain

    pretrain(compose(arguments))


def sample(arguments: list[str]) -> None:
    """draw images from a trained run"""
    parser = make_parser("sample", sample)
    add = parser.add_argument
    add("run", type=Path, help="the folder of a run, or of one of its checkpoints")
    add("--classes", help="class labels or names, e.g. 0-9 or 1,5,cat (default: the first ten)")
    add("--per-class", type=int, help="images per class (default: 8)")
    add("--guidance", type=float, help="guidance scale; 1: none (default: the run's)")
    add("--interval", type=float, nargs=2, metavar=("LOW", "HIGH"), help="guide only in these levels")
    add(
        "--guidance-kind",
        choices=("cfg", "sg", "cfg+sg", "ag", "ag+sg"),
        help="what the weak branch lacks: its label (cfg), tokens (sg), training (ag) (default: the run's)",
    )
    add("--strong-ratio", type=float, help="tokens the strong branch drops (default: the run's)")
    add("--weak-ratio", type=float, help="tokens the weak branch drops, with sg (default: the run's)")
    add(
        "--ratio-schedule",
        choices=("constant", "cosine"),
        help="cosine: both ratios fall to 0 along the way (default: the run's)",
    )
    add("--weak", type=Path, metavar="RUN", help="with ag: a run or an earlier checkpoint's folder")
    add("--steps", type=int, help="solver steps (default: the run's)")
    add("--solver", choices=("euler", "heun"), help="default: the run's")
    add("--churn", type=float, help="EDM's S_churn: fresh noise added along the way; 0: none (default: the run's)")
    levels = ("LOW", "HIGH")
    add("--churn-interval", type=float, nargs=2, metavar=levels, help="EDM's S_tmin and S_tmax (default: the run's)")
    add("--churn-noise", type=float, help="EDM's S_noise (default: the run's)")
    add("--seed", type=int, help="seed of all images (default: 0)")
    add("--seeds", metavar="RANGE", help="one image per seed, e.g. 0-49999; classes take turns (default: all of them)")
    add("--batch-size", type=int, default=64, help="(default: %(default)s)")
    add("--no-ema", dest="averaged", action="store_false", help="the trained weights, not their average")
    add("--precision", choices=("bf16", "float32"), help="of the network (default: the run's, as in its previews)")
    add("--vae", help="autoencoder (folder or hub id) that decodes a latent run's samples (default: the run's)")
    add("--out", type=Path, help="folder for the PNGs and grid.png (default: RUN/generated)")
    from tread.pretrain.sample import sample_run

    grid = sample_run(**vars(parser.parse_args(arguments)))
    print(f"grid: {grid}")


def evaluate(arguments: list[str]) -> None:
    """compare images with a reference: FID and other figures"""
    parser = make_parser("eval", evaluate)
    add = parser.add_argument
    add("samples", type=Path, help="a folder of images, a .tar or an .npz")
    add("--ref", type=Path, help="the reference: the same, or an .npz with mu and sigma")
    add("--features", default="inception", help="inception, efflite0 or dinov2 (default: inception, for FID)")
    add("--weights", help="the extractor's weights: a file or URL (dinov2: a folder or hub id)")
    add("--batch-size", type=int, default=64, help="(default: %(default)s)")
    add("--count", type=int, metavar="N", help="only the first N images of SAMPLES")
    add("--frechet-only", action="store_true", help="no precision, recall, KID: keeps no features")
    add("--work", type=Path, help="folder for what was measured: an interrupted run goes on there")
    add("--save", type=Path, metavar="FILE.npz", help="write the samples as a reference batch")
    add("--device", help="default: cuda where there is one")
    add("--json", action="store_true", help="print JSON instead of a table")
    options = vars(parser.parse_args(arguments))
    if options["ref"] is None and options["save"] is None:
        parser.error("give --ref, or --save to write a reference")
    from tread.report.scores import run_evaluation

    run_evaluation(**options)


def encode(arguments: list[str]) -> None:
    """turn a folder of images into latent shards"""
    parser = make_parser("encode", encode)
    add = parser.add_argument
    add("images", type=Path, help="a folder of images, one subfolder per class")
    add("--vae", required=True, help="a diffusers autoencoder: local folder or hub id")
    add("--out", type=Path, required=True, help="folder for the tars; an interrupted run goes on there")
    add("--size", type=int, default=256, help="pixels, square (default: %(default)s)")
    add("--batch-size", type=int, default=16, help="(default: %(default)s)")
    add("--kind", choices=("moments", "sample"), default="moments", help="(default: %(default)s)")
    add("--shard-size", type=int, default=1000, help="images per tar (default: %(default)s)")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="precision of the VAE (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="of --kind sample and --shuffle (default: %(default)s)")
    add("--shuffle", action="store_true", help="images in a random order, for training with data.window")
    add("--rank", type=int, help="of --world processes that share the work (default: torchrun's, else 0 of 1)")
    add("--world", type=int, help="how many there are, on all machines; they need to share nothing but --out")
    from tread.data.shards import encode as run

    print(run(**vars(parser.parse_args(arguments))))
