"""Keras 3 on JAX: the step of its guide, `stateless_call` and `stateless_apply` on lists of variables."""

from __future__ import annotations

from typing import Any

import jax
import keras
from keras import layers

from tests.ecosystem.data import ints, normal
from tests.ecosystem.step import Made, steps


def _made(model: Any, loss: Any, x: Any, y: Any, optimizer: Any = None) -> Made:
    optimizer = optimizer or keras.optimizers.Adam(1e-3)
    model(x, training=True)
    optimizer.build(model.trainable_variables)
    values = lambda variables: [v.value for v in variables]

    def loss_and_state(trainable: Any, fixed: Any, x: Any, y: Any) -> Any:
        out, fixed = model.stateless_call(trainable, fixed, x, training=True)
        return loss(y, out), fixed

    def step(state: Any, x: Any, y: Any) -> Any:
        trainable, fixed, slots = state
        (value, fixed), grads = jax.value_and_grad(loss_and_state, has_aux=True)(trainable, fixed, x, y)
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        return (trainable, fixed, slots), value

    state = values(model.trainable_variables), values(model.non_trainable_variables), values(optimizer.variables)
    return Made(step=step, state=state, rest=(x, y))


ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SGD = lambda: keras.optimizers.SGD(0.1, momentum=0.9)


def mlp() -> Made:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [layers.Dense(32, activation="relu"), layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(8)]
    )
    return _made(model, ENTROPY, normal(16, 16).astype("float32"), ints(8, 16), SGD())


def cnn() -> Made:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    x = layers.MaxPooling2D()(x)
    x = layers.SeparableConv2D(16, 3, padding="same", activation="relu")(x)
    x = layers.LayerNormalization()(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, layers.Dense(10)(x))
    return _made(model, ENTROPY, normal(8, 16, 16, 3).astype("float32"), ints(10, 8), SGD())


def lstm() -> Made:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [layers.Embedding(64, 16), layers.Bidirectional(layers.LSTM(16)), layers.Dense(1, activation="sigmoid")]
    )
    return _made(model, keras.losses.BinaryCrossentropy(), ints(64, 16, 10), ints(2, 16, 1), SGD())


def attention() -> Made:
    keras.utils.set_random_seed(0)
    tokens = keras.Input((12,), dtype="int32")
    x = layers.Embedding(64, 32)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 8, dropout=0.1)(x, x, use_causal_mask=True))
    x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(64, activation="gelu")(x)))
    model = keras.Model(tokens, layers.Dense(64)(x))
    return _made(model, ENTROPY, ints(64, 8, 12), ints(64, 8, 12, seed=1), SGD())


def mixed_precision() -> Made:
    """bfloat16 compute with float32 variables, and clipped AdamW with a schedule."""
    keras.utils.set_random_seed(0)
    dense = [layers.Dense(n, activation="relu", dtype="mixed_bfloat16") for n in (32, 32)]
    model = keras.Sequential([*dense, layers.Dense(8, dtype="float32")])
    schedule = keras.optimizers.schedules.CosineDecay(1e-2, 10)
    return _made(
        model, ENTROPY, normal(16, 16).astype("float32"), ints(8, 16), keras.optimizers.SGD(schedule, clipnorm=1.0)
    )


def image_augmentation() -> Made:
    """Random flips and rotations as layers, then a small autoencoder."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            layers.RandomFlip(),
            layers.RandomTranslation(0.1, 0.1),
            layers.Conv2D(8, 3, strides=2, padding="same", activation="silu"),
            layers.Conv2DTranspose(3, 3, strides=2, padding="same"),
        ]
    )
    x = normal(8, 16, 16, 3).astype("float32")
    return _made(model, keras.losses.MeanSquaredError(), x, x, SGD())


STEPS = [
    *steps("keras")(mlp, cnn, lstm, attention, image_augmentation),
    *steps("keras", rounding=2**-8)(mixed_precision),
]
