"""AOTInductor on the CPU as a toolchain, with the reference model as what it compiles."""

from neffbuild.toolchain.inductor.toolchain import InductorToolchain

__all__ = ["InductorToolchain"]
