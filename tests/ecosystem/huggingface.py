"""Flax models of transformers, tiny and with random weights: one train step each, dropout on.

Not T5: with this JAX it fails by itself, for it calls ``jnp.clip(a_max=…)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformers as hf

from tests.ecosystem.data import ints, normal
from tests.ecosystem.step import Made, Step

TEXT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
VISION = {key: TEXT[key] for key in TEXT if key != "vocab_size"} | {"image_size": 16, "patch_size": 4}
DECODER = {"num_key_value_heads": 2, "max_position_embeddings": 32}


def _entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _made(model: Any, loss: Callable[..., jax.Array], *batch: Any, params: Any = None) -> Made:
    """``loss(apply, batch)``, where ``apply`` is the model with parameters and dropout's key."""
    tx = optax.sgd(0.1)
    params = model.params if params is None else params

    def step(state: Any, *batch: Any) -> Any:
        params, opt_state, key = state
        key, once = jax.random.split(key)

        def loss_fn(params: Any) -> jax.Array:
            apply = lambda *args, **kwargs: model(*args, params=params, dropout_rng=once, train=True, **kwargs)
            return loss(apply, *batch)

        value, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), value

    return Made(step=step, state=(params, tx.init(params), jax.random.PRNGKey(1)), rest=batch)


def _masked(model: Any) -> Made:
    """An encoder's language modelling, with a mask of padding."""
    mask = jnp.asarray(np.arange(12) < 8 + np.arange(8)[:, None] % 5, jnp.int32)
    loss = lambda apply, tokens, mask, labels: _entropy(apply(tokens, attention_mask=mask).logits, labels)
    return _made(model, loss, ints(64, 8, 12), mask, ints(64, 8, 12, seed=1))


def _causal(model: Any, params: Any = None) -> Made:
    loss = lambda apply, tokens: _entropy(apply(tokens).logits[:, :-1], tokens[:, 1:])
    return _made(model, loss, ints(64, 8, 12), params=params)


def _images(model: Any, classes: int = 4) -> Made:
    loss = lambda apply, pixels, labels: _entropy(apply(pixels).logits, labels)
    return _made(model, loss, normal(8, 3, 16, 16).astype(jnp.float32), ints(classes, 8))


def _translation(model: Any) -> Made:
    loss = lambda apply, source, target: _entropy(apply(source, decoder_input_ids=target).logits[:, :-1], target[:, 1:])
    return _made(model, loss, ints(64, 8, 12), ints(64, 8, 10, seed=1))


def bert() -> Made:
    return _masked(hf.FlaxBertForMaskedLM(hf.BertConfig(**TEXT)))


def roberta() -> Made:
    return _masked(hf.FlaxRobertaForMaskedLM(hf.RobertaConfig(**TEXT, max_position_embeddings=32)))


def distilbert() -> Made:
    config = hf.DistilBertConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, hidden_dim=64)
    return _masked(hf.FlaxDistilBertForMaskedLM(config))


def albert() -> Made:
    return _masked(hf.FlaxAlbertForMaskedLM(hf.AlbertConfig(**TEXT, embedding_size=16)))


def electra() -> Made:
    return _masked(hf.FlaxElectraForMaskedLM(hf.ElectraConfig(**TEXT, embedding_size=16)))


def big_bird() -> Made:
    """Attention of all to all; its sparse form asks for long sequences."""
    config = hf.BigBirdConfig(**TEXT, attention_type="original_full", max_position_embeddings=32)
    return _masked(hf.FlaxBigBirdForMaskedLM(config))


def gpt2() -> Made:
    return _causal(hf.FlaxGPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4)))


def gpt_neo() -> Made:
    """Local attention in every other layer."""
    config = hf.GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=32, window_size=4,
        attention_types=[[["global", "local"], 1]],
    )  # fmt: skip
    return _causal(hf.FlaxGPTNeoForCausalLM(config))


def gpt_j() -> Made:
    config = hf.GPTJConfig(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)
    return _causal(hf.FlaxGPTJForCausalLM(config))


def opt() -> Made:
    config = hf.OPTConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, word_embed_proj_dim=32,
        max_position_embeddings=32,
    )  # fmt: skip
    model = hf.FlaxOPTForCausalLM(config)
    return _causal(lambda *args, train, **kwargs: model(*args, deterministic=not train, **kwargs), model.params)


