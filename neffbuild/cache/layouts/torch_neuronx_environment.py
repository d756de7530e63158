"""The environment in which TorchNeuron finds its filled NEFF cache.

Its key is a hash of the lowered graph, chip, grouping of cores, optimisation level and the text of the flags,
so what was said to it at the compile has to be said again. Nothing published makes a miss an error: it
compiles. From published sources of a build before its release; none of it was run here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from neffbuild.cache.layouts.serving_environment import Setting

CACHE = "TORCH_NEURONX_NEFF_CACHE_DIR"
_DEFAULT = "/tmp/neff_cache"
_FLAGS = "NEURON_CC_FLAGS"
_OF_THE_KEY = {
    "NEURON_PLATFORM_TARGET_OVERRIDE": "the chip, as it is in TorchNeuron's key",
    "NEURON_LOGICAL_NC_CONFIG": "the grouping of cores, in TorchNeuron's key and in the NEFF",
    "NEURON_COMPILER_OPT_LEVEL": "in TorchNeuron's key; said outright, since sources differ on its default",
    _FLAGS: "the compiler's flags: their text, in this order, is in TorchNeuron's key",
}


def torch_neuronx_cache(environment: Mapping[str, str]) -> Path:
    """Where TorchNeuron keeps its NEFFs."""
    return Path(environment.get(CACHE) or _DEFAULT).expanduser()


def torch_neuronx_environment(
    root: Path, told: Mapping[str, str], scratchpad: str | None
) -> tuple[Setting, ...]:
    """What to set, in order. `told` are the variables that the compiles were told with, `scratchpad` is the
    page size that the compiler was given, None where it was given none."""
    settings = [
        Setting(
            CACHE,
            str(root),
            "NEFFs are there. TorchNeuron's key covers no compiler version: a folder for each",
        ),
        Setting("TORCH_NEURONX_NEFF_DISABLE_CACHE", None, "set, the cache is not looked into"),
        Setting(
            "TORCH_NEURONX_COMPILE_ONLY",
            None,
            "the mode that graphs are compiled in without a device: it runs nothing",
        ),
        Setting(
            "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION",
            "1",
            "a compile that fails is an error, and no step runs operator by operator; said outright, since "
            "sources differ on its default",
        ),
        *(Setting(name, told.get(name), why) for name, why in _OF_THE_KEY.items()),
        Setting(
            "TORCH_NEURONX_COMPLEX_DECOMPOSE",
            None,
            "changes the lowered graph, and was not set when the NEFFs were compiled",
        ),
    ]
    if scratchpad is not None:
        settings.append(
            Setting(
                "NEURON_SCRATCHPAD_PAGE_SIZE",
                scratchpad,
                "must be what --hbm-scratchpad-page-size was when the NEFFs were compiled",
            )
        )
    return tuple(settings)
