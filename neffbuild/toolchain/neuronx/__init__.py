"""neuronx-cc as a toolchain: NEFFs for Trainium and Inferentia."""

from neffbuild.toolchain.neuronx.toolchain import NeuronxToolchain

__all__ = ["NeuronxToolchain"]
