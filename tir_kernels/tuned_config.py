"""The fastest configuration that a tuning log has for a problem."""

from dataclasses import dataclass

from tir_kernels.template import KernelConfig, Template


@dataclass(frozen=True)
class TunedConfig:
    """A template's configuration, its measured microseconds, and their source: the GPU, the record's file and line."""

    template: Template
    config: KernelConfig
    us: float
    gpu: str
    location: str

    @property
    def reason(self) -> str:
        """Why it was chosen, as reports show it: the time, the GPU, and the record's file and line."""
        return f"tuned: {self.us:.1f} µs on {self.gpu} ({self.location})"
