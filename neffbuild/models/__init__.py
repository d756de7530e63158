"""The reference paged-KV decoder that the inductor toolchain compiles."""
