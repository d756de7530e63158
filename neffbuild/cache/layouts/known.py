"""The layouts there are, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from neffbuild.cache.layouts.kernels import NKI_ROOT
from neffbuild.cache.layouts.layout import Layout
from neffbuild.cache.layouts.libneuronxla import Libneuronxla
from neffbuild.cache.layouts.torch_neuronx import TorchNeuronx
from neffbuild.cache.layouts.vllm_neuron import VllmNeuron
from neffbuild.config.errors import ConfigError

_MADE: dict[str, Callable[[Path], Layout]] = {
    "vllm-neuron": VllmNeuron,
    "torch-neuronx": lambda _: TorchNeuronx(),
    "libneuronxla": lambda _: Libneuronxla(),
}
NAMES = tuple(_MADE)


def layout_named(name: str, nki_root: Path = Path(NKI_ROOT)) -> Layout:
    """A layout by its name. `nki_root` is where kernel binaries lie that graphs name below `NKI_ROOT`.
    Raises `ConfigError`."""
    if name not in _MADE:
        raise ConfigError(
            f"there is no layout {name!r}; allowed: {', '.join(NAMES)}",
            field="--layout",
            value=name,
        )
    return _MADE[name](nki_root)
