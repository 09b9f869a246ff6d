"""`READERS`: every reader of tread, with a whole file of its kind."""

from fuzz import configs, files
from fuzz.reader import Reader, bytes_of, json_of

READERS: dict[str, Reader] = {
    "train config, JSON": Reader("config.json", configs.recipes("recipes/*.yaml"), configs.read_train, 4),
    "train config, YAML": Reader("config.yaml", configs.yaml, configs.read_train, 2),
    "train settings": Reader("argument", configs.arguments, configs.read_arguments, 2),
    "run's own config": Reader("config.yaml", configs.recipes("configs/*.yaml"), configs.read_run, 1),
    "finetune config": Reader("config.json", json_of(configs.FINETUNE), configs.read_finetune, 6),
    "finetune recipes": Reader("config.json", configs.recipes("recipes/finetune/*.yaml"), configs.read_finetune, 3),
    "data entries": Reader("entries.json", json_of(configs.ENTRIES), configs.read_entries, 4),
    "plan": Reader(
        "plan.json", json_of(configs.PLAN, {"tread_config": configs.PLAN}, {"preset": "paper"}), configs.read_plan, 6
    ),
    "plan, YAML": Reader("plan.yaml", json_of(configs.PLAN, {"tread_config": configs.PLAN}), configs.read_plan, 2),
    "checkpoint manifest": Reader(
        f"{files.STEP}/checkpoint.json", lambda rng: json_of(files.manifest())(rng), files.read_manifest, 6
    ),
    "checkpoint model": Reader("model.safetensors", bytes_of(files.model_file), files.read_model, 6),
    "checkpoint optimizer": Reader("optimizer.safetensors", bytes_of(files.optimizer_file), files.read_optimizer, 6),
    "adapter": Reader("adapter.safetensors", bytes_of(files.adapter_file), files.read_adapter, 1),
    "adapter, kohya's": Reader("adapter.safetensors", bytes_of(files.kohya_file), files.read_adapter, 1),
    "shard": Reader("a.tar", bytes_of(lambda: files.tar(files.LATENT)), files.read_shard, 4),
    "shard's arrays": Reader("a.tar", files.members, files.read_shard, 4),
    "shard index": Reader("index.npz", bytes_of(files.index_file), files.read_index, 2),
    "metrics": Reader("metrics.jsonl", bytes_of(files.METRICS.encode), files.read_metrics, 6),
    "cached item": Reader("text/ab/abcd.safetensors", bytes_of(files.model_file), files.read_cached, 4),
    "cached hashes": Reader("hashes-0.json", json_of({"/a": [1, 2, "f"], "/b": [3, 4, "e"]}), files.read_hashes, 4),
    "model_index.json": Reader("model_index.json", json_of(configs.INDEX), configs.read_source, 4),
    "part's config": Reader(
        "transformer/config.json",
        json_of({"_class_name": "FluxTransformer2DModel", "num_layers": 2}),
        configs.read_part,
        1,
    ),
    "statistics": Reader("reference.npz", files.odd_statistics, files.read_statistics, 4),
    "tally": Reader("tally.npz", files.odd_tally, files.read_tally, 4),
    "image batch": Reader("batch.npz", files.odd_batch, files.read_images, 4),
    "image tar": Reader("images.tar", bytes_of(lambda: files.tar(files.image_file())), files.read_images, 2),
    "image": Reader("image.png", bytes_of(files.image_file), files.read_picture, 6),
    "table, CSV": Reader(
        "table.csv", bytes_of(lambda: b"file_name,text\na.png,a cat\nb.png,a dog\n"), files.read_table, 4
    ),
    "table, JSONL": Reader(
        "table.jsonl", bytes_of(lambda: b'{"file_name": "a.png", "text": ["a", "b"]}\n' * 3), files.read_table, 4
    ),
    "prompts": Reader("prompts.json", json_of(["a fox", "a cat"], {"one": "a fox"}), files.read_prompts, 1),
    "measurements": Reader("measurements.json", json_of(files.MEASUREMENTS), files.read_measurements, 1),
    "collectives": Reader("collectives.json", json_of(files.COLLECTIVES), files.read_collectives, 1),
    "weights": Reader("weights.pth", bytes_of(files.weights_file), files.read_weights, 4),
    "DiT's checkpoint": Reader("0.pt", bytes_of(files.training_checkpoint), files.read_training_checkpoint, 4),
}
