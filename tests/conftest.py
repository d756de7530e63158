"""What every test runs under."""

from hypothesis import HealthCheck, settings

# A slow machine is not a failed test: how long an example takes says nothing about what it found.
settings.register_profile(
    "neffbuild", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("neffbuild")