def bloom() -> Made:
    return _causal(hf.FlaxBloomForCausalLM(hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)))


def llama() -> Made:
    return _causal(hf.FlaxLlamaForCausalLM(hf.LlamaConfig(**TEXT, **DECODER)))


def mistral() -> Made:
    return _causal(hf.FlaxMistralForCausalLM(hf.MistralConfig(**TEXT, **DECODER, sliding_window=4)))


def gemma() -> Made:
    return _causal(hf.FlaxGemmaForCausalLM(hf.GemmaConfig(**TEXT, **DECODER, head_dim=8)))


def pegasus() -> Made:
    """Sinusoidal positions, norms first."""
    config = hf.PegasusConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32,
    )  # fmt: skip
    return _translation(hf.FlaxPegasusForConditionalGeneration(config))


def bart() -> Made:
    config = hf.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32,
    )  # fmt: skip
    return _translation(hf.FlaxBartForConditionalGeneration(config))


def whisper() -> Made:
    """Speech: convolutions over mel frames, then an encoder and a decoder."""
    config = hf.WhisperConfig(
        vocab_size=64, num_mel_bins=8, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=16,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = hf.FlaxWhisperForConditionalGeneration(config, input_shape=(1, 8, 32))
    loss = lambda apply, mel, target: _entropy(apply(mel, decoder_input_ids=target).logits[:, :-1], target[:, 1:])
    return _made(model, loss, normal(8, 8, 32).astype(jnp.float32), ints(64, 8, 10))


def vit() -> Made:
    return _images(hf.FlaxViTForImageClassification(hf.ViTConfig(**VISION, num_labels=4)))


def beit() -> Made:
    config = hf.BeitConfig(**VISION, num_labels=4, use_relative_position_bias=True, drop_path_rate=0.1)
    return _images(hf.FlaxBeitForImageClassification(config))


def resnet() -> Made:
    """Batch statistics beside the parameters."""
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4, num_channels=3
    )
    model = hf.FlaxResNetForImageClassification(config, input_shape=(1, 16, 16, 3))

    def step(state: Any, pixels: jax.Array, labels: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            out, new = model(pixels, params={"params": params, "batch_stats": state["batch_stats"]}, train=True)
            return _entropy(out.logits, labels), new["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "batch_stats": stats}, loss

    return Made(step=step, state=model.params, rest=(normal(8, 3, 16, 16).astype(jnp.float32), ints(4, 8)))


def clip() -> Made:
    """Contrastive: the logits of all texts against all images."""
    text = TEXT | {"max_position_embeddings": 16, "projection_dim": 16, "bos_token_id": 1, "eos_token_id": 2}
    config = hf.CLIPConfig(text_config=text, vision_config=VISION | {"projection_dim": 16}, projection_dim=16)
    model = hf.FlaxCLIPModel(config, input_shape=((1, 8), (1, 16, 16, 3)))

    def loss(apply: Any, tokens: jax.Array, pixels: jax.Array) -> jax.Array:
        logits = apply(input_ids=tokens, pixel_values=pixels).logits_per_text
        return (_entropy(logits, jnp.arange(8)) + _entropy(logits.T, jnp.arange(8))) / 2

    return _made(model, loss, ints(64, 8, 8), normal(8, 3, 16, 16).astype(jnp.float32))


def wav2vec2() -> Made:
    """Connectionist temporal classification over a convolved waveform."""
    config = hf.Wav2Vec2Config(
        **TEXT, conv_dim=(16, 16), conv_stride=(4, 4), conv_kernel=(8, 4), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, mask_time_prob=0.0, do_stable_layer_norm=True, feat_extract_norm="layer",
    )  # fmt: skip
    model = hf.FlaxWav2Vec2ForCTC(config, input_shape=(1, 320))

    def loss(apply: Any, wave: jax.Array, labels: jax.Array) -> jax.Array:
        logits = apply(wave).logits
        return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, jnp.zeros(labels.shape)).mean()

    return _made(model, loss, normal(8, 320).astype(jnp.float32), 1 + ints(63, 8, 5))


MAKES = (
    bert, roberta, distilbert, albert, electra, big_bird, gpt2, gpt_neo, gpt_j, opt, bloom, llama, mistral, gemma,
    pegasus, bart, whisper, vit, beit, resnet, clip, wav2vec2,
)  # fmt: skip
STEPS = [Step(make=make, packages=("transformers", "flax")) for make in MAKES]
