"""What models of sound read: waveforms (``input_values``) or spectral features (``input_features``), and their lengths.

A length counts samples of the waveform or frames of features. Convolutions in front of the layers leave fewer
positions, over which the model attends: wav2vec2 leaves one of 320 samples."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

WAVEFORM = "input_values"
FEATURES = "input_features"
WIDTHS = ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins")


class Convolution(NamedTuple):
    """A layer of convolutions over time."""

    kernel: int
    stride: int
    padding: int
    num_read: int
    """Channels."""
    num_written: int


def setting_of(config: object, *names: str) -> Any:
    """Returns the first of these settings that a config has; None: it has none of them."""
    for name in names:
        value = None
        with suppress(Exception):  # configs of transformers raise for values that vary over layers
            value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def reads_sound(model: object) -> bool:
    return getattr(model, "main_input_name", None) in (WAVEFORM, FEATURES)


def length_in_words(model: Any) -> str:
    """Returns the end of a sentence about a model that says which parts of a sound its lengths count; nothing if they count
    tokens, as of Whisper, which reads 30 seconds of every sound."""
    if not reads_sound(model) or is_of_fixed_length(model.config):
        return ""
    units = "samples of the waveform" if model.main_input_name == WAVEFORM else "frames of features"
    stride = stride_of(convolutions(model.config))
    return f"; a length counts {units}, {stride} to a position"


def convolutions(config: Any) -> list[Convolution]:
    """Returns the convolutions in front of a model of sound, as its config states them; without any, an empty list."""
    if isinstance(setting_of(config, "conv_stride"), (list, tuple)):
        num_read = [1, *config.conv_dim[:-1]]
        layers = zip(config.conv_kernel, config.conv_stride, num_read, config.conv_dim, strict=True)
        return [Convolution(kernel, stride, 0, *channels) for kernel, stride, *channels in layers]
    num_layers = setting_of(config, "num_conv_layers")
    if not num_layers:
        return []
    # Speech2Text: gated, so the next layer reads half of what a layer writes
    num_inner = num_layers - 1
    num_read = [config.input_feat_per_channel, *[config.conv_channels // 2] * num_inner]
    num_written = [*[config.conv_channels] * num_inner, 2 * config.d_model]
    layers = zip(config.conv_kernel_sizes, num_read, num_written, strict=True)
    return [Convolution(kernel, 2, kernel // 2, *channels) for kernel, *channels in layers]


def stride_of(layers: Sequence[Convolution]) -> int:
    """Returns how many units of length become one position; without convolutions 1."""
    return math.prod(layer.stride for layer in layers)


def shortest_input(layers: Sequence[Convolution], num_positions: int) -> int:
    """Returns the smallest length that these convolutions reduce to so many positions.

    >>> shortest_input([Convolution(10, 5, 0, 1, 8), Convolution(3, 2, 0, 8, 8)], 2)
    30
    """
    length = num_positions
    for layer in reversed(layers):
        length = (length - 1) * layer.stride + layer.kernel - 2 * layer.padding
    return length


def positions_of_input(layers: Sequence[Convolution], length: int) -> int:
    """Returns how many positions, at least 1, these convolutions leave of an input.

    >>> layers = [Convolution(10, 5, 0, 1, 8), Convolution(3, 2, 0, 8, 8)]
    >>> positions_of_input(layers, 30), positions_of_input(layers, 29)
    (2, 1)
    """
    for layer in layers:
        length = (length + 2 * layer.padding - layer.kernel) // layer.stride + 1
    return max(length, 1)


def is_of_fixed_length(config: object) -> bool:
    """Returns whether every sample is padded to one number of frames, as Whisper's are to 30 seconds."""
    num_positions = setting_of(config, "max_source_positions")
    return num_positions is not None and setting_of(config, "num_mel_bins") is not None


def sound_inputs(model: Any, num_samples: int, length: int) -> dict[str, torch.Tensor]:
    """Returns silence and its mask, as arguments of a model of sound: float (num_samples, length), or features of shape
    (num_samples, length, width); of fixed length (num_samples, width, frames), without a mask."""
    config = model.config
    dtype = next(model.parameters()).dtype
    mask = torch.ones(num_samples, length, dtype=torch.long)
    if model.main_input_name == WAVEFORM:
        values = torch.zeros(num_samples, length, dtype=dtype)
        return {WAVEFORM: values, "attention_mask": mask}
    width = setting_of(config, *WIDTHS)
    if is_of_fixed_length(config):
        num_frames = 2 * config.max_source_positions
        return {FEATURES: torch.zeros(num_samples, width, num_frames, dtype=dtype)}
    values = torch.zeros(num_samples, length, width, dtype=dtype)
    return {FEATURES: values, "attention_mask": mask}
