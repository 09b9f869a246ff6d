"""Text encoders, and CLIP's image encoder, with two layers and the vocabularies of `tokenizers`."""

from typing import Any

from tests.tiny import tokenizers
from tests.tiny.weights import randomised

ATTENTION: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2}


def clip_text(
    *, hidden: int = 16, projection: bool = False, positions: int = 77, seed: int = 0, tokenizer: Any = None
) -> Any:
    """CLIPTextModel, or CLIPTextModelWithProjection; its pooled text has `hidden` numbers."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    tokenizer = tokenizer or tokenizers.clip_tokenizer()
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        projection_dim=hidden,
        intermediate_size=2 * hidden,
        max_position_embeddings=positions,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **ATTENTION,
    )
    return randomised(CLIPTextModelWithProjection(config) if projection else CLIPTextModel(config), seed)


def clip_vision() -> dict[str, Any]:
    """CLIPVisionModel with its processor, by their names in a pipeline."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(hidden_size=16, intermediate_size=32, image_size=32, patch_size=16, **ATTENTION)
    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return {"image_encoder": randomised(CLIPVisionModel(config)), "image_processor": processor}


def siglip_vision() -> dict[str, Any]:
    """SiglipVisionModel with its processor, by their names in a pipeline."""
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    config = SiglipVisionConfig(hidden_size=16, intermediate_size=32, image_size=32, patch_size=16, **ATTENTION)
    processor = SiglipImageProcessor(size={"height": 32, "width": 32})
    return {"image_encoder": randomised(SiglipVisionModel(config)), "feature_extractor": processor}


def t5_text(*, hidden: int = 16, multilingual: bool = False, tokenizer: Any = None) -> Any:
    """T5EncoderModel, or UMT5EncoderModel, whose layers each have their own position biases."""
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    config: dict[str, Any] = {
        "vocab_size": len(tokenizer or tokenizers.t5_tokenizer()),
        "d_model": hidden,
        "d_kv": hidden // 2,
        "d_ff": 2 * hidden,
        "num_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
    }
    model = UMT5EncoderModel(UMT5Config(**config)) if multilingual else T5EncoderModel(T5Config(**config))
    return randomised(model)


def byt5_text() -> Any:
    """T5EncoderModel over bytes."""
    from transformers import ByT5Tokenizer

    return t5_text(tokenizer=ByT5Tokenizer())


def gemma_text() -> Any:
    """Gemma2Model."""
    from transformers import Gemma2Config, Gemma2Model

    config = Gemma2Config(
        vocab_size=len(tokenizers.gemma_tokenizer()),
        hidden_size=16,
        intermediate_size=32,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        **ATTENTION,
    )
    return randomised(Gemma2Model(config))


def gemma3_text() -> Any:
    """Gemma3ForConditionalGeneration."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {"vocab_size": len(tokenizers.gemma_tokenizer()), **_small(hidden=16, layers=2), "query_pre_attn_scalar": 8}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 8, "intermediate_size": 8, "image_size": 32}
    config: Any = Gemma3Config(text_config=text, vision_config={**vision, "patch_size": 16, **ATTENTION})
    return randomised(Gemma3ForConditionalGeneration(config))


def qwen_text(*, alone: bool = False, layers: int = 2) -> Any:
    """Qwen2_5_VLForConditionalGeneration, or its text model `alone`."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLTextModel

    tokenizer = tokenizers.qwen_tokenizer()
    text = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
        "tie_word_embeddings": True,
        **ATTENTION,
        "num_hidden_layers": layers,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    names = {"image_token_id": "<|image_pad|>", "vision_start_token_id": "<|vision_start|>"}
    tokens = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    config: Any = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    return randomised(Qwen2_5_VLTextModel(config.text_config) if alone else Qwen2_5_VLForConditionalGeneration(config))


