"""Everything that tests train on, at tiny size and made by code: nothing is downloaded, nothing lies beside the clone.

- `tokenizers`, `text_encoders`, `autoencoders`, `transformers`: parts of the real classes with random weights.
- `pipelines`: whole stock pipelines made of those parts, one file per family.
- `pictures`: folders of pictures and clips with captions.
- Every builder seeds itself, so a part has the same weights in every process.
"""
