"""neuronx-cc as a toolchain: NEFFs for Trainium and Inferentia."""