def mistral_text() -> Any:
    """Mistral3ForConditionalGeneration, as deep as the layers that FLUX.2 reads."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    text = {
        "model_type": "mistral",
        "vocab_size": len(tokenizers.mistral_tokenizer()),
        **_small(hidden=8, layers=31),
        "sliding_window": None,
    }
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}
    vision = {"model_type": "pixtral", **sizes, "image_size": 32, "patch_size": 16}
    return randomised(Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision)))


def qwen3_text(*, hidden: int = 8, layers: int = 28) -> Any:
    """Qwen3ForCausalLM, as deep as the layers that FLUX.2 klein reads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tokenizers.qwen3_tokenizer()
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3Config(vocab_size=len(tokenizer), **ends, **_small(hidden=hidden, layers=layers))
    return randomised(Qwen3ForCausalLM(config))


def qwen3_vl_text(*, whole: bool = False) -> Any:
    """Qwen3VLModel, or Qwen3VLForConditionalGeneration if `whole`."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLModel

    rotation = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {"vocab_size": len(tokenizers.qwen3_tokenizer()), **_small(hidden=16, layers=4), "rope_parameters": rotation}
    del text["tie_word_embeddings"]
    sizes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    vision = {**sizes, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config: Any = Qwen3VLConfig(text_config=text, vision_config=vision)
    return randomised(Qwen3VLForConditionalGeneration(config) if whole else Qwen3VLModel(config))


def t5_gemma_text() -> Any:
    """T5GemmaEncoder, with the config of a whole T5Gemma, as PRX's pipeline reads it."""
    from transformers import T5GemmaConfig
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    module = {"vocab_size": len(tokenizers.gemma_tokenizer()), **_small(hidden=16, layers=2)}
    module |= {"query_pre_attn_scalar": 8}
    config = T5GemmaConfig(encoder=module, decoder=module)
    encoder: Any = randomised(T5GemmaEncoder(config.encoder))
    encoder.config = config
    return encoder


def llama3_text() -> Any:
    """LlamaForCausalLM with three layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizers.llama3_tokenizer()
    ends: dict[str, Any] = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return randomised(LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **ends, **_small(hidden=16, layers=3))))


def _small(*, hidden: int, layers: int) -> dict[str, Any]:
    """The sizes of a language model with two heads that share one key."""
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": hidden // 2,
        "tie_word_embeddings": True,
    }


def qwen_processor(name: str = "Qwen2VLProcessor", **options: Any) -> Any:
    """Qwen2VLProcessor or another of the same parts, without videos: those need torchvision."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.processing_utils import ProcessorMixin

    def init(self: Any, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([self.image_token, self.video_token])
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    processor: Any = getattr(transformers, name)
    processor.__init__ = init
    return processor(Qwen2VLImageProcessorPil(min_pixels=28 * 28), tokenizers.qwen_tokenizer(), **options)


def llama_text() -> Any:
    """LlamaModel with four layers: pipelines read the states before the last two."""
    from transformers import LlamaConfig, LlamaModel

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return randomised(
        LlamaModel(LlamaConfig(vocab_size=len(tokenizers.llama_tokenizer()), num_hidden_layers=4, **sizes))
    )


def llava() -> dict[str, Any]:
    """LlavaForConditionalGeneration, whose Llama has four layers, with its tokenizer and processor, by their names."""
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration

    tokenizer = tokenizers.llava_tokenizer()
    text = {"model_type": "llama", "vocab_size": len(tokenizer), **_small(hidden=16, layers=4)}
    vision = {"hidden_size": 8, "intermediate_size": 8, "image_size": 336, "patch_size": 14, **ATTENTION}
    config: Any = LlavaConfig(
        text_config=text,
        vision_config={"model_type": "clip_vision_model", **vision},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    config.pad_token_id = tokenizer.pad_token_id
    processor = CLIPImageProcessor(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
    model = randomised(LlavaForConditionalGeneration(config))
    return {"text_encoder": model, "tokenizer": tokenizer, "image_processor": processor}
